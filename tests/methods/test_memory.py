"""Server memory: beta fixed before the draw, exact sums, and its special cases by other methods."""

import numpy as np
import pytest
import torch
from federations import answer, bare_fedncv, federation, inside, model_of, quadratics, tiny, train, vector
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from fedncv.engine.problem import start
from fedncv.engine.sequential import run_round
from fedncv.estimators import running_beta
from fedncv.methods import find_method
from fedncv.methods.switches.memory import Config as MemoryConfig
from fedncv.methods.switches.memory import with_memory


def test_beta_is_fixed_before_the_draw():
    """The estimate is linear in this round's updates with a beta that only earlier rounds decide."""
    problem = tiny(bare_fedncv(memory="adaptive"), per_round=2)
    state = train(problem, rounds=4)
    fixed = float(inside(state.server, "moments").cov / inside(state.server, "moments").var)
    assert 0 < fixed < 1
    same = tiny(bare_fedncv(memory="fixed", beta=fixed), per_round=2)
    a = model_of(train(problem, ids=[0, 2], state=state))
    b = model_of(train(same, ids=[0, 2], state=state))
    assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_beta_one_with_equal_sizes_is_fedvarp_once_all_were_seen():
    ours, theirs = (tiny(text, sizes=(12,) * 4, per_round=2) for text in (bare_fedncv(memory="fixed"), "fedvarp"))
    a, b = train(ours, ids=[0, 1, 2, 3]), train(theirs, ids=[0, 1, 2, 3])
    for ids in ([0, 2], [1, 2], [0, 3]):
        a, b = train(ours, ids=ids, state=a), train(theirs, ids=ids, state=b)
        assert_close(model_of(a), model_of(b), rtol=1e-10, atol=1e-12)


def test_a_perfect_memory_leaves_no_variance():
    """At rest, every client's update is the one remembered; with beta = 1 any draw gives the same step."""
    problem = quadratics(bare_fedncv(memory="fixed"), a=(1.0, 4.0, 2.0), b=(0.0, 1.0, 3.0), per_round=1, lr=1e-9)
    state = train(problem, ids=[0, 1, 2], rounds=1)
    steps = [float(model_of(train(problem, ids=[u], state=state)) - model_of(state)) for u in range(3)]
    assert steps == pytest.approx([steps[0]] * 3, rel=1e-6)


