"""With a server, the methods for graphs are FedAvg. tests/topology has what they are on graphs."""

from itertools import pairwise

import pytest
import torch
from federations import tiny, train
from torch.testing import assert_close

import fedncv
from fedncv.methods import find_method


def test_d2_with_a_server_is_fedavg_with_equal_weights_to_rounding():
    """The mean of what mixing did to all clients' models is zero."""
    ours, theirs = (train(tiny(name, sizes=(16, 16, 16)), rounds=4) for name in ("d2", "fedavg"))
    assert_close(ours.server.x_P, theirs.server.x_P, rtol=1e-10, atol=1e-12)
    unequal = train(tiny("d2", sizes=(24, 8, 16)), rounds=1)
    assert (unequal.server.x_P - train(tiny("fedavg", sizes=(24, 8, 16)), rounds=1).server.x_P).abs().max() > 1e-4


def test_relaysgd_with_a_server_is_fedavg_to_the_last_bit():
    ours, theirs = (train(tiny(name, per_round=2, dropout=0.3), rounds=4) for name in ("relaysgd", "fedavg"))
    assert torch.equal(ours.server.x_P, theirs.server.x_P)


def test_d2_with_a_server_says_that_it_needs_everyone():
    with pytest.raises(ValueError, match="d2 needs every client in every round: set per_round to 20"):
        fedncv.simulate(method="d2", clients=20, per_round=5)


def test_the_momentum_of_quasi_global_is_the_path_of_the_model():
    """After t rounds m is the weighted sum of the moves, (1 - mu) sum_s mu^(t - s) (x_s - x_{s+1}) / (lr K)."""
    mu = 0.6
    problem = tiny(f"quasi_global:beta=0.3,mu={mu}", sizes=(16, 16))
    path, state = [problem.model.start_P], None
    for _ in range(3):
        state = train(problem, state=state)
        path.append(state.server.x_P)
    own = state.kept[0].own
    moves = [(a - b) / own.total_step for a, b in pairwise(path[:3])]
    assert_close(own.m_P, (1 - mu) * (mu * moves[0] + moves[1]), rtol=1e-10, atol=1e-12)
    assert torch.equal(own.x_P, path[2])


@pytest.mark.parametrize("knobs", ["beta=1", "beta=-0.1", "mu=1"])
def test_shares_of_the_momentum_are_from_0_to_below_1(knobs):
    with pytest.raises(ValueError, match="must be at least 0 and below 1"):
        find_method(f"quasi_global:{knobs}")
