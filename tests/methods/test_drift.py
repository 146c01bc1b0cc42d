"""Drift correction: corrections that add up to zero, the raw gradient in memory, and SCAFFOLD as a special case."""

import numpy as np
import pytest
import torch
from federations import bare_fedncv, everyone, federation, inside, model_of, quadratics, tiny, train, vector
from torch.testing import assert_close

from fedncv.engine import evaluate
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.estimators import WeightedSum, weighted_mean
from fedncv.methods import find_method
from fedncv.methods.switches.drift import Config as DriftConfig
from fedncv.methods.switches.drift import with_drift
from fedncv.tree import leaves, num_bytes


def test_alpha_one_with_equal_sizes_is_scaffold():
    ours, theirs = (tiny(text, sizes=(12,) * 4) for text in (bare_fedncv(drift="fixed"), "scaffold"))
    a, b = train(ours, rounds=4), train(theirs, rounds=4)
    assert_close(model_of(a), model_of(b), rtol=1e-9, atol=1e-11)
    assert_close(weighted_mean(inside(a.server, "sum_c")), b.server.c_P, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("drift", ["fixed", pytest.param("adaptive", marks=pytest.mark.slow)])
def test_the_correction_reaches_the_optimum_that_fedavg_drifts_away_from(drift):
    """Sizes 1 and 3: the optimum of sum_u n_u a_u/2 (x - b_u)^2 is 12 / 13; FedAvg stops elsewhere."""
    optimum = 12 / 13
    problem = quadratics(bare_fedncv(drift=drift), sizes=[1, 3], x=1.0)
    assert float(model_of(train(problem, rounds=150))) == pytest.approx(optimum, abs=1e-5)
    assert abs(float(model_of(train(quadratics(bare_fedncv(), sizes=[1, 3], x=1.0), rounds=60))) - optimum) > 0.02


def test_corrections_sum_to_zero_whoever_was_seen_and_however_unequal_alpha_is():
    """e_u = alpha_u (c_u - c_bar) - sum_v p_v alpha_v (c_v - c_bar), with alpha_u = 0 for the client never seen."""
    problem = tiny(bare_fedncv(drift="adaptive"), sizes=(20, 8, 12, 31, 9), per_round=2)
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
        tiny(bare_fedncv(drift=drift, alpha=alpha), sizes=(20, 8, 12, 31, 9), per_round=2, stream=stream)
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
        bare_fedncv(drift="fixed", alpha=0.5), a=(1.0, 4.0, 2.0), b=(0.0, 1.0, 3.0), sizes=[1, 3, 2], steps=1
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
    problem = quadratics(bare_fedncv(drift="fixed"), steps=1, x=1.0)
    state = train(problem, rounds=3)
    x = float(model_of(state))
    after = train(problem, state=state).server
    assert [float(after.c[u]) for u in (0, 1)] == pytest.approx([x - 0.0, 4 * (x - 1.0)])


@pytest.mark.parametrize("drift", ["fixed", "adaptive"])
def test_what_is_added_back_is_what_was_sent(drift):
    """Although p_v, and with them the recentring of unequal alphas, are others once the replies told new sizes."""
    problem = tiny(bare_fedncv(drift=drift), sizes=(20, 8, 12, 31, 9), stream="arrivals:start=0.3,rate=0.2")
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
    problem = quadratics(bare_fedncv(drift="adaptive", rate=0.25), steps=1)
    alpha = train(problem, rounds=2).server.alpha
    assert [float(alpha[u]) for u in (0, 1)] == pytest.approx([0.25, 0.25 * 4.7125 / 6.8125])


def test_without_a_correction_nothing_of_it_travels():
    problem = tiny(bare_fedncv())
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    assert [path for path, _ in leaves(arrival.down)] == ["x_P"]


@pytest.mark.parametrize("weights", ["self_normalised", "ht"])
@pytest.mark.parametrize("drift", ["off", "fixed", "adaptive"])
@pytest.mark.parametrize("memory", ["off", "fixed", "adaptive"])
def test_one_client_alone_is_fedavg(memory, drift, weights):
    """With a single client c = c_bar and h = h_bar, so e = 0 and g_hat = Delta."""
    problem = tiny(bare_fedncv(memory=memory, drift=drift, weights=weights), sizes=(12,))
    theirs = model_of(train(tiny("fedavg", sizes=(12,)), rounds=4))
    assert_close(model_of(train(problem, rounds=4)), theirs, rtol=1e-10, atol=1e-12)


def test_what_travels_is_one_more_array_down_and_one_number_up():
    problem = tiny("fedncv")
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    model = num_bytes(problem.model.start_P)
    assert num_bytes(arrival.down) == 2 * model
    assert num_bytes(train_client(problem, 0, arrival).up) == model + 8


def test_sums_begin_with_the_models_shape():
    server = find_method("fedavg+drift").init(vector(1.0, 2.0), federation())
    assert server.sum_c.total_P.shape == server.sum_alpha_c.total_P.shape == (2,)
    assert server.sum_c.size.shape == ()
    assert server.sum_c.total_P.dtype == torch.float64


@pytest.mark.parametrize("missing", [{"model": None}, {"reveals": {"delta_Q": "the body"}}])
def test_it_is_refused_where_clients_send_no_update_of_a_shared_model(missing):
    with pytest.raises(ValueError, match="send their update of a shared model"):
        with_drift(find_method("fedavg")._replace(**missing))


def test_the_memory_can_be_at_the_clients():
    problem = tiny("fedavg+drift:memory=clients", per_round=2)
    assert problem.method.form == "sums"
    assert torch.isfinite(model_of(train(problem, rounds=3))).all()


def test_a_method_that_needs_each_reply_sees_them_without_what_the_switch_added():
    problem = tiny("fedgen:generator_steps=2,hidden=8,generated=4+drift", per_round=2)
    state = train(problem, rounds=3)
    assert torch.isfinite(model_of(state)).all()
    assert 0 <= evaluate.after(problem, state)["after"] <= 1


@pytest.mark.parametrize("name", ["alpha", "rate"])
def test_knobs_are_from_zero_to_one(name):
    assert [getattr(DriftConfig(**{name: value}), name) for value in (0.0, 1.0)] == [0, 1]
    for value in (-0.1, 1.5):
        with pytest.raises(ValueError, match=f"{name} must be from 0 to 1, not {value}"):
            DriftConfig(**{name: value})
