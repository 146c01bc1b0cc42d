"""Gradient variance at the model: every number against all batches, all draws and all federations without a client."""

import itertools
import weakref

import numpy as np
import pytest
import torch
from federations import QUADRATIC, Point, tiny, train
from torch.testing import assert_close

from fedncv.config import RunConfig
from fedncv.data import Clients, Dataset
from fedncv.engine import gradients, sequential
from fedncv.engine.gradients import Gradients
from fedncv.engine.problem import arrivals, build, start
from fedncv.engine.processes import ProcessesEngine
from fedncv.engine.sequential import SequentialEngine
from fedncv.engine.stacked_scores import ScoringEngine
from fedncv.methods.base import Batch
from fedncv.observatory import at_model
from fedncv.observatory.at_model import Draw, Scalars

SIZES = (8, 6, 4, 7)  # of which a quarter tests: 6, 5, 3 and 6 samples train


def sample_gradients(problem, state):
    """g_ui of every client by plain autograd, a sample at a time."""
    found = []
    for arrival in arrivals(problem, state, np.arange(problem.federation.num_clients)):
        u, down, buffers_R, kept = arrival
        ask = problem.ask(u, buffers_R, state.round)
        y_P, _ = problem.method.begin(ask, down, kept.own)
        _, offset_C = problem.method.predict(ask, y_P, down, kept.own)
        mine = []
        for i in problem.clients.train[u]:
            x = problem.dataset.inputs(torch.tensor([i]), problem.dtype)
            batch = Batch(x, problem.dataset.y[[i]], x.new_ones(1), 0)
            mine.append(ask.grad(y_P, batch, offset_C=offset_C, mode="eval").numpy())
        found.append(np.stack(mine))
    return found


def batches(g_nP, b):
    """The mean gradient of every batch of b."""
    b = min(b, len(g_nP))
    return np.stack([g_nP[list(some)].mean(0) for some in itertools.combinations(range(len(g_nP)), b)])


def mean_square(a):
    return float(np.square(a).sum(-1).mean())


@pytest.fixture(scope="module")
def probed():
    """A trained federation of four, its split, and the gradient of every sample."""
    problem = tiny("fedavg+prior", sizes=SIZES, per_round=2, batch_size=2)
    state = train(problem, rounds=2)
    return at_model.measure(problem, state), sample_gradients(problem, state)


def weights(g):
    n_N = np.array([len(each) for each in g], dtype=float)
    return n_N / n_N.sum()


def test_signal_is_the_squared_norm_of_the_gradient_of_all_samples(probed):
    measured, g = probed
    assert measured.signal.value == pytest.approx(np.square(np.concatenate(g).mean(0)).sum(), rel=1e-10)


def test_within_is_the_variance_over_all_batches(probed):
    measured, g = probed
    each = [mean_square(batches(g_u, 2) - g_u.mean(0)) for g_u in g]
    assert measured.within.value == pytest.approx(weights(g) @ each, rel=1e-10)


def test_within_and_between_are_the_variance_of_a_batch_of_a_client_drawn_by_its_size(probed):
    """The law of total variance, by enumeration of both draws at once."""
    measured, g = probed
    g_P = np.concatenate(g).mean(0)
    total = weights(g) @ [mean_square(batches(g_u, 2) - g_P) for g_u in g]
    assert measured.within.value + measured.between.value == pytest.approx(total, rel=1e-10)
    assert measured.snr.value == pytest.approx(np.square(g_P).sum() / total, rel=1e-10)


def test_sampling_is_the_variance_over_all_draws_of_clients(probed):
    measured, g = probed
    g_NP, p_N = np.stack([g_u.mean(0) for g_u in g]), weights(g)
    draws = [list(some) for some in itertools.combinations(range(4), 2)]
    estimates = np.stack([(p_N[some] * 4 / 2) @ g_NP[some] for some in draws])
    assert estimates.mean(0) == pytest.approx(p_N @ g_NP, rel=1e-10)
    assert measured.sampling.value == pytest.approx(mean_square(estimates - p_N @ g_NP), rel=1e-10)


def test_sampling_and_batches_are_the_variance_over_all_draws_of_clients_and_batches(probed):
    measured, g = probed
    p_N = weights(g)
    by_batch = [batches(g_u, 2) for g_u in g]
    total = 0.0
    for u, v in itertools.combinations(range(4), 2):
        pairs = p_N[u] * 2 * by_batch[u][:, None] + p_N[v] * 2 * by_batch[v][None]
        total += mean_square(pairs - np.concatenate(g).mean(0)) / 6
    assert measured.sampling.value + measured.batches.value == pytest.approx(total, rel=1e-10)


