"""FedVARP: x <- x - (h_bar + sum_S w_u (Delta_u - h_u)).

One of two clients f_u(x) = a_u/2 (x - b_u)^2 in turn: before its round the server remembers exactly what each
will say (the path is periodic), so both rounds step by h_bar, and h_bar = 0: r_1 x + r_2 (x - 1) = 0.
"""

import pytest
import torch
from federations import answer, federation, inside, model_of, quadratics, tiny, train, vector
from torch.testing import assert_close

from fedncv.methods import find_method

R = 1 - 0.95**10, 1 - 0.8**10


def h_bar(server):
    return server.sum_h.total_P / server.n_N.sum()


def in_turn(problem, rounds):
    state = None
    for _ in range(rounds):
        state = train(problem, ids=[0], state=state)
        state = train(problem, ids=[1], state=state)
    return state


def test_three_rounds_by_hand():
    """Delta = 1 of the first: step 1, h_bar = 1/2.  3 of the second: 1/2 + 3, h_bar = 2.  2 of the first: 2 + 1."""
    method = find_method("fedvarp")
    server = method.init(vector(0.0), federation())
    server = answer(method, server, {0: (vector(1.0),)})
    assert_close(inside(server, "x_P"), vector(-1.0))
    server = answer(method, server, {1: (vector(3.0),)})
    assert_close(inside(server, "x_P"), vector(-4.5))
    server = answer(method, server, {0: (vector(2.0),)})
    assert_close(inside(server, "x_P"), vector(-7.5))
    assert_close(torch.cat([inside(server, "h")[0], inside(server, "h")[1]]), vector(2.0, 3.0))


def test_clients_count_by_their_samples_also_in_the_memory():
    """sizes (1, 3, 4): after Delta_0 = 8 and Delta_1 = 16, h_bar = (8 + 48)/8 = 7; server step 0.5.
    Then 0 and 1 again with (0, 20): 7 + (1 * (-8) + 3 * 4)/4 = 8.
    """
    method, sizes = find_method("fedvarp:server_lr=0.5"), (1, 3, 4)
    server = method.init(vector(0.0), federation(sizes))
    server = answer(method, server, {0: (vector(8.0),), 1: (vector(16.0),)}, sizes=sizes)
    assert_close(inside(server, "x_P"), vector(-0.5 * 14))
    assert_close(h_bar(server), vector(7.0))
    server = answer(method, server, {0: (vector(0.0),), 1: (vector(20.0),)}, sizes=sizes)
    assert_close(inside(server, "x_P"), vector(-7 - 0.5 * 8))


def test_settles_where_fedavg_with_all_clients_does_without_noise_of_sampling():
    problem = quadratics("fedvarp", x=0.7)
    state = in_turn(problem, 35)
    for ids in ([0], [1]):
        state = train(problem, ids=ids, state=state)
        assert_close(model_of(state), vector(R[1] / sum(R)), atol=1e-6, rtol=0)


def test_settles_at_the_optimum_with_one_local_step():
    state = in_turn(quadratics("fedvarp", x=0.7, steps=1, lr=0.2), 40)
    assert_close(model_of(state), vector(0.8), atol=1e-5, rtol=0)


def test_with_all_clients_in_every_round_it_is_fedavg_to_rounding():
    ours, theirs = tiny("fedvarp"), tiny("fedavg")
    assert_close(model_of(train(ours, rounds=3)), model_of(train(theirs, rounds=3)), rtol=1e-12, atol=1e-12)


def test_the_running_sum_is_the_sum():
    problem = tiny("fedvarp", per_round=2)
    server = train(problem, rounds=6).server
    n_N = problem.federation.sizes_N
    assert_close(server.sum_h.total_P, sum(n_N[u] * row for u, row in server.h.items()), rtol=1e-12, atol=1e-12)
    assert server.sum_h.total_P.dtype == torch.float64


def test_the_running_sum_is_exact_in_float32_too():
    """1 - 2^-30 is no float32. What was added is what is taken away."""
    method = find_method("fedvarp")
    server = method.init(torch.zeros(1), federation((1,)))
    server = answer(method, server, {0: (torch.tensor([2.0**-30]),)}, sizes=(1,))
    server = answer(method, server, {0: (torch.ones(1),)}, sizes=(1,))
    assert torch.equal(server.sum_h.total_P, vector(1.0))
    server = answer(method, server, {0: (torch.zeros(1),)}, sizes=(1,))
    assert torch.equal(server.sum_h.total_P, vector(0.0))


def test_two_clients_of_a_round_are_summed_in_float64():
    """1 + 2^-30 is no float32 either."""
    method = find_method("fedvarp")
    server = method.init(torch.zeros(1), federation())
    server = answer(method, server, {0: (torch.ones(1),), 1: (torch.tensor([2.0**-30]),)})
    assert torch.equal(server.sum_h.total_P, vector(1 + 2.0**-30))
    server = answer(method, server, {0: (torch.zeros(1),), 1: (torch.zeros(1),)})
    assert torch.equal(server.sum_h.total_P, vector(0.0))


def test_a_client_that_holds_more_by_now_weighs_more_in_the_memory():
    """n = (1, 1), Delta = (4, 8): h_bar = 6. Client 0 says 4 again with n = 3: h_bar = (3 * 4 + 8) / 4 = 5."""
    method = find_method("fedvarp")
    server = method.init(vector(0.0), federation())
    server = answer(method, server, {0: (vector(4.0),), 1: (vector(8.0),)})
    assert_close(h_bar(server), vector(6.0))
    server = answer(method, server, {0: (vector(4.0),)}, sizes=(3, 1))
    assert_close(h_bar(server), vector(5.0))


def test_a_server_step_of_zero_is_refused():
    with pytest.raises(ValueError, match="server_lr must be above 0 and finite, not 0"):
        find_method("fedvarp:server_lr=0")
