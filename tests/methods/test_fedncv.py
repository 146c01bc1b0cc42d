"""FedNCV, the centred reading: unbiased over every draw, exact sums, and its special cases by other people's code."""

from itertools import combinations

import numpy as np
import pytest
import torch
from federations import everyone, inside, model_of, quadratics, tiny, train, vector
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from fedncv.engine import evaluate
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.engine.sequential import run_round
from fedncv.estimators import WeightedSum, running_beta, weighted_mean
from fedncv.methods import find_method
from fedncv.methods.switches.drift import Config as DriftConfig
from fedncv.methods.switches.memory import Config as MemoryConfig
from fedncv.tree import leaves, num_bytes


def fedncv(
    *, memory="off", beta=1.0, weights="self_normalised", drift="off", alpha=1.0, rate=0.5, momentum=0.0, average=0.0
):
    """Return FedNCV with everything off but these."""
    text = "fedavg"
    if memory != "off":
        text += f"+memory:beta={'learned' if memory == 'adaptive' else beta}"
    if weights == "ht":
        text += "+ht"
    if drift != "off":
        text += f"+drift:alpha=learned,rate={rate}" if drift == "adaptive" else f"+drift:alpha={alpha}"
    return text + f"+momentum:beta={momentum}+average:share={average}"


# ---- the server's memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["off", "fixed", "adaptive"])
def test_with_horvitz_thompson_weights_the_update_is_unbiased_over_every_draw(memory):
    """Unequal sizes, clients never seen, beta from earlier rounds: the mean over all C(5, 2) draws is exact."""
    problem = tiny(fedncv(memory=memory, beta=0.7, weights="ht"), sizes=(20, 8, 12, 31, 9), per_round=2)
    state = train(problem, ids=[0, 1], rounds=2)
    state = train(problem, ids=[1, 3], state=state)  # clients 2 and 4 were never seen
    x_P = model_of(state)
    steps = [x_P - model_of(train(problem, ids=list(ids), state=state)) for ids in combinations(range(5), 2)]
    whole = [train_client(problem, state.round, a).up.delta_P for a in arrivals(problem, state, np.arange(5))]
    p = problem.federation.sizes_N / problem.federation.sizes_N.sum()
    full_P = sum(p_u * delta for p_u, delta in zip(p, whole, strict=True))
    assert_close(torch.stack(steps).mean(dim=0), full_P, rtol=1e-10, atol=1e-12)
    assert (torch.stack(steps).var(dim=0) > 0).any()


def test_beta_is_fixed_before_the_draw():
    """The estimate is linear in this round's updates with a beta that only earlier rounds decide."""
    problem = tiny(fedncv(memory="adaptive"), per_round=2)
    state = train(problem, rounds=4)
    fixed = float(inside(state.server, "moments").cov / inside(state.server, "moments").var)
    assert 0 < fixed < 1
    same = tiny(fedncv(memory="fixed", beta=fixed), per_round=2)
    a = model_of(train(problem, ids=[0, 2], state=state))
    b = model_of(train(same, ids=[0, 2], state=state))
    assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_beta_one_with_equal_sizes_is_fedvarp_once_all_were_seen():
    ours, theirs = (tiny(text, sizes=(12,) * 4, per_round=2) for text in (fedncv(memory="fixed"), "fedvarp"))
    a, b = train(ours, ids=[0, 1, 2, 3]), train(theirs, ids=[0, 1, 2, 3])
    for ids in ([0, 2], [1, 2], [0, 3]):
        a, b = train(ours, ids=ids, state=a), train(theirs, ids=ids, state=b)
        assert_close(model_of(a), model_of(b), rtol=1e-10, atol=1e-12)


def test_a_perfect_memory_leaves_no_variance():
    """At rest, every client's update is the one remembered; with beta = 1 any draw gives the same step."""
    problem = quadratics(fedncv(memory="fixed"), a=(1.0, 4.0, 2.0), b=(0.0, 1.0, 3.0), per_round=1, lr=1e-9)
    state = train(problem, ids=[0, 1, 2], rounds=1)
    steps = [float(model_of(train(problem, ids=[u], state=state)) - model_of(state)) for u in range(3)]
    assert steps == pytest.approx([steps[0]] * 3, rel=1e-6)


