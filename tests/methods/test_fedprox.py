"""FedProx on f_u(x) = a_u/2 (x - b_u)^2: local steps on a_u (y - b_u) + mu (y - x).

y_{k+1} - x = (1 - lr (a + mu)) (y_k - x) - lr a (x - b), so after K steps
x - y = w_u (x - b_u),   w_u = (1 - (1 - lr (a_u + mu))^K) a_u / (a_u + mu).
"""

import pytest
from federations import quadratics, train, vector
from torch.testing import assert_close

from fedncv.methods import find_method


def test_two_steps_by_hand():
    """One client, a = 4, b = 1, mu = 2, x = 5: y = 5 - 0.05 * 16 = 4.2, then 4.2 - 0.05 (4 * 3.2 + 2 * (-0.8))."""
    problem = quadratics("fedprox:mu=2", a=(4.0,), b=(1.0,), steps=2)
    assert_close(train(problem).server.x_P, vector(4.2 - 0.05 * 11.2))


@pytest.mark.parametrize("mu", [0.5, 10.0])
def test_rests_where_the_pulled_updates_cancel(mu):
    """sum_u w_u (x - b_u) = 0. Larger mu: closer to the optimum 0.8, where FedAvg drifts to 0.69."""
    w = [(1 - (1 - 0.05 * (a + mu)) ** 10) * a / (a + mu) for a in (1.0, 4.0)]
    rest = w[1] / sum(w)
    assert_close(train(quadratics(f"fedprox:mu={mu}", x=rest)).server.x_P, vector(rest))
    assert 0.6899 < rest < 0.8


def test_a_push_away_is_refused():
    with pytest.raises(ValueError, match="mu must be at least 0, not -1"):
        find_method("fedprox:mu=-1")


def test_without_a_pull_two_steps_are_gradient_steps():
    """a = 4, b = 1: y - 1 shrinks by 0.8 a step."""
    assert_close(train(quadratics("fedprox:mu=0", a=(4.0,), b=(1.0,), steps=2)).server.x_P, vector(1 + 4 * 0.8**2))
