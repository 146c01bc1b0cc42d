"""FedAdagrad, FedAdam and FedYogi by hand: tau = 1, so v begins at 1; Delta = 2, then 1."""

from math import sqrt

import pytest
from federations import answer, federation, tiny, train, vector
from torch.testing import assert_close

from fedncv.methods import find_method


def path(text, *updates):
    """How far x has moved after each update."""
    method = find_method(text)
    server, xs = method.init(vector(7.0), federation((1,))), []
    for delta in updates:
        server = answer(method, server, {0: (vector(delta),)}, sizes=(1,))
        xs.append(server.x_P.item() - 7)
    return xs


def test_adagrad_adds_squares():
    """v = 5, 6."""
    first = -0.1 * 2 / (sqrt(5) + 1)
    assert path("fedadagrad:server_lr=0.1,tau=1", 2.0, 1.0) == pytest.approx([first, first - 0.1 / (sqrt(6) + 1)])


def test_adagrad_can_have_momentum():
    """beta1 = 0.5: m = 1."""
    assert path("fedadagrad:server_lr=0.1,tau=1,beta1=0.5", 2.0) == pytest.approx([-0.1 / (sqrt(5) + 1)])


def test_adam_averages_squares():
    """beta1 = 0.5, beta2 = 0.75: m = 1, 1;  v = 0.75 + 0.25 * 4 = 1.75, then 0.75 * 1.75 + 0.25 = 1.5625 = 1.25^2."""
    first = -0.1 / (sqrt(1.75) + 1)
    xs = path("fedadam:server_lr=0.1,tau=1,beta1=0.5,beta2=0.75", 2.0, 1.0)
    assert xs == pytest.approx([first, first - 0.1 / 2.25])


def test_yogi_moves_by_the_square_in_the_direction_of_it():
    """v = 1 + 0.25 * 4 = 2 (the square is above v), then 2 - 0.25 * 1 = 1.75 (it is below)."""
    first = -0.1 / (sqrt(2) + 1)
    xs = path("fedyogi:server_lr=0.1,tau=1,beta1=0.5,beta2=0.75", 2.0, 1.0)
    assert xs == pytest.approx([first, first - 0.1 / (sqrt(1.75) + 1)])


def test_yogi_stays_where_the_square_is_already():
    """v = 1 = Delta^2: the sign is 0."""
    assert path("fedyogi:server_lr=0.1,tau=1,beta1=0.5", 1.0) == pytest.approx([-0.1 * 0.5 / 2])


def test_the_second_moment_begins_at_the_square_of_tau():
    """Delta = 0.3, tau = 0.5, Adam: v = 0.99 * 0.25 + 0.01 * 0.09."""
    expected = -0.1 * 0.1 * 0.3 / (sqrt(0.99 * 0.25 + 0.01 * 0.09) + 0.5)
    assert path("fedadam:server_lr=0.1,tau=0.5", 0.3) == pytest.approx([expected])


@pytest.mark.parametrize("name", ["fedadam:beta1=0,beta2=0.999999999999,", "fedyogi:beta1=0,", "fedadagrad:"])
def test_a_large_tau_is_fedavg(name):
    """v stays tau^2, so x moves by server_lr Delta / (tau + tau): Delta, where server_lr = 2 tau."""
    ours, theirs = tiny(f"{name}server_lr=2e9,tau=1e9"), tiny("fedavg")
    assert_close(train(ours, rounds=2).server.x_P, train(theirs, rounds=2).server.x_P, rtol=1e-9, atol=1e-9)


def test_clients_count_by_their_samples():
    """Delta = (0 + 3 * 8)/4 = 6, v = 1 + 36, as Adagrad."""
    method = find_method("fedadagrad:server_lr=1,tau=1")
    ups = {0: (vector(0.0),), 1: (vector(8.0),)}
    server = answer(method, method.init(vector(0.0), federation((1, 3))), ups, sizes=(1, 3))
    assert_close(server.x_P, vector(-6 / (sqrt(37) + 1)))


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad"])
@pytest.mark.parametrize("text", ["beta1=1", "beta2=1", "beta2=-1", "tau=0", "server_lr=0"])
def test_values_out_of_range_are_refused(name, text):
    knob, value = text.split("=")
    missing = name == "fedadagrad" and knob == "beta2"
    with pytest.raises(ValueError, match="has no knob" if missing else f"{knob} must be .* not {value}"):
        find_method(f"{name}:{text}")
