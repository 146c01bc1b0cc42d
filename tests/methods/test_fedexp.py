"""FedExP: updates by hand, and quadratics f_u(x) = a_u/2 (x - b_u)^2, where Delta_u = r_u (x - b_u).

r_u = 1 - (1 - lr a_u)^K. The mean update is Delta = sum p_u Delta_u, and its step is
eta_g = max(1, sum p_u ||Delta_u||^2 / (2 (||Delta||^2 + epsilon))).
"""

import pytest
from federations import answer, everyone, federation, quadratics, tiny, train, vector
from torch.testing import assert_close

from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.engine.sequential import run_round
from fedncv.methods import find_method

R = 1 - 0.95**10, 1 - 0.8**10  # a = (1, 4), lr 0.05, ten steps
REST = R[1] / sum(R)  # where R[0] x + R[1] (x - 1) = 0
APART = (R[0] * REST) ** 2  # the square of either update there, and so their mean


def after(text, first, second, *, sizes=(1, 1)):
    """The model after these updates, from (2, 7); the clients send the squares of their lengths too."""
    method = find_method(text)
    replies = {u: (delta_P, delta_P @ delta_P) for u, delta_P in enumerate((first, second))}
    return answer(method, method.init(vector(2.0, 7.0), federation(sizes)), replies, sizes=sizes).x_P


def test_opposing_updates_by_hand():
    """p = (1/4, 3/4): Delta = (1/2, 3/2), mean square 64/4 + 8 * 3/4 = 22, eta_g = 22 / (2 (5/2 + 1/4)) = 4."""
    x_P = after("fedexp:epsilon=0.25", vector(8.0, 0.0), vector(-2.0, 2.0), sizes=(1, 3))
    assert_close(x_P, vector(2.0 - 4 * 0.5, 7.0 - 4 * 1.5))


def test_equal_updates_are_not_extrapolated_by_hand():
    """Mean square and squared mean are both 4: 4 / (2 * 4.25) is below 1, so the step is FedAvg's."""
    assert_close(after("fedexp:epsilon=0.25", vector(0.0, 2.0), vector(0.0, 2.0)), vector(2.0, 5.0))


def test_updates_that_cancel_move_nothing():
    assert_close(after("fedexp", vector(1.0, -2.0), vector(-1.0, 2.0)), vector(2.0, 7.0))


def test_updates_of_zero_move_nothing():
    assert_close(after("fedexp", vector(0.0, 0.0), vector(0.0, 0.0)), vector(2.0, 7.0))


def test_a_round_between_two_optima_by_hand_with_its_step_in_the_row():
    """One step from x = 1/2: Delta_u = 0.05 (0.5, -2), Delta = -0.0375, mean square 0.0053125."""
    problem = quadratics("fedexp:epsilon=0.00025", steps=1, x=0.5)
    state, row = run_round(problem, start(problem))
    eta_g = 0.0053125 / (2 * (0.0375**2 + 0.00025))  # 1.6
    assert_close(vector(row["eta_g"]), vector(eta_g))
    assert_close(state.server.x_P, vector(0.5 + eta_g * 0.0375))


def test_a_round_from_outside_both_optima_has_the_step_one():
    """Two updates of the same sign: mean square below twice the squared mean."""
    problem, fedavg = quadratics("fedexp"), quadratics("fedavg")
    state, row = run_round(problem, start(problem))
    assert row["eta_g"] == 1
    assert_close(state.server.x_P, train(fedavg).server.x_P, rtol=0, atol=0)


def test_one_client_of_five_with_a_gradient_gets_half_its_update_instead_of_a_fifth():
    """Mean square d^2/5, squared mean d^2/25: eta_g = 5/2. d = r (5 - 1), r = 1 - 0.8^10."""
    problem = quadratics("fedexp:epsilon=1e-12", a=(4.0, 0.0, 0.0, 0.0, 0.0), b=(1.0,) * 5)
    state, row = run_round(problem, start(problem))
    assert_close(vector(row["eta_g"]), vector(2.5))
    assert_close(state.server.x_P, vector(5 - 4 * R[1] / 2))


def test_rests_where_fedavg_rests():
    """The mean update is zero there. With epsilon = 0.1 the step near it is 1: APART / 0.2 is 0.4."""
    assert_close(train(quadratics("fedexp:epsilon=0.1", x=1.0), rounds=40).server.x_P, vector(REST))


def test_with_a_small_epsilon_the_model_leaves_the_fixed_point():
    """Near it eta_g = APART / (2 epsilon), and a distance is multiplied by 1 - eta_g (r_0 + r_1) / 2: here -24."""
    factor = 1 - APART / 0.002 * sum(R) / 2
    assert factor < -20
    problem = quadratics("fedexp:epsilon=0.001", x=REST + 1e-6)
    near = start(problem)  # the model starts in single precision: not at REST + 1e-6 to the last digit
    moved_P = train(problem, state=near).server.x_P
    assert_close((moved_P - REST) / (near.server.x_P - REST), vector(factor), rtol=1e-4, atol=0)


def test_reaches_the_optimum_that_clients_share():
    assert_close(train(quadratics("fedexp", b=(1.0, 1.0)), rounds=40).server.x_P, vector(1.0))


def test_a_client_sends_the_sum_of_the_squares_of_its_update():
    problem = tiny("fedexp")
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    up = train_client(problem, 0, arrival).up
    assert up.square.shape == ()
    assert_close(up.square, sum(d**2 for d in up.delta_P))


@pytest.mark.parametrize("epsilon", ["0", "-1", "nan"])
def test_an_epsilon_that_is_not_above_zero_is_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon must be above 0, not"):
        find_method(f"fedexp:epsilon={epsilon}")
