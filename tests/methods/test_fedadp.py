"""FedAdp by hand: angles between updates in the plane, Gompertz's curve with math's functions."""

from math import acos, exp, pi, sqrt

import pytest
import torch
from federations import answer, federation, vector
from torch.testing import assert_close

from fedncv.methods import find_method
from fedncv.methods.fedadp import angle, gompertz

FIRST = {0: (vector(1.0, 0.0),), 1: (vector(0.0, 1.0),)}
# sizes (1, 3): Delta = (1/4, 3/4), of length sqrt(10)/4
THETA = acos(1 / sqrt(10)), acos(3 / sqrt(10))


def curve(theta, alpha):
    return alpha * (1 - exp(-exp(-alpha * (theta - 1))))


def weights(sizes, thetas, alpha=5.0):
    votes = [n * exp(curve(theta, alpha)) for n, theta in zip(sizes, thetas, strict=True)]
    return [v / sum(votes) for v in votes]


def begun(text="fedadp"):
    method = find_method(text)
    return method, method.init(vector(2.0, 7.0), federation((1, 3)))


def test_a_round_by_hand():
    method, server = begun()
    server = answer(method, server, FIRST, sizes=(1, 3))
    assert_close(server.x_P, vector(2.0, 7.0) - vector(*weights((1, 3), THETA)))
    assert_close(server.theta_N, vector(*THETA))


def test_the_curve_by_hand():
    """At theta = 1 it is alpha (1 - 1/e); it falls from alpha towards 0."""
    assert_close(gompertz(vector(1.0), 5.0), vector(5 * (1 - exp(-1))))
    assert_close(gompertz(vector(0.0, 2.0), 3.0), vector(3 * (1 - exp(-exp(3))), 3 * (1 - exp(-exp(-3)))))


def test_angles_are_averaged_over_the_rounds_a_client_took_part_in():
    """Then the first client alone, angle 0 with itself; then both as at first: 2/3 and 2/2 of the first angles."""
    method, server = begun("fedadp:alpha=2")
    server = answer(method, server, FIRST, sizes=(1, 3))
    server = answer(method, server, {0: FIRST[0]}, sizes=(1, 3))
    assert_close(server.theta_N, vector(THETA[0] / 2, THETA[1]), atol=1e-7, rtol=0)
    before_P = server.x_P
    server = answer(method, server, FIRST, sizes=(1, 3))
    mean = 2 * THETA[0] / 3, THETA[1]
    assert_close(server.theta_N, vector(*mean), atol=1e-7, rtol=0)
    assert_close(before_P - server.x_P, vector(*weights((1, 3), mean, 2.0)), atol=1e-7, rtol=0)
    assert server.times_N.tolist() == [3, 2]


def test_updates_that_agree_are_averaged_by_samples():
    """Equal angles: psi = p."""
    method, server = begun()
    server = answer(method, server, {0: (vector(1.0, 0.0),), 1: (vector(2.0, 0.0),)}, sizes=(1, 3))
    assert_close(server.x_P, vector(2 - 1.75, 7.0))


def test_angles_do_not_depend_on_lengths():
    """(3, 4) and twice itself, twice (4, -3), and minus a tenth of itself."""
    others_SP = torch.stack([vector(6.0, 8.0), vector(8.0, -6.0), vector(-0.3, -0.4)])
    assert_close(angle(vector(3.0, 4.0), others_SP), vector(0, pi / 2, pi), atol=1e-14, rtol=0)


def test_rounding_makes_no_cosine_above_one():
    """Of a vector with itself: in about half of these the quotient comes out a bit above 1 or below."""
    v_SP = vector(0.1, 0.7, 0.3) * torch.arange(1, 60)[:, None] ** 0.5
    for v_P in v_SP:
        assert_close(angle(v_P, torch.stack([v_P, -v_P])), vector(0, pi), atol=1e-14, rtol=0)


def test_an_update_of_zero_is_orthogonal_to_all():
    zero = torch.zeros(2)
    assert_close(angle(vector(1.0, 0.0), torch.stack([zero, vector(-2.0, 0.0)])), vector(pi / 2, pi))
    assert_close(angle(zero, torch.eye(2)), vector(pi / 2, pi / 2))
    assert_close(angle(zero, zero[None]), vector(pi / 2))


def test_angles_of_single_precision_are_as_good_as_double():
    """(3, 4) and twice itself: in float32 their directions differ by some 1e-8."""
    assert_close(angle(torch.tensor([3.0, 4.0]), torch.tensor([[6.0, 8.0]])), vector(0.0), atol=1e-15, rtol=0)
    assert_close(angle(vector(3.0, 4.0), torch.tensor([[6.0, 8.0]])), vector(0.0), atol=1e-15, rtol=0)


def test_a_negative_steepness_is_refused():
    with pytest.raises(ValueError, match="alpha must be at least 0, not -1"):
        find_method("fedadp:alpha=-1")


def test_without_steepness_it_is_fedavg():
    """alpha = 0: f = 0, all votes are n_u."""
    method, server = begun("fedadp:alpha=0")
    assert_close(answer(method, server, FIRST, sizes=(1, 3)).x_P, vector(2 - 0.25, 7 - 0.75))
