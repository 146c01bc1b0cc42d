"""FedNCV with the memory at the clients: other methods' trajectories, and a server that uses nothing but sums."""

import pytest
import torch
from federations import everyone, quadratics, tiny, train
from torch.testing import assert_close

from fedncv.engine.problem import arrivals, start
from fedncv.methods import find_method
from fedncv.methods.base import Replies, ServerAsk
from fedncv.methods.fedncv_sums import Config, Up

BARE = "fedncv-sums:tau=0,even=false,momentum=0"


def test_without_a_correction_and_with_equal_sizes_it_is_fedvarp_from_the_first_round():
    ours, theirs = (tiny(text, sizes=(12,) * 4, per_round=2) for text in (f"{BARE},alpha=0", "fedvarp"))
    a, b = train(ours, rounds=6), train(theirs, rounds=6)
    assert_close(a.server.x_P, b.server.x_P, rtol=1e-10, atol=1e-12)


def test_with_everybody_in_every_round_and_equal_sizes_it_is_scaffold():
    """All answer: h_bar + mean(Delta - h) is the mean of Delta, so only the correction is left."""
    ours, theirs = (tiny(text, sizes=(12,) * 4) for text in (BARE, "scaffold"))
    a, b = train(ours, rounds=4), train(theirs, rounds=4)
    assert_close(a.server.x_P, b.server.x_P, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("alpha", [0, 0.5, 1])
def test_one_client_alone_is_fedavg(alpha):
    """Its own h and c are their means, so e = 0 and g_hat = Delta."""
    ours, theirs = (tiny(text, sizes=(12,)) for text in (f"{BARE},alpha={alpha}", "fedavg"))
    assert_close(train(ours, rounds=4).server.x_P, train(theirs, rounds=4).server.x_P, rtol=1e-10, atol=1e-12)


def test_it_is_fedncv_with_fixed_coefficients_once_all_were_seen():
    """The other placement of the same estimator: after a round of everybody both have the same memory."""
    sizes = (20, 8, 12, 31)
    ours = tiny(BARE, sizes=sizes, per_round=2)
    theirs = tiny("fedncv:memory=fixed,drift=fixed,tau=0,even=false,momentum=0", sizes=sizes, per_round=2)
    a, b = train(ours, ids=[0, 1, 2, 3]), train(theirs, ids=[0, 1, 2, 3])
    for ids in ([0, 2], [1, 3], [0, 3]):
        a, b = train(ours, ids=ids, state=a), train(theirs, ids=ids, state=b)
        assert_close(a.server.x_P, b.server.x_Q, rtol=1e-9, atol=1e-11)


def test_sums_at_the_server_are_the_sums_of_what_clients_keep():
    problem = tiny("fedncv-sums", sizes=(20, 8, 12, 31), per_round=2)
    state = train(problem, rounds=6)
    n = problem.federation.sizes_N
    assert_close(state.server.sum_h_P, sum(n[u] * kept.own.h_P for u, kept in state.kept.items()), rtol=1e-9, atol=1e-9)
    assert_close(state.server.sum_c_E, sum(n[u] * kept.own.c_E for u, kept in state.kept.items()), rtol=1e-9, atol=1e-9)


def test_the_server_uses_nothing_but_the_sums_of_the_replies():
    """Noise that cancels in the sum, as secure aggregation adds it, changes nothing."""
    problem = tiny("fedncv-sums")
    state = train(problem, rounds=2)
    generator = torch.Generator().manual_seed(0)
    method, p = problem.method, len(problem.model.start_P)
    news, dc = (torch.randn(3, p, generator=generator, dtype=torch.float64) for _ in range(2))
    size = torch.tensor([5.0, 9.0, 2.0], dtype=torch.float64)
    noise = torch.randn(3, p, generator=generator, dtype=torch.float64) * 100
    noise -= noise.mean(dim=0)
    ids, ask = torch.tensor([0, 1, 3]), ServerAsk(problem.model, 2, torch.zeros(2))
    plain = method.aggregate(ask, state.server, Replies(Up(news, dc, size), ids, size, size))
    hidden = method.aggregate(
        ask, state.server, Replies(Up(news + noise, dc - noise, size), ids.flip(0), size.flip(0), size)
    )
    assert_close(plain.x_P, hidden.x_P, rtol=1e-9, atol=1e-9)
    assert_close(plain.sum_c_E, hidden.sum_c_E, rtol=1e-9, atol=1e-9)


def test_it_reaches_the_optimum_that_fedavg_drifts_away_from():
    problem = quadratics(BARE, sizes=[1, 3], x=1.0)
    assert float(train(problem, rounds=150).server.x_P) == pytest.approx(12 / 13, abs=1e-6)


def test_without_a_correction_nothing_of_it_travels():
    problem = tiny(f"{BARE},alpha=0")
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    assert arrival.down.c_bar_E.numel() == 0


@pytest.mark.parametrize("knob", ["alpha=2", "momentum=1", "tau=-1", "epsilon=0"])
def test_knobs_out_of_range_are_named(knob):
    name, value = knob.split("=")
    with pytest.raises(ValueError, match=name):
        Config(**{name: float(value)})


def test_two_rounds_with_half_a_correction_and_momentum_by_hand():
    """x = 5, lr 0.05, a step a round: Delta = (0.25, 0.8), c = (5, 16), v = 0.525, x = 4.475, c_bar = 10.5.
    Then e = (-2.75, 2.75), gradients 4.475 and 13.9: Delta = 0.05 (g - e) = (0.36125, 0.5575) of mean 0.459375,
    v = 0.525/2 + 0.459375.
    """
    problem = quadratics("fedncv-sums:alpha=0.5,momentum=0.5,tau=0,even=false", steps=1)
    state = train(problem, rounds=2)
    assert [float(state.kept[u].own.h_P) for u in (0, 1)] == pytest.approx([0.36125, 0.5575])
    assert [float(state.kept[u].own.c_E) for u in (0, 1)] == pytest.approx([4.475, 13.9])
    assert float(state.server.x_P) == pytest.approx(4.475 - 0.2625 - 0.459375)


def test_its_sums_need_sizes_that_stay():
    assert find_method("fedncv-sums").fixed_sizes  # so a stream is refused
