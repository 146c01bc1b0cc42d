"""FedAvg on f_u(x) = a_u/2 (x - b_u)^2, a = (1, 4), b = (0, 1).

K steps of length lr from x give  x - y = r_u (x - b_u),  r_u = 1 - (1 - lr a_u)^K.
"""

import pytest
import torch
from federations import answer, federation, quadratics, tiny, train, vector
from torch.testing import assert_close

from fedncv.methods import find_method

R = 1 - 0.95**10, 1 - 0.8**10


def test_a_round_by_hand():
    """x = 5, K = 1: gradients 5 and 16, x' = 5 - 0.05 (5 + 16)/2."""
    assert_close(train(quadratics("fedavg", steps=1)).server.x_P, vector(4.475))


def test_clients_count_by_their_samples():
    """Three of four samples are the second client's: x' = 5 - 0.05 (5 + 3 * 16)/4."""
    assert_close(train(quadratics("fedavg", steps=1, sizes=[1, 3])).server.x_P, vector(4.3375))


def test_weights_are_normalised_over_the_clients_that_answered():
    assert_close(train(quadratics("fedavg", steps=1, sizes=[1, 3]), ids=[1]).server.x_P, vector(4.2))


def test_drifts_to_the_mean_of_the_local_ends():
    """At rest r_1 (x - 0) + r_2 (x - 1) = 0:  x = r_2 / (r_1 + r_2) = 0.6899, not the optimum 0.8."""
    x_P = train(quadratics("fedavg", x=1.0), rounds=25).server.x_P
    assert_close(x_P, vector(R[1] / sum(R)))
    assert_close(x_P, vector(0.6899), atol=1e-4, rtol=0)


def test_one_local_step_has_no_drift():
    """x' - 0.8 = (1 - 0.2 * 2.5)(x - 0.8)."""
    assert_close(train(quadratics("fedavg", x=1.0, steps=1, lr=0.2), rounds=40).server.x_P, vector(0.8))


def test_the_server_step_scales_the_mean_update():
    method = find_method("fedavg:server_lr=0.5")
    server = method.init(vector(1.0, 2.0), federation())
    server = answer(method, server, {0: (vector(1.0, 0.0),), 1: (vector(3.0, -4.0),)})
    assert_close(server.x_P, vector(1 - 0.5 * 2, 2 + 0.5 * 2))


def test_a_server_step_of_zero_is_refused():
    with pytest.raises(ValueError, match="server_lr must be above 0 and finite, not 0"):
        find_method("fedavg:server_lr=0")


def test_a_client_predicts_with_its_model_and_its_statistics():
    problem = tiny("fedavg")
    ask = problem.ask(0, problem.model.start_R + 1, 0)
    used = problem.method.predict(ask, problem.model.start_P, None, ())
    assert used.x_P is problem.model.start_P
    assert used.buffers_R is ask.buffers_R


def test_the_server_takes_another_model():
    method = find_method("fedavg")
    server = method.with_model(method.init(torch.zeros(2), None), torch.ones(2))
    assert torch.equal(method.model(server), torch.ones(2))


def test_a_server_step_without_end_is_refused():
    with pytest.raises(ValueError, match="above 0 and finite, not inf"):
        find_method("fedavg:server_lr=inf")
