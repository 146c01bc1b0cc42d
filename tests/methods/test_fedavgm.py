"""FedAvgM: v <- beta v + Delta, x <- x - v. By hand with Delta = 1 twice and beta = 0.9: v = 1, 1.9."""

import pytest
from federations import answer, federation, inside, model_of, quadratics, train, vector
from torch.testing import assert_close

from fedncv.methods import find_method


def path(text, *updates):
    """How far x has moved after each update."""
    method = find_method(text)
    server, xs = method.init(vector(7.0), federation((1,))), []
    for delta in updates:
        server = answer(method, server, {0: (vector(delta),)}, sizes=(1,))
        xs.append(inside(server, "x_P").item() - 7)
    return xs


def test_two_rounds_by_hand():
    """x = -1, then -1 - 1.9."""
    assert path("fedavgm", 1.0, 1.0) == pytest.approx([-1, -2.9])


def test_nesterov_by_hand():
    """Steps Delta + 0.9 v with the new v: 1 + 0.9, then 1 + 0.9 * 1.9."""
    assert path("fedavgm:nesterov=true", 1.0, 1.0) == pytest.approx([-1.9, -1.9 - 2.71])


def test_the_velocity_outlives_its_cause():
    """Delta = 1, then 0: v = 1, 0.5, and the server step scales both."""
    assert path("fedavgm:beta=0.5,server_lr=2", 1.0, 0.0) == pytest.approx([-2, -3])


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


def test_without_momentum_every_step_is_the_update():
    assert path("fedavgm:beta=0", 1.0, 1.0, 0.0) == [-1, -2, -2]