@pytest.mark.parametrize("weights", ["self_normalised", "ht"])
@pytest.mark.parametrize("drift", ["off", "fixed", "adaptive"])
@pytest.mark.parametrize("memory", ["fixed", "adaptive"])
def test_with_everybody_in_every_round_the_memory_changes_nothing(memory, drift, weights):
    """m = N: either omega is p, and sum_u p_u h_u = h_bar, so g_hat is the mean of all Delta for any beta."""
    ours, theirs = (tiny(fedncv(memory=name, drift=drift, weights=weights)) for name in (memory, "off"))
    state = train(ours, rounds=3)
    if memory == "adaptive":
        assert float(running_beta(inside(state.server, "moments"))) > 0.1
    assert_close(model_of(state), model_of(train(theirs, rounds=3)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("memory", ["fixed", "adaptive"])
def test_the_memory_removes_sampling_noise_but_not_drift(memory):
    """One of two clients a round: FedAvg keeps jumping, the memory rests at FedAvg's full-participation point."""
    r1, r2 = 1 - 0.95**10, 1 - 0.8**10
    problem = quadratics(fedncv(memory=memory), x=1.0, per_round=1, seed=3)
    state = train(problem, rounds=150)
    tail = []
    for _ in range(10):
        state = train(problem, state=state)
        tail.append(float(model_of(state)))
    if memory == "fixed":
        assert tail == pytest.approx([r2 / (r1 + r2)] * 10, abs=1e-3)
    else:  # one client a round has no sample covariance: beta stays 0, and that is FedAvg
        assert np.ptp(tail) > 0.1


@pytest.mark.parametrize(("weights", "beta"), [("ht", 0.44640625 / 0.5375), ("self_normalised", 0.33796875 / 0.4125)])
def test_beta_of_two_rounds_by_hand(weights, beta):
    """x = 5, sizes 1 and 3: Delta = (0.25, 0.8), x = 5 - 0.6625; then Delta = (0.216875, 0.6675), h the first ones.

    Two units: beta is the ratio of their differences. ht: p Delta and p h differ by 0.44640625 and 0.5375.
    Self-normalised: Delta and h less their means 0.55484375 and 0.6625, of which the first client's are
    -0.33796875 and -0.4125, and p times those are opposite for the second.
    """
    problem = quadratics(fedncv(memory="adaptive", weights=weights), sizes=[1, 3], steps=1)
    moments = inside(train(problem, ids=[0, 1], rounds=2).server, "moments")
    assert float(moments.cov / moments.var) == pytest.approx(beta)


# ---- client drift --------------------------------------------------------------------------------------


def test_alpha_one_with_equal_sizes_is_scaffold():
    ours, theirs = (tiny(text, sizes=(12,) * 4) for text in (fedncv(drift="fixed"), "scaffold"))
    a, b = train(ours, rounds=4), train(theirs, rounds=4)
    assert_close(model_of(a), model_of(b), rtol=1e-9, atol=1e-11)
    assert_close(weighted_mean(inside(a.server, "sum_c")), b.server.c_P, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("drift", ["fixed", "adaptive"])
def test_the_correction_reaches_the_optimum_that_fedavg_drifts_away_from(drift):
    """Sizes 1 and 3: the optimum of sum_u n_u a_u/2 (x - b_u)^2 is 12 / 13; FedAvg stops elsewhere."""
    optimum = 12 / 13
    problem = quadratics(fedncv(drift=drift), sizes=[1, 3], x=1.0)
    assert float(model_of(train(problem, rounds=150))) == pytest.approx(optimum, abs=1e-5)
    assert abs(float(model_of(train(quadratics(fedncv(), sizes=[1, 3], x=1.0), rounds=60))) - optimum) > 0.02


def test_corrections_sum_to_zero_whoever_was_seen_and_however_unequal_alpha_is():
    """e_u = alpha_u (c_u - c_bar) - sum_v p_v alpha_v (c_v - c_bar), with alpha_u = 0 for the client never seen."""
    problem = tiny(fedncv(drift="adaptive"), sizes=(20, 8, 12, 31, 9), per_round=2)
    state = train(problem, ids=[0, 1, 3], rounds=3)
    state = train(problem, ids=[1, 4], state=state)  # client 2 was never seen
    alphas = [float(value) for value in inside(state.server, "alpha").values()]
    assert max(alphas) - min(alphas) > 0.01
    e_NP = problem.method.broadcast(state.server, torch.arange(5)).e_P
    p = problem.federation.sizes_N / problem.federation.sizes_N.sum()
    assert e_NP.abs().max() > 0.01
    assert_close(p @ e_NP, torch.zeros_like(e_NP[0]), atol=1e-12, rtol=0)
    c, n = inside(state.server, "c"), problem.federation.sizes_N
    c_bar_P = sum(n[u] * c[u] for u in c) / sum(n[u] for u in c)
    scaled = [
        inside(state.server, "alpha")[u] * (c[u] - c_bar_P) if u in c else torch.zeros_like(c_bar_P) for u in range(5)
    ]
    assert_close(e_NP, torch.stack(scaled) - p @ torch.stack(scaled), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stream", ["", "arrivals:start=0.3,rate=0.1"])
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_one_alpha_for_all_is_centred_as_it_is(alpha, stream):
    """e_u = alpha (c_u - c_bar), 0 for the clients never seen, and sum_u p_u e_u = 0 over all of them, whatever sizes
    they last reported: the recentred form, by the code for alphas that are learned, has nothing to add.
    """
    problem, learned = (
        tiny(fedncv(drift=drift, alpha=alpha), sizes=(20, 8, 12, 31, 9), per_round=2, stream=stream)
        for drift in ("fixed", "adaptive")
    )
    state = train(problem, ids=[0, 1], rounds=2)
    server = train(problem, ids=[1, 3], state=state).server  # clients 2 and 4 were never seen
    n_N, c = server.n_N, server.c
    assert sorted(c) == [0, 1, 3]
    c_bar_P = sum(n_N[u] * c_P for u, c_P in c.items()) / sum(n_N[u] for u in c)
    zero_P = torch.zeros_like(c_bar_P)
    e_NP = problem.method.broadcast(server, torch.arange(5)).e_P
    expected = [alpha * (c[u] - c_bar_P) if u in c else zero_P for u in range(5)]
    assert_close(e_NP, torch.stack(expected), rtol=1e-10, atol=1e-12)
    assert min(float(e_NP[u].abs().max()) for u in c) > 0.01
    assert_close(n_N / n_N.sum() @ e_NP, zero_P, rtol=0, atol=1e-12)
    sum_alpha_c = WeightedSum(sum(n_N[u] * alpha * c[u] for u in c), sum(n_N[u] * alpha for u in c))
    recentred = server._replace(sum_alpha_c=sum_alpha_c)
    assert_close(learned.method.broadcast(recentred, torch.arange(5)).e_P, e_NP, rtol=1e-10, atol=1e-12)


def test_half_a_correction_of_two_rounds_by_hand():
    """x = 5, sizes 1, 3 and 2, of which the third is not seen: c = (5, 16) of mean 53/4, so e = (-33/8, 11/8, 0), and
    n_0 e_0 + n_1 e_1 = 0. x = 5 - 0.05 * 53/4 = 4.3375; then all: c = g = (4.3375, 13.35, 2.675) of mean 49.7375/6.
    """
    problem = quadratics(
        fedncv(drift="fixed", alpha=0.5), a=(1.0, 4.0, 2.0), b=(0.0, 1.0, 3.0), sizes=[1, 3, 2], steps=1
    )
    state = train(problem, ids=[0, 1])
    assert_close(problem.method.broadcast(state.server, torch.arange(3)).e_P[:, 0], vector(-33 / 8, 11 / 8, 0))
    replies = [train_client(problem, 1, a).up.up.delta_P for a in arrivals(problem, state, np.arange(3))]
    assert_close(torch.cat(replies), 0.05 * vector(4.3375 + 33 / 8, 13.35 - 11 / 8, 2.675))
    server = train(problem, ids=[0, 1, 2], state=state).server
    assert [float(server.c[u]) for u in range(3)] == pytest.approx([4.3375, 13.35, 2.675])
    assert float(model_of(server)) == pytest.approx(
        4.3375 - 0.05 * 49.7375 / 6
    )  # one step: corrections cancel in the mean


def test_the_memory_is_the_raw_gradient_without_the_correction():
    """One full-batch step: Delta / lr = g - e, so c = g, whatever e was: a_u (x - b_u)."""
    problem = quadratics(fedncv(drift="fixed"), steps=1, x=1.0)
    state = train(problem, rounds=3)
    x = float(model_of(state))
    after = train(problem, state=state).server
    assert [float(after.c[u]) for u in (0, 1)] == pytest.approx([x - 0.0, 4 * (x - 1.0)])


@pytest.mark.parametrize("drift", ["fixed", "adaptive"])
def test_what_is_added_back_is_what_was_sent(drift):
    """Although p_v, and with them the recentring of unequal alphas, are others once the replies told new sizes."""
    problem = tiny(fedncv(drift=drift), sizes=(20, 8, 12, 31, 9), stream="arrivals:start=0.3,rate=0.2")
    state = train(problem, ids=[0, 1, 3], rounds=3)
    after = train(problem, ids=[0, 1, 3], state=state).server
    assert not torch.equal(after.n_N, inside(state.server, "n_N"))
    now = problem.at(state.round)
    for arrival in arrivals(now, state, np.array([0, 1, 3])):
        up = train_client(now, state.round, arrival).up
        expected = up.up.delta_P / up.total_step + arrival.down.e_P
        assert_close(after.c[arrival.client], expected, rtol=1e-10, atol=1e-12)


def test_alpha_of_two_rounds_by_hand():
    """x = 5, one step: c = (5, 16), x = 4.475, c' = (4.475, 13.9) of mean 9.1875. alpha* = 4.7125 / 4.1875, which is
    above 1, and 4.7125 / 6.8125; a quarter of the way from 0.
    """
    problem = quadratics(fedncv(drift="adaptive", rate=0.25), steps=1)
    alpha = train(problem, rounds=2).server.alpha
    assert [float(alpha[u]) for u in (0, 1)] == pytest.approx([0.25, 0.25 * 4.7125 / 6.8125])


def test_without_a_correction_nothing_of_it_travels():
    problem = tiny(fedncv())
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    assert [path for path, _ in leaves(arrival.down)] == ["x_P"]


@pytest.mark.parametrize("weights", ["self_normalised", "ht"])
@pytest.mark.parametrize("drift", ["off", "fixed", "adaptive"])
@pytest.mark.parametrize("memory", ["off", "fixed", "adaptive"])
def test_one_client_alone_is_fedavg(memory, drift, weights):
    """With a single client c = c_bar and h = h_bar, so e = 0 and g_hat = Delta."""
    problem = tiny(fedncv(memory=memory, drift=drift, weights=weights), sizes=(12,))
    theirs = model_of(train(tiny("fedavg", sizes=(12,)), rounds=4))
    assert_close(model_of(train(problem, rounds=4)), theirs, rtol=1e-10, atol=1e-12)


# ---- bookkeeping ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", ["", "arrivals:start=0.3,rate=0.1"])
def test_incremental_sums_are_the_sums_from_scratch(stream):
    """Also while sizes change: each client weighs what it last reported."""
    problem = tiny(fedncv(memory="adaptive", drift="adaptive"), sizes=(20, 8, 12, 31, 9), per_round=2, stream=stream)
    server = train(problem, rounds=8).server
    memory = server.server
    assert len(memory.h) >= 3
    assert torch.equal(memory.n_N, server.n_N)
    for rows, sums in ((memory.h, memory.sum_h), (server.c, server.sum_c)):
        total = sum(float(server.n_N[u]) * row.double() for u, row in rows.items())
        assert_close(sums.total_P, total, rtol=1e-9, atol=1e-9)
        assert float(sums.size) == pytest.approx(sum(float(server.n_N[u]) for u in rows))
    weights = {u: float(server.n_N[u] * server.alpha[u]) for u in server.c}
    assert float(server.sum_alpha_c.size) == pytest.approx(sum(weights.values()))
    assert_close(
        server.sum_alpha_c.total_P, sum(w * server.c[u].double() for u, w in weights.items()), rtol=1e-9, atol=1e-9
    )


class Numbers(TorchDispatchMode):
    """Counts the numbers that operations write."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count += sum(t.numel() for t in (result if isinstance(result, tuple) else (result,)) if torch.is_tensor(t))
        return result


@pytest.mark.parametrize("drift", ["fixed", "adaptive"])
def test_a_round_costs_what_its_clients_cost_not_what_all_clients_cost(drift):
    """The server's work for two replies: 60 clients in place of 6 add a few scalars each, and no vectors."""
    counts = {}
    for n in (6, 60):
        problem = tiny(fedncv(memory="adaptive", drift=drift), sizes=(8,) * n, per_round=2)
        state = train(problem, ids=list(range(n)))
        with Numbers() as counting:
            train(problem, ids=[0, 1], state=state)
        counts[n] = counting.count
    num_parameters = len(problem.model.start_P)
    assert counts[60] - counts[6] < 54 * 10
    assert counts[6] > 50 * num_parameters


def test_what_travels_is_one_more_array_down_and_one_number_up():
    problem = tiny("fedncv")
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    model = num_bytes(problem.model.start_P)
    assert num_bytes(arrival.down) == 2 * model
    assert num_bytes(train_client(problem, 0, arrival).up) == model + 8


def test_a_client_whose_numbers_are_lost_leaves_no_trace():
    text = "fedncv:prior=off,momentum=off+memory:beta=learned"
    problem = quadratics(text, a=(1.0, 1e200, 2.0), b=(0.0, 1.0, 1.0), diverged="skip", steps=3)
    state, row = run_round(problem, start(problem))
    assert row["skipped"] == [1]
    assert set(inside(state.server, "h")) == set(inside(state.server, "c")) == {0, 2}
    assert torch.isfinite(model_of(train(problem, rounds=5))).all()


# ---- switches ------------------------------------------------------------------------------------------


def test_momentum_alone_is_fedavgm():
    ours, theirs = tiny(fedncv(momentum=0.7), per_round=2), tiny("fedavgm:beta=0.7", per_round=2)
    assert_close(model_of(train(ours, rounds=4)), model_of(train(theirs, rounds=4)), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("blend", "share"), [(0.5, 1 / 2), (1, 1 / 3)])  # 1 / (1 + blend * 2) after two rounds
def test_blend_changes_only_what_is_predicted_after_training(blend, share):
    whole, half = tiny("fedncv:blend=0"), tiny(f"fedncv:blend={blend}")
    state = train(whole, rounds=2)
    assert torch.equal(model_of(state), model_of(train(half, rounds=2)))
    assert evaluate.before(whole, state) == evaluate.before(half, state)
    (arrival,) = arrivals(half, state, everyone(0).ids)
    trained = train_client(half, 2, arrival)
    ask = half.ask(0, trained.buffers_R, 2, received_R=arrival.buffers_R)
    predicted = half.method.predict(ask, trained.y_P, arrival.down, trained.kept.own)
    assert_close(predicted.x_P, (1 - share) * arrival.down.down.x_P + share * trained.y_P)
    assert_close(predicted.buffers_R, (1 - share) * arrival.buffers_R + share * trained.buffers_R)


def test_the_average_is_handed_out_and_training_goes_on_from_the_last_model():
    """Two rounds, share 1/2: a = x_1, then x_1 + (x_2 - x_1) / 1.5."""
    plain, ours = tiny(fedncv(), per_round=2), tiny(fedncv(average=0.5), per_round=2)
    first = train(plain)
    second, state = train(plain, state=first), train(ours, rounds=2)
    x_1, x_2 = model_of(first), model_of(second)
    average = x_1 + (x_2 - x_1) / 1.5
    ids_S = torch.arange(2)
    assert_close(ours.method.hand_out(state.server, ids_S).x_P[1], average)
    assert torch.equal(ours.method.broadcast(state.server, ids_S).x_P[1], x_2)
    assert_close(ours.method.shared(state.server), average)
    assert torch.equal(plain.method.shared(second.server), x_2)
    assert plain.method.hand_out is None
    assert plain.method.buffers == "averaged"
    assert_close(state.buffers, first.buffers + (second.buffers - first.buffers) / 1.5)


@pytest.mark.parametrize(
    ("knobs", "kept"),
    [
        ({}, ""),
        ({"drift": "fixed"}, "c alpha"),
        ({"memory": "fixed"}, "h"),
        ({"momentum": 0.5, "average": 1}, "v_P a_P"),
    ],
)
def test_what_is_off_takes_no_memory(knobs, kept):
    held = {part for path, _ in leaves(train(tiny(fedncv(**knobs))).server) for part in path.split(".")}
    assert held & {"h", "c", "alpha", "v_P", "a_P"} == set(kept.split())


@pytest.mark.parametrize("config", [DriftConfig, MemoryConfig])
def test_the_ends_of_the_ranges_are_taken(config):
    for name in {"alpha", "rate", "beta", "forget"} & set(config.__dataclass_fields__):
        assert [getattr(config(**{name: value}), name) for value in (0.0, 1.0)] == [0, 1]


@pytest.mark.parametrize(
    "text",
    ["fedavg+memory:beta=2", "fedavg+memory:forget=1.5", "fedncv:drift.alpha=-1", "fedncv:drift.rate=1.5",
     "fedncv:momentum=1", "fedncv:prior=-1", "fedncv:prior.epsilon=0", "fedncv:blend=nan", "fedncv:average=-1",
     "fedavg+memory:unseen=one"],
)  # fmt: skip
def test_knobs_out_of_range_are_named(text):
    name = {"momentum": "beta", "prior": "tau", "blend": "rate", "average": "share"}
    knob = text.partition(":")[2].partition("=")[0].split(".")[-1]
    with pytest.raises(ValueError, match=rf"{name.get(knob, knob)} must be"):
        find_method(text)
