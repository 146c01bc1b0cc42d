"""FedStale: x <- x - (beta h_bar + sum_S w_u (Delta_u - beta h_u)).

Two clients f_u(x) = a_u/2 (x - b_u)^2, b = (0, 1), in turn. On a periodic path h_u = Delta_u, so a round of u
steps by beta (Delta_1 + Delta_2)/2 + (1 - beta) Delta_u; over a period Delta_1 + Delta_2 = 0. With x_1, x_2 the
models that the first and the second client receive:
    r_1 x_1 + r_2 (x_2 - 1) = 0,     x_2 = x_1 - (1 - beta) r_1 x_1.
beta = 0 is FedAvg's swing, beta = 1 rests at r_2 / (r_1 + r_2); between them the noise of sampling is
multiplied by 1 - beta.
"""

import pytest
import torch
from federations import answer, federation, inside, model_of, quadratics, tiny, train, vector
from torch.testing import assert_close

from fedncv.methods import find_method


def test_three_rounds_by_hand():
    """beta = 1/2.  1 of the first: step 1.  3 of the second: 1/2 * 1/2 + 3.  2 of the first: 1/2 * 2 + 2 - 1/2."""
    method = find_method("fedstale:beta=0.5")
    server = method.init(vector(0.0), federation())
    xs = []
    for u, delta in ((0, 1.0), (1, 3.0), (0, 2.0)):
        server = answer(method, server, {u: (vector(delta),)})
        xs.append(inside(server, "x_P").item())
    assert xs == pytest.approx([-1, -4.25, -6.75])


@pytest.mark.parametrize("beta", [0.0, 0.6, 1.0])
def test_swings_as_far_as_the_algebra_says(beta):
    r = 1 - 0.95**10, 1 - 0.8**10
    first = r[1] / (r[0] + r[1] * (1 - (1 - beta) * r[0]))
    second = first * (1 - (1 - beta) * r[0])
    problem = quadratics(f"fedstale:beta={beta}", x=0.7)
    state = None
    for _ in range(35):
        state = train(problem, ids=[1], state=train(problem, ids=[0], state=state))
    assert_close(model_of(state), vector(first), atol=1e-5, rtol=0)
    assert_close(model_of(train(problem, ids=[0], state=state)), vector(second), atol=1e-5, rtol=0)


def test_full_trust_is_fedvarp():
    ours, theirs = tiny("fedstale:beta=1", per_round=2), tiny("fedvarp", per_round=2)
    assert torch.equal(model_of(train(ours, rounds=4)), model_of(train(theirs, rounds=4)))


def test_clients_count_by_their_samples_and_the_server_step_scales():
    """sizes (1, 3), beta 1/2, server step 2: (4 + 3 * 8)/4 = 7; then h_bar = 7 and 0, 0: 3.5 - (2 + 3 * 4)/4 = 0."""
    method = find_method("fedstale:beta=0.5,server_lr=2")
    server = method.init(vector(0.0), federation((1, 3)))
    server = answer(method, server, {0: (vector(4.0),), 1: (vector(8.0),)}, sizes=(1, 3))
    assert_close(inside(server, "x_P"), vector(-14.0))
    server = answer(method, server, {0: (vector(0.0),), 1: (vector(0.0),)}, sizes=(1, 3))
    assert_close(inside(server, "x_P"), vector(-14.0))


@pytest.mark.parametrize("text", ["beta=-0.1", "beta=1.1", "server_lr=0"])
def test_values_out_of_range_are_refused(text):
    name, value = text.split("=")
    with pytest.raises(ValueError, match=f"{name} must be .*, not {value}"):
        find_method(f"fedstale:{text}")
