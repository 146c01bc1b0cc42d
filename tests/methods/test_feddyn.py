"""FedDyn on f_u(x) = a_u/2 (x - b_u)^2, a = (1, 4), b = (0, 1).

At rest lambda_u does not change, so y_u = x, so lambda_u = f_u'(x); x does not change, so h = 0; and h is the
mean of lambda_u: sum f_u'(x) = 0, the optimum 0.8.
"""

import pytest
import torch
from federations import quadratics, train, vector
from torch.testing import assert_close

from fedncv.engine.problem import Kept, start
from fedncv.methods import find_method


def own(state):
    return torch.cat([state.kept[u].own for u in sorted(state.kept)])


def begun(problem, *, h, lambda_u):
    state = start(problem)
    kept = {u: Kept(vector(value), problem.model.start_R[:0]) for u, value in enumerate(lambda_u)}
    return state._replace(server=state.server._replace(h_P=vector(h)), kept=kept)


def test_a_round_of_one_step_by_hand():
    """alpha = 0.5, lambda = (1, -2), h = -0.5, x = 5:  y = 5 - 0.05 (5 - 1) = 4.8 and 5 - 0.05 (16 + 2) = 4.1;
    lambda' = 1 + 0.5 * 0.2 and -2 + 0.5 * 0.9;  h' = -0.5 + 0.5/2 * 1.1;  x' = 4.45 - h'/0.5.
    """
    problem = quadratics("feddyn:alpha=0.5", steps=1)
    state = train(problem, state=begun(problem, h=-0.5, lambda_u=(1.0, -2.0)))
    assert_close(own(state), vector(1.1, -1.55))
    assert_close(state.server.h_P, vector(-0.225))
    assert_close(state.server.x_P, vector(4.9))


def test_the_second_step_feels_the_regulariser():
    """One client, a = 1, b = 0, lambda = 0, alpha = 2: y = 4.75, then 4.75 - 0.05 (4.75 + 2 * (-0.25)) = 4.5375;
    h = 2 * 0.4625, x' = y - 0.4625.
    """
    state = train(quadratics("feddyn:alpha=2", a=(1.0,), b=(0.0,), steps=2))
    assert_close(state.server.x_P, vector(4.5375 - 0.4625))


def test_reaches_the_optimum_that_fedavg_drifts_away_from():
    state = train(quadratics("feddyn:alpha=1", x=1.0), rounds=45)
    assert_close(state.server.x_P, vector(0.8), atol=1e-5, rtol=0)
    assert_close(own(state), vector(0.8, -0.8), atol=1e-4, rtol=0)  # f_u'(0.8)


def test_the_server_keeps_the_mean_of_every_lambda():
    """Also of those that were absent, with clients of any size."""
    problem = quadratics("feddyn:alpha=0.3", a=(1.0, 4.0, 2.0), b=(0.0, 1.0, 3.0), sizes=[1, 2, 3], steps=2)
    state = train(problem, ids=[1], rounds=2)
    assert_close(state.server.h_P, own(state).sum(0, keepdim=True) / 3)
    state = train(problem, ids=[0, 2], state=state)
    assert_close(state.server.h_P, own(state).sum(0, keepdim=True) / 3)


@pytest.mark.parametrize("alpha", [0, -1])
def test_there_is_no_limit_at_zero(alpha):
    with pytest.raises(ValueError, match=f"alpha must be above 0, not {alpha}"):
        find_method(f"feddyn:alpha={alpha}")
