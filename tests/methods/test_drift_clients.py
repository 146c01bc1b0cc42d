"""FedNCV with the memory at the clients: other methods' trajectories, and a server that uses nothing but sums."""

import pytest
import torch
from federations import everyone, inside, model_of, quadratics, tiny, train
from torch.testing import assert_close

from fedncv.engine.problem import arrivals, start
from fedncv.methods import find_method
from fedncv.tree import leaves

BARE = "fedavg+drift:memory=clients"


def test_with_everybody_in_every_round_and_equal_sizes_it_is_scaffold():
    """SCAFFOLD's c is the mean over all clients from the start; here all are seen in the first round."""
    ours, theirs = (tiny(text, sizes=(12,) * 4) for text in (BARE, "scaffold"))
    a, b = train(ours, rounds=4), train(theirs, rounds=4)
    assert_close(model_of(a), model_of(b), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("alpha", [0, 0.5, 1])
def test_one_client_alone_is_fedavg(alpha):
    """Its own c is the mean, so e = 0."""
    ours, theirs = (tiny(text, sizes=(12,)) for text in (f"{BARE},alpha={alpha}", "fedavg"))
    assert_close(model_of(train(ours, rounds=4)), model_of(train(theirs, rounds=4)), rtol=1e-10, atol=1e-12)


def test_sums_at_the_server_are_the_sums_of_what_clients_keep():
    problem = tiny("fedncv-sums", sizes=(20, 8, 12, 31), per_round=2)
    state = train(problem, rounds=3)
    n, (total_P, size) = problem.federation.sizes_N, inside(state.server, "sum_c")
    assert_close(total_P, sum(n[u] * kept.own.c_P for u, kept in state.kept.items()), rtol=1e-9, atol=1e-9)
    assert float(size) == sum(float(n[u]) for u in state.kept)
    assert all(float(kept.own.seen) == 1 for kept in state.kept.values())


def test_it_reaches_the_optimum_that_fedavg_drifts_away_from():
    problem = quadratics(BARE, sizes=[1, 3], x=1.0)
    assert float(model_of(train(problem, rounds=150))) == pytest.approx(12 / 13, abs=1e-6)


def test_one_array_more_travels_each_way_and_without_a_correction_none():
    problem, without = tiny("fedncv-sums"), tiny("fedncv-sums:drift=off")
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    assert [path for path, _ in leaves(arrival.down)] == ["down.x_P", "c_bar_P"]
    assert set(problem.method.reveals) == {"delta_P", "dc_P", "new"}
    (arrival,) = arrivals(without, start(without), everyone(0).ids)
    assert [path for path, _ in leaves(arrival.down)] == ["x_P"]


def test_two_rounds_with_half_a_correction_and_momentum_by_hand():
    """x = 5, lr 0.05, a step a round: Delta = (0.25, 0.8), c = (5, 16), v = 0.525, x = 4.475, c_bar = 10.5.
    Then e = (-2.75, 2.75), gradients 4.475 and 13.9: Delta = 0.05 (g - e) = (0.36125, 0.5575) of mean 0.459375,
    v = 0.525/2 + 0.459375.
    """
    problem = quadratics("fedncv-sums:drift=0.5,momentum=0.5,prior=off,even=off", steps=1)
    state = train(problem, rounds=2)
    assert [float(state.kept[u].own.c_P) for u in (0, 1)] == pytest.approx([4.475, 13.9])
    assert float(model_of(state)) == pytest.approx(4.475 - 0.2625 - 0.459375)


def test_its_sums_need_sizes_that_stay():
    assert find_method("fedncv-sums").fixed_sizes  # so a stream is refused


def test_a_client_that_comes_late_is_not_corrected_in_its_first_round():
    """Its c_u = 0 says nothing: e_u would be -c_bar. What it sends is the plain update."""
    problem, plain = tiny(BARE, per_round=2), tiny("fedavg", per_round=2)
    state = train(problem, ids=[0, 1], rounds=2)
    (late,) = arrivals(problem, state, everyone(3).ids)
    assert float(late.down.c_bar_P.abs().max()) > 0
    from fedncv.engine.local import train as train_client

    (bare,) = arrivals(plain, start(plain)._replace(server=state.server.server, buffers=state.buffers), everyone(3).ids)
    ours, theirs = train_client(problem, 2, late), train_client(plain, 2, bare)
    assert torch.equal(ours.up.up.delta_P, theirs.up.delta_P)
    assert float(ours.up.new) == 1