@pytest.mark.parametrize("weights", ["self_normalised", "ht"])
@pytest.mark.parametrize("drift", ["off", pytest.param("fixed", marks=pytest.mark.slow), "adaptive"])
@pytest.mark.parametrize("memory", [pytest.param("fixed", marks=pytest.mark.slow), "adaptive"])
def test_with_everybody_in_every_round_the_memory_changes_nothing(memory, drift, weights):
    """m = N: either omega is p, and sum_u p_u h_u = h_bar, so g_hat is the mean of all Delta for any beta."""
    ours, theirs = (tiny(bare_fedncv(memory=name, drift=drift, weights=weights)) for name in (memory, "off"))
    state = train(ours, rounds=3)
    if memory == "adaptive":
        assert float(running_beta(inside(state.server, "moments"))) > 0.1
    assert_close(model_of(state), model_of(train(theirs, rounds=3)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("memory", ["fixed", "adaptive"])
def test_the_memory_removes_sampling_noise_but_not_drift(memory):
    """One of two clients a round: FedAvg keeps jumping, the memory rests at FedAvg's full-participation point."""
    r1, r2 = 1 - 0.95**10, 1 - 0.8**10
    problem = quadratics(bare_fedncv(memory=memory), x=1.0, per_round=1, seed=3)
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
    problem = quadratics(bare_fedncv(memory="adaptive", weights=weights), sizes=[1, 3], steps=1)
    moments = inside(train(problem, ids=[0, 1], rounds=2).server, "moments")
    assert float(moments.cov / moments.var) == pytest.approx(beta)


@pytest.mark.parametrize("stream", ["", "arrivals:start=0.3,rate=0.1"])
def test_incremental_sums_are_the_sums_from_scratch(stream):
    """Also while sizes change: each client weighs what it last reported."""
    problem = tiny(
        bare_fedncv(memory="adaptive", drift="adaptive"), sizes=(20, 8, 12, 31, 9), per_round=2, stream=stream
    )
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
        problem = tiny(bare_fedncv(memory="adaptive", drift=drift), sizes=(8,) * n, per_round=2)
        state = train(problem, ids=list(range(n)))
        with Numbers() as counting:
            train(problem, ids=[0, 1], state=state)
        counts[n] = counting.count
    num_parameters = len(problem.model.start_P)
    assert counts[60] - counts[6] < 54 * 10
    assert counts[6] > 50 * num_parameters


def test_a_client_whose_numbers_are_lost_leaves_no_trace():
    text = "fedncv:prior=off,momentum=off+memory:beta=learned"
    problem = quadratics(text, a=(1.0, 1e200, 2.0), b=(0.0, 1.0, 1.0), diverged="skip", steps=3)
    state, row = run_round(problem, start(problem))
    assert row["skipped"] == [1]
    assert set(inside(state.server, "h")) == set(inside(state.server, "c")) == {0, 2}
    assert torch.isfinite(model_of(train(problem, rounds=5))).all()


def test_a_learned_beta_is_in_the_row_of_every_round_and_a_fixed_one_is_not():
    problem = tiny(bare_fedncv(memory="adaptive"), per_round=2)
    state = train(problem, rounds=4)
    learned = float(running_beta(state.server.moments))
    assert 0 < learned < 1
    assert run_round(problem, state)[1]["beta"] == pytest.approx(learned)
    fixed = tiny(bare_fedncv(memory="fixed"), per_round=2)
    assert "beta" not in run_round(fixed, start(fixed))[1]


@pytest.mark.parametrize(("unseen", "x"), [("mean", -4.0), ("zero", -4.5)])
def test_a_client_never_seen_by_hand(unseen, x):
    """Delta = 1 of the first: x = -1. Then 3 of the second: 1 + 3 - 1 where h_bar = 1 = h_1, and 1/2 + 3 - 0."""
    method = find_method(f"fedavg+memory:unseen={unseen}")
    server = answer(method, method.init(vector(0.0), federation()), {0: (vector(1.0),)})
    server = answer(method, server, {1: (vector(3.0),)})
    assert_close(server.server.x_P, vector(x))


def test_a_learned_beta_stays_below_one():
    """Moments that say 3/2, two clients of one size, h = (2, 4): Delta_0 = 0 gives beta (h_bar - h_0)."""
    method = find_method("fedavg+memory:beta=learned")
    server = answer(method, method.init(vector(0.0), federation()), {0: (vector(2.0),), 1: (vector(4.0),)})
    moments = server.moments._replace(cov=vector(3.0)[0], var=vector(2.0)[0])
    start_x = server.server.x_P
    after = answer(method, server._replace(moments=moments), {0: (vector(0.0),)})
    assert_close(start_x - after.server.x_P, vector(3.0 - 2.0))  # h_bar - h_0, with beta = 1 and not 3/2


@pytest.mark.parametrize("text", ["fedper", "scaffold", "fedadp", "fednova"])
def test_it_is_refused_where_updates_are_not_averaged_by_samples(text):
    with pytest.raises(ValueError, match="averages updates by samples"):
        with_memory(find_method(text))


@pytest.mark.parametrize("name", ["beta", "forget"])
def test_knobs_are_from_zero_to_one(name):
    assert [getattr(MemoryConfig(**{name: value}), name) for value in (0.0, 1.0)] == [0, 1]
    for value in (-0.1, 1.5):
        with pytest.raises(ValueError, match=f"{name} must be from 0 to 1, not {value}"):
            MemoryConfig(**{name: value})


def test_a_client_that_is_known_by_hand():
    """Delta = 1 of the first of two, then 2: h_bar + 2 - 1, and h_bar = 1 over those seen or 1/2 over all."""
    for unseen, x in (("mean", -3.0), ("zero", -2.5)):
        method = find_method(f"fedavg+memory:unseen={unseen}")
        server = answer(method, method.init(vector(0.0), federation()), {0: (vector(1.0),)})
        assert_close(answer(method, server, {0: (vector(2.0),)}).server.x_P, vector(x))