def test_clients_that_do_not_answer_are_enumerated_too():
    """All draws of 3 of 4, each with all answers: probability q for each client that does."""
    problem = tiny("fedavg", sizes=SIZES, per_round=3, batch_size=2, dropout=0.3)
    state = start(problem)
    measured, g = at_model.measure(problem, state), sample_gradients(problem, state)
    g_NP, p_N, q = np.stack([g_u.mean(0) for g_u in g]), weights(g), 0.7
    W_N = [mean_square(batches(g_u, 2) - g_u.mean(0)) for g_u in g]
    sampling = of_batches = 0.0
    for drawn in itertools.combinations(range(4), 3):
        for answers in itertools.product([False, True], repeat=3):
            chance = np.prod([q if a else 1 - q for a in answers]) / 4
            there = [u for u, a in zip(drawn, answers, strict=True) if a]
            omega = p_N[there] * 4 / (3 * q)
            sampling += chance * np.square(omega @ g_NP[there] - p_N @ g_NP).sum()
            of_batches += chance * sum(w**2 * W_N[u] for w, u in zip(omega, there, strict=True))
    assert measured.sampling.value == pytest.approx(sampling, rel=1e-10)
    assert measured.batches.value == pytest.approx(of_batches, rel=1e-10)


def quadratic_federation(b, *, hessian, x, **config):
    """Client u holds samples hessian/2 (x - b_ui)^2: gradients hessian (x - b_ui)."""
    y = torch.tensor([[hessian, b_ui] for b_u in b for b_ui in b_u], dtype=torch.float64)
    ends = np.cumsum([len(b_u) for b_u in b])
    parts = [np.arange(end - len(b_u), end) for b_u, end in zip(b, ends, strict=True)]
    return build(
        RunConfig(dtype="float64", clients=len(b), **config),
        data=Dataset("quadratics", torch.zeros(len(y), 1, dtype=torch.float64), y, 1),
        clients=Clients(parts, [np.array([], dtype=np.int64)] * len(b)),
        model=lambda _shape, _outputs: Point(x),
        task=QUADRATIC,
    )


def test_a_quadratic_has_the_closed_form():
    """Hessian 3, noise b: g_u = 3 (x - mean b_u), whatever x; the numbers below are from a page of algebra.

    b = (0, 2, 4), (5, 7): means 2 and 6, p = 3/5 and 2/5, mean of all 18/5. Batches of 2 of the first:
    b-means 1, 2, 3 around 2, variance 2/3; of the second: one batch, 0. Draws of 1 of 2: N p_u b_u = 12/5, 24/5.
    """
    problem = quadratic_federation([[0.0, 2.0, 4.0], [5.0, 7.0]], hessian=3.0, x=2.6, per_round=1, batch_size=2)
    measured = at_model.measure(problem, start(problem))
    assert measured.signal.value == pytest.approx(9 * (2.6 - 3.6) ** 2)
    assert measured.within.value == pytest.approx(9 * 3 / 5 * 2 / 3)
    assert measured.between.value == pytest.approx(9 * (3 / 5 * 1.6**2 + 2 / 5 * 2.4**2))
    g_1, g_2 = 2 * 0.6 * 3 * 0.6, 2 * 0.4 * 3 * -3.4  # N p_u g_u
    assert measured.sampling.value == pytest.approx((g_1 - g_2) ** 2 / 4)
    assert measured.batches.value == pytest.approx(2 * 0.6**2 * 9 * 2 / 3)
    assert measured.within.low is None  # two clients: without one of them there is no spread to speak of


def test_within_and_between_of_a_quadratic_do_not_depend_on_the_model():
    b = [[0.0, 2.0, 4.0], [5.0, 7.0], [1.0, 1.5]]
    here, there = (quadratic_federation(b, hessian=2.0, x=x, per_round=2, batch_size=2) for x in (0.0, 10.0))
    first, second = (at_model.measure(problem, start(problem)) for problem in (here, there))
    assert first.within.value == pytest.approx(second.within.value)
    assert first.between.value == pytest.approx(second.between.value)
    assert first.signal.value != pytest.approx(second.signal.value)


