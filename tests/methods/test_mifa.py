"""MIFA: h_u <- Delta_u, then x <- x - h_bar."""

import pytest
from federations import answer, federation, inside, model_of, quadratics, tiny, train, vector
from torch.testing import assert_close

from fedncv.methods import find_method

R = 1 - 0.95**10, 1 - 0.8**10


def test_three_rounds_by_hand():
    """1 of the first: h_bar = 1/2.  3 of the second: 2.  0 of the first: 3/2.  The server step is 2."""
    method = find_method("mifa:server_lr=2")
    server = method.init(vector(0.0), federation())
    xs = []
    for u, delta in ((0, 1.0), (1, 3.0), (0, 0.0)):
        server = answer(method, server, {u: (vector(delta),)})
        xs.append(inside(server, "x_P").item())
    assert xs == pytest.approx([-1, -5, -8])


def test_clients_count_by_their_samples():
    method = find_method("mifa")
    server = answer(method, method.init(vector(0.0), federation((1, 3))), {1: (vector(8.0),)}, sizes=(1, 3))
    assert_close(inside(server, "x_P"), vector(-6.0))


@pytest.mark.parametrize(("steps", "lr", "rest"), [(10, 0.05, R[1] / sum(R)), (1, 0.2, 0.8)])
def test_settles_where_fedavg_with_all_clients_does(steps, lr, rest):
    """At rest h_u = Delta_u and h_bar = 0: r_2 / (r_1 + r_2); the optimum with one step."""
    problem = quadratics("mifa", x=0.7, steps=steps, lr=lr)
    state = None
    for _ in range(35):
        state = train(problem, ids=[1], state=train(problem, ids=[0], state=state))
    assert_close(model_of(state), vector(rest), atol=1e-5, rtol=0)
    assert_close(model_of(train(problem, ids=[0], state=state)), vector(rest), atol=1e-5, rtol=0)


def test_with_all_clients_in_every_round_it_is_fedavg_to_rounding():
    ours, theirs = tiny("mifa"), tiny("fedavg")
    assert_close(model_of(train(ours, rounds=3)), model_of(train(theirs, rounds=3)), rtol=1e-12, atol=1e-12)


def test_a_server_step_of_zero_is_refused():
    with pytest.raises(ValueError, match="server_lr must be above 0 and finite, not 0"):
        find_method("mifa:server_lr=0")
