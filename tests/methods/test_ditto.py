"""Ditto on two clients f_u(x) = a_u/2 (x - b_u)^2, a = (1, 4), b = (0, 1): v_u has a fixed point of its own."""

import pytest
import torch
from federations import everyone, quadratics, tiny, train, vector
from torch.testing import assert_close

from fedncv.engine import evaluate
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.methods import find_method


def test_two_personal_steps_by_hand():
    """x = v = 5, lr 0.05, a = 4, b = 1, lam = 2: v <- 5 - 0.05 * 16 = 4.2, then - 0.05 (4 * 3.2 + 2 * (4.2 - 5))."""
    state = train(quadratics("ditto:lam=2", steps=2))
    assert_close(state.kept[1].own.v_P, vector(4.2 - 0.05 * (12.8 - 1.6)))


def test_the_personal_fixed_point_lies_between_the_own_and_the_shared_optimum():
    """a (v - b) + lam (v - x) = 0 at the shared model's fixed point x, whose own is FedAvg's."""
    problem = quadratics("ditto:lam=2", x=1.0)
    state = train(problem, rounds=40)
    x = float(train(quadratics("fedavg", x=1.0), rounds=40).server.x_P)
    assert_close(state.server.x_P, vector(x))
    expected = [(0 + 2 * x) / 3, (4 + 2 * x) / 6]
    assert_close(torch.cat([state.kept[u].own.v_P for u in (0, 1)]), vector(*expected), atol=1e-5, rtol=0)


def test_without_the_pull_every_client_is_alone():
    state = train(quadratics("ditto:lam=0", x=1.0), rounds=40)
    assert_close(torch.cat([state.kept[u].own.v_P for u in (0, 1)]), vector(0, 1), atol=1e-5, rtol=0)


def test_the_personal_model_goes_on_from_where_it_was():
    """lam = 0, one step a round: two rounds are two steps, (1 - 0.05 * 4)^2 of the way that is left."""
    state = train(quadratics("ditto:lam=0", steps=1), rounds=2)
    assert_close(state.kept[1].own.v_P, vector(1 + 4 * 0.8**2))


def test_the_pull_is_towards_the_received_model_not_the_trained_one():
    """lr 0.05, one personal step after nine shared ones: at v = x the pull is zero, whatever y has become."""
    state = train(quadratics("ditto:lam=2,personal_epochs=1", steps=9))
    assert_close(state.kept[1].own.v_P, vector(5 - 0.05 * 16))


def test_both_models_are_counted_as_work():
    """Two clients of one sample: three and two epochs, 2 * 5 gradients; by default 2 * (3 + 3)."""
    assert train(quadratics("ditto", steps=3)).totals.gradients == 12
    totals = train(quadratics("ditto:personal_epochs=2", steps=3)).totals
    assert totals.gradients == totals.samples == 10


def test_the_server_sees_what_fedavg_shows_it():
    """The shared model, its running statistics and the messages, to the last bit: momentum and weight decay too."""
    settings = {"momentum": 0.9, "weight_decay": 0.1, "per_round": 2}
    ours, theirs = (train(tiny(name, **settings), rounds=3) for name in ("ditto", "fedavg"))
    assert torch.equal(ours.server.x_P, theirs.server.x_P)
    assert torch.equal(ours.buffers, theirs.buffers)
    assert ours.totals.bytes_up == theirs.totals.bytes_up


def test_the_personal_model_has_statistics_of_its_own():
    problem = tiny("ditto")
    state = train(problem, rounds=2)
    (arrival,) = arrivals(problem, state, everyone(1).ids)
    trained = train_client(problem, 2, arrival)
    assert not torch.equal(trained.kept.own.b_R, arrival.kept.own.b_R)
    assert not torch.equal(trained.kept.own.b_R, trained.buffers_R)
    used = evaluate.received(problem, 2, arrival)
    assert torch.equal(used.x_P, arrival.kept.own.v_P)
    assert torch.equal(used.buffers_R, arrival.kept.own.b_R)


def test_the_shared_phase_does_not_move_the_personal_model_even_with_weight_decay():
    problem = tiny("ditto", weight_decay=0.5)
    (arrival,) = arrivals(problem, start(problem), everyone(1).ids)
    shared_only = problem.method._replace(phases=lambda epochs: find_method("ditto").phases(epochs)[:1])
    trained = train_client(problem._replace(method=shared_only), 0, arrival)
    assert torch.equal(trained.kept.own.v_P, arrival.kept.own.v_P)
    assert trained.up.delta_P.abs().max() > 0


def test_steps_of_the_personal_model_are_not_steps_of_the_shared_one():
    """A drift correction divides x - y by lr times steps: with one full-batch step it is the gradient at x."""
    state = train(quadratics("ditto+drift", steps=1))
    assert_close(torch.stack([state.server.c[u] for u in (0, 1)]).flatten(), vector(5, 16))


def test_bad_knobs_and_a_blend_are_refused():
    with pytest.raises(ValueError, match="lam must be at least 0 and finite, not -1"):
        find_method("ditto:lam=-1")
    with pytest.raises(ValueError, match="personal_epochs must be at least 0, not -1"):
        find_method("ditto:personal_epochs=-1")
    with pytest.raises(ValueError, match=r"leave .blend out: the personal model"):
        find_method("ditto+blend")
