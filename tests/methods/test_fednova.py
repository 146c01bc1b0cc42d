"""FedNova on f_u(x) = a_u/2 (x - b_u)^2 with K_u steps: Delta_u = r_u (x - b_u), r_u = 1 - (1 - lr a_u)^K_u.

x' = x - (sum p_u K_u) (sum p_u Delta_u / K_u).
"""

from federations import answer, federation, quadratics, tiny, train, vector
from torch.testing import assert_close

from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.methods import find_method

SIZES, STEPS = [1, 3], (2, 6)  # two epochs of batches of one


def unequal(method, **config):
    return quadratics(method, steps=2, sizes=SIZES, batch_size=1, **config)


def test_a_round_with_unequal_steps_by_hand():
    """p = (1/4, 3/4), K = (2, 6), tau_eff = 5."""
    r = 1 - 0.95**2, 1 - 0.8**6
    step = 5 * (r[0] * 5 / 2 / 4 + r[1] * 4 / 6 * 3 / 4)
    assert_close(train(unequal("fednova")).server.x_P, vector(5 - step))


def test_rests_where_the_normalised_updates_cancel():
    """sum p_u r_u / K_u (x - b_u) = 0: the work of a client no longer weighs twice."""
    w = (1 - 0.95**2) / 2 / 4, (1 - 0.8**6) / 6 * 3 / 4
    assert_close(train(unequal("fednova", x=1.0), rounds=30).server.x_P, vector(w[1] / sum(w)))


def test_equal_steps_are_fedavg_to_rounding():
    ours, theirs = (tiny(name, sizes=(16, 16, 16), per_round=2) for name in ("fednova", "fedavg"))
    assert_close(train(ours, rounds=3).server.x_P, train(theirs, rounds=3).server.x_P, rtol=1e-12, atol=1e-12)


def test_with_momentum_a_gradient_counts_as_often_as_it_is_used():
    """K = 2, momentum 0.5: the first gradient enters with 1 + 0.5, the second with 1."""
    problem = quadratics("fednova", steps=2, momentum=0.5)
    (arrival, _) = arrivals(problem, start(problem), problem.clients.sizes.argsort())
    assert_close(train_client(problem, 0, arrival).up.a, vector(2.5)[0])


def test_the_work_is_averaged_with_the_weights_of_the_samples():
    """sizes (1, 3), a = (1, 5), d = Delta / a = (1, 2): tau_eff = 4, mean direction 1/4 + 3/4 * 2 = 1.75."""
    method = find_method("fednova")
    ups = {0: (vector(1.0), vector(1.0)[0]), 1: (vector(2.0), vector(5.0)[0])}
    assert_close(answer(method, method.init(vector(0.0), federation()), ups, sizes=(1, 3)).x_P, vector(-7.0))
