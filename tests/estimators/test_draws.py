"""Closed-form covariances against every draw, one by one."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap
from torch.testing import assert_close

from fedncv.estimators import design_covariance, uniform_covariance, uniform_joint_inclusion

PROPERTY = settings(deadline=None, max_examples=40, derandomize=True)
numbers = st.integers(-64, 64).map(lambda i: i / 8)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def populations(draw):
    N, P = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    values = st.lists(numbers, min_size=N * P, max_size=N * P)
    a_NP, b_NP = (tensor(draw(values)).reshape(N, P) for _ in range(2))
    return a_NP, b_NP, draw(st.integers(1, N))


def enumerated(draws, x, y):
    """Σ_P Cov of two statistics over (probability, units) pairs."""
    x_DP, y_DP = (torch.stack([f(list(S)) for _, S in draws]) for f in (x, y))
    probability_D1 = tensor([probability for probability, _ in draws])[:, None]
    dx_DP, dy_DP = (z - (probability_D1 * z).sum(dim=0) for z in (x_DP, y_DP))
    return (probability_D1 * dx_DP * dy_DP).sum()


@PROPERTY
@given(populations())
def test_uniform_draws_of_every_size(population):
    a_NP, b_NP, m = population
    subsets = list(combinations(range(len(a_NP)), m))
    draws = [(1 / len(subsets), S) for S in subsets]
    expected = enumerated(draws, lambda S: a_NP[S].mean(dim=0), lambda S: b_NP[S].mean(dim=0))
    assert_close(uniform_covariance(a_NP, b_NP, num_drawn=m), expected, atol=1e-10, rtol=1e-10)
    # The same through inclusion probabilities: the mean over S is the total of a/N, b/N.
    N = len(a_NP)
    joint_NN = uniform_joint_inclusion(N, m)
    assert_close(design_covariance(a_NP / N, b_NP / N, joint_NN), expected, atol=1e-10, rtol=1e-10)


def test_an_unequal_design():
    """{0,1} with 1/2, {1,2} with 1/3, {2} with 1/6."""
    draws = [(1 / 2, (0, 1)), (1 / 3, (1, 2)), (1 / 6, (2,))]
    joint_NN = tensor([[1 / 2, 1 / 2, 0], [1 / 2, 5 / 6, 1 / 3], [0, 1 / 3, 1 / 2]])
    a_NP, b_NP = tensor([[1.0, 0.0], [-4.0, 2.0], [6.0, 1.0]]), tensor([[2.0, 3.0], [0.0, 1.0], [5.0, -2.0]])
    total = lambda z_NP: lambda S: (z_NP[S] / joint_NN.diagonal()[S][:, None]).sum(dim=0)  # noqa: E731
    assert_close(design_covariance(a_NP, b_NP, joint_NN), enumerated(draws, total(a_NP), total(b_NP)))
    assert_close(
        design_covariance(a_NP.unsqueeze(2), b_NP.unsqueeze(2), joint_NN), design_covariance(a_NP, b_NP, joint_NN)
    )


def test_joint_inclusion_by_hand():
    """2 of 4: each in 1/2 of the draws, a pair in 1 of 6."""
    expected_NN = torch.full((4, 4), 1 / 6, dtype=torch.float64).fill_diagonal_(0.5)
    assert_close(uniform_joint_inclusion(4, 2), expected_NN)
    assert_close(uniform_joint_inclusion(1, 1), tensor([[1.0]]))


def test_variance_by_hand():
    """Units 0 and 4, one drawn: mean 2, variance 4. Both drawn: none."""
    a_NP = tensor([[0.0], [4.0]])
    assert_close(uniform_covariance(a_NP, a_NP, num_drawn=1), tensor(4.0))
    assert_close(uniform_covariance(a_NP, a_NP, num_drawn=2), tensor(0.0))


def test_a_large_mean_costs_no_digits():
    """Centring either unit would do in exact arithmetic; with a mean of 10⁸ only centring both does."""
    small_NP, other_NP = tensor([[0.0], [1.0], [5.0]]), tensor([[0.1], [0.2], [0.4]])
    expected = uniform_covariance(small_NP, other_NP, num_drawn=1)
    for pair in ((small_NP + 1e8, other_NP), (other_NP, small_NP + 1e8)):
        assert_close(uniform_covariance(*pair, num_drawn=1), expected, rtol=1e-12, atol=0)


def test_covariances_vmap():
    generator = torch.Generator().manual_seed(0)
    a_RNP, b_RNP = torch.randn(2, 3, 4, 2, generator=generator, dtype=torch.float64)

    def both(a_NP, b_NP):
        joint_NN = uniform_joint_inclusion(4, 2)
        return uniform_covariance(a_NP, b_NP, num_drawn=2) + design_covariance(a_NP, b_NP, joint_NN)

    loop = torch.stack([both(a, b) for a, b in zip(a_RNP, b_RNP, strict=True)])
    assert_close(vmap(both)(a_RNP, b_RNP), loop)


@pytest.mark.parametrize("num_drawn", [0, 4])
def test_impossible_draws_are_refused(num_drawn):
    with pytest.raises(ValueError, match=rf"1\.\.3, got {num_drawn}"):
        uniform_covariance(torch.zeros(3, 1), torch.zeros(3, 1), num_drawn=num_drawn)


def test_mismatched_shapes_are_refused():
    with pytest.raises(ValueError, match="shapes differ"):
        uniform_covariance(torch.zeros(3, 1), torch.zeros(2, 1), num_drawn=1)
    with pytest.raises(ValueError, match="shapes differ"):
        design_covariance(torch.zeros(3, 1), torch.zeros(3, 2), torch.eye(3))
    with pytest.raises(ValueError, match=r"3 units .* got shape \(3, 2\)"):
        design_covariance(torch.zeros(3, 1), torch.zeros(3, 1), torch.ones(3, 2))