# ---- limits --------------------------------------------------------------------------------------------


def made_up(num_clients=6, seed=0, equal=False):
    rng = np.random.default_rng(seed)
    n_N = np.full(num_clients, 9.0) if equal else rng.integers(2, 40, num_clients).astype(float)
    return Gradients(torch.from_numpy(n_N), torch.from_numpy(rng.normal(size=(num_clients, 5)) + 0.5),
                     torch.from_numpy(rng.random((num_clients, 2)) * n_N[:, None]))  # fmt: skip


class TwoLayers:
    shapes = (torch.Size([2]), torch.Size([3]))


def split_of(found, **draw):
    return at_model.split_of(at_model.added(at_model.scalars(found, TwoLayers)), Draw(**({"batch": 4} | draw)))


def test_asking_everyone_has_no_sampling_variance():
    assert split_of(made_up(), per_round=6).sampling.value == pytest.approx(0.0, abs=1e-14)
    assert split_of(made_up(), per_round=5).sampling.value > 0.01


def test_a_batch_of_everything_has_no_variance():
    assert split_of(made_up(), per_round=2, batch=40).within.value == 0.0
    assert split_of(made_up(), per_round=2, batch=30).within.value > 0.0


def test_clients_that_agree_have_nothing_between_them():
    found = made_up(equal=True)
    alike = found._replace(mean_NP=found.mean_NP[:1].expand(6, 5))
    measured = split_of(alike, per_round=2)
    assert measured.between.value == pytest.approx(0.0, abs=1e-14)
    assert measured.sampling.value == pytest.approx(0.0, abs=1e-14)


def test_with_equal_sizes_sampling_is_between_by_the_factor_of_the_draw():
    """p = 1/N: sampling = (1 - m/N) N / (m (N - 1)) between."""
    measured = split_of(made_up(equal=True), per_round=2)
    assert measured.sampling.value == pytest.approx((1 - 2 / 6) * 6 / (2 * 5) * measured.between.value, rel=1e-10)


def test_a_client_without_samples_is_drawn_and_counts_for_nothing_else():
    found = made_up()
    more = Gradients(*(torch.cat([part, torch.zeros_like(part[:1])]) for part in found))
    ours, theirs = split_of(found, per_round=3), split_of(more, per_round=3)
    for name in ("signal", "within", "between"):
        assert getattr(theirs, name).value == pytest.approx(getattr(ours, name).value)
    g_NP, p_N = more.mean_NP.numpy(), (more.sizes_N / more.sizes_N.sum()).numpy()
    estimates = [p_N[list(s)] * 7 / 3 @ g_NP[list(s)] for s in itertools.combinations(range(7), 3)]
    assert theirs.sampling.value == pytest.approx(mean_square(np.stack(estimates) - p_N @ g_NP))


def test_where_draws_are_not_uniform_only_what_does_not_depend_on_them_is_there():
    problem = tiny("fedavg", sizes=SIZES, per_round=2, sampling="weighted")
    measured = at_model.measure(problem, start(problem))
    assert measured.sampling is None
    assert measured.batches is None
    assert set(at_model.row(measured)) == {
        f"variance_{name}{end}" for name in ("signal", "within", "between", "snr") for end in ("", "_low", "_high")
    }


# ---- intervals -----------------------------------------------------------------------------------------


def test_leaving_a_client_out_gives_the_numbers_of_the_federation_without_it():
    found, draw = made_up(), Draw(batch=4, per_round=3, answering=0.8)
    whole = at_model.added(at_model.scalars(found, TwoLayers))
    others = at_model.numbers(at_model.left_out(whole, 4), draw)
    for u in range(6):
        rest = [v for v in range(6) if v != u]
        without = split_of(Gradients(*(part[rest] for part in found)), per_round=3, answering=0.8)
        for name, number in without._asdict().items():
            assert others[name][u] == pytest.approx(number.value, rel=1e-10), (name, u)


def test_the_interval_is_the_jackknife_of_the_logarithm():
    """Values without each: e^-1, 1, e. Deviations -1, 0, 1; se^2 = 2/3 * 2; t(0.975, 2) = 4.3027."""
    low, high = at_model.jackknife(2.0, np.exp([-1.0, 0.0, 1.0]))
    assert np.log(high / 2) == pytest.approx(4.3027 * np.sqrt(4 / 3), rel=1e-4)
    assert low * high == pytest.approx(4.0)


