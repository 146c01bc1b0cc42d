"""FedAvgM: v <- beta v + Delta, x <- x - v. By hand with Delta = 1 twice and beta = 0.9: v = 1, 1.9."""

import pytest
import torch
from federations import answer, federation, inside, model_of, quadratics, tiny, train, vector
from torch.testing import assert_close

from fedncv.methods import find_method


def test_it_is_the_chain_of_fedavg_and_momentum():
    ours, theirs = (tiny(text, per_round=2) for text in ("fedavgm:beta=0.7", "fedavg+momentum:beta=0.7"))
    assert torch.equal(model_of(train(ours, rounds=3)), model_of(train(theirs, rounds=3)))


def test_the_server_step_scales_the_velocity():
    """Delta = 1, then 0, with momentum 1/2 and step 2: v = 2, 1."""
    method = find_method("fedavgm:beta=0.5,server_lr=2")
    server = method.init(vector(7.0), federation((1,)))
    for delta, x in ((1.0, 5.0), (0.0, 4.0)):
        server = answer(method, server, {0: (vector(delta),)}, sizes=(1,))
        assert_close(inside(server, "x_P"), vector(x))


def test_momentum_does_not_move_the_fixed_point():
    """At rest v = 0 and Delta = 0: where FedAvg stands, r_2 / (r_1 + r_2)."""
    r = 1 - 0.95**10, 1 - 0.8**10
    assert_close(model_of(train(quadratics("fedavgm:beta=0.3", x=1.0), rounds=40)), vector(r[1] / sum(r)))


def test_clients_count_by_their_samples():
    method = find_method("fedavgm")
    server = answer(
        method, method.init(vector(0.0), federation()), {0: (vector(1.0),), 1: (vector(5.0),)}, sizes=(1, 3)
    )
    assert_close(inside(server, "x_P"), vector(-4.0))


@pytest.mark.parametrize("text", ["beta=1", "beta=-0.1", "server_lr=0"])
def test_values_out_of_range_are_refused(text):
    name, value = text.split("=")
    with pytest.raises(ValueError, match=f"{name} must be .* not {value}"):
        find_method(f"fedavgm:{text}")