def test_every_number_has_its_own_interval():
    found = made_up()
    draw = Draw(batch=4, per_round=3)
    others = at_model.numbers(at_model.left_out(at_model.added(at_model.scalars(found, TwoLayers)), 4), draw)
    for name, number in split_of(found, per_round=3)._asdict().items():
        assert (number.low, number.high) == at_model.jackknife(number.value, others[name]), name
        assert number.low < number.value < number.high


def test_where_there_is_nothing_to_measure_there_is_no_interval():
    assert at_model.jackknife(0.0, np.zeros(5)) == (None, None)
    one_holds_all = Scalars(np.array([5.0, 0.0, 0.0]), np.ones(3), np.zeros(3), np.zeros(3), 1.0)
    assert at_model.left_out(one_holds_all, 2) is None
    alone = at_model.row(at_model.split_of(one_holds_all, Draw(batch=2, per_round=1)))
    assert alone["variance_between"] == 0.0
    assert alone["variance_within_low"] is None


def test_numbers_that_are_not_finite_do_not_reach_a_row():
    no_noise = Scalars(np.full(4, 5.0), np.zeros(4), np.zeros(4), np.zeros(4), 1.0)
    measured = at_model.split_of(no_noise, Draw(batch=2, per_round=1))
    assert measured.snr.value == np.inf
    assert at_model.row(measured)["variance_snr"] is None


# ---- layers, losses, engines ---------------------------------------------------------------------------


def test_layers_add_up():
    problem = tiny("fedncv", sizes=SIZES, per_round=2, batch_size=2)
    state = train(problem, rounds=1)
    layers, whole = at_model.measure_layers(problem, state), at_model.measure(problem, state)
    assert tuple(layers) == problem.model.layout.names
    for name in ("signal", "within", "between", "sampling", "batches"):
        assert sum(getattr(each, name).value for each in layers.values()) == pytest.approx(getattr(whole, name).value)


def test_the_label_prior_is_part_of_the_loss():
    plain, prior = tiny("fedavg", sizes=SIZES), tiny("fedavg+prior", sizes=SIZES)
    state = start(plain)
    without, with_prior = at_model.measure(plain, state), at_model.measure(prior, state)
    assert with_prior.between.value < 0.7 * without.between.value  # every client lacks a class


@pytest.mark.parametrize("name", ["fedavg", "fedncv", "scaffold", "fedper", "moon"])
def test_means_and_spreads_are_those_of_single_samples_in_every_engine(name, monkeypatch):
    """Also with a client of one sample, and with chunks that end in the middle of a client."""
    problems = [tiny(name, sizes=(9, 1, 6, 11), per_round=3, seed=seed) for seed in (0, 1)]
    states = [train(problem, rounds=2) for problem in problems]
    one = list(SequentialEngine(problems).gradients(states))
    with ProcessesEngine(problems, workers=1) as engine:
        for a, b in zip(one, engine.gradients(states), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    P = problems[0].model.layout.num_parameters
    for samples in (10**6, 4):
        monkeypatch.setitem(gradients.CHUNK_BYTES, "cpu", samples * 8 * P)
        for a, b in zip(one, ScoringEngine(problems).gradients(states), strict=True):
            assert_close(b, a, rtol=1e-10, atol=1e-12)
    for problem, state, found in zip(problems, states, one, strict=True):
        for u, g_nP in enumerate(sample_gradients(problem, state)):
            assert found.mean_NP[u].numpy() == pytest.approx(g_nP.mean(0), rel=1e-10, abs=1e-12)
            spread = np.square(g_nP - g_nP.mean(0)).sum()
            assert float(found.spread_NL[u].sum()) == pytest.approx(spread, rel=1e-10, abs=1e-20)


def test_gradients_of_one_run_are_gone_before_those_of_the_next_are_made(monkeypatch):
    problems, made = [tiny("fedavg", seed=seed) for seed in range(3)], []

    def noted(problem, state):
        assert not any(mean() is not None for mean in made)
        found = gradients.of_run(problem, state)
        made.append(weakref.ref(found.mean_NP))
        return found

    monkeypatch.setattr(sequential, "of_run", noted)
    found = SequentialEngine(problems).gradients([start(problem) for problem in problems])
    assert len(list(map(at_model.split, found, problems))) == len(made) == 3
