"""Coefficients: the optimum, its limits, and which estimate of it keeps the estimator unbiased."""

from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap
from torch.testing import assert_close

from fedncv.estimators import (
    Moments,
    leave_one_out_betas,
    linearised_units,
    no_moments,
    observe,
    optimal_beta,
    running_beta,
    squared_correlation,
)

PROPERTY = settings(deadline=None, max_examples=40, derandomize=True)
numbers = st.integers(-64, 64).map(lambda i: i / 8)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def pairs(draw, rows=st.integers(2, 6)):
    U, P = draw(rows), draw(st.integers(1, 3))
    values = st.lists(numbers, min_size=U * P, max_size=U * P)
    return tuple(tensor(draw(values)).reshape(U, P) for _ in range(2))


def spread(a_UP):
    return (a_UP - a_UP.mean(dim=0)).square().sum()


@PROPERTY
@given(pairs())
def test_the_optimum_leaves_one_minus_rho_squared_and_no_beta_leaves_less(pair):
    a_UP, b_UP = pair
    beta = optimal_beta(a_UP, b_UP)
    least = spread(a_UP - beta * b_UP)
    assert_close(least, (1 - squared_correlation(a_UP, b_UP)) * spread(a_UP), atol=1e-9, rtol=0)
    for other in (beta - 0.1, beta + 0.1):
        assert least <= spread(a_UP - other * b_UP) + 1e-9


def test_coefficients_by_hand():
    """a = (0, 2, 4), b = (0, 1, 5): centred products 2·2 + 2·3 = 10, Var(b) 4 + 1 + 9 = 14, Var(a) 8."""
    a_UP, b_UP = tensor([[0.0], [2.0], [4.0]]), tensor([[0.0], [1.0], [5.0]])
    assert_close(optimal_beta(a_UP, b_UP), tensor(10 / 14))
    assert_close(squared_correlation(a_UP, b_UP), tensor(100 / (8 * 14)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, -0.1])
@pytest.mark.parametrize("num", [3, 11, 38])
def test_a_constant_tells_nothing_even_when_its_mean_is_rounded(dtype, value, num):
    """The mean of 38 times 0.1 misses 0.1 by more than an epsilon, in either precision."""
    a_UP = torch.rand(num, 1, generator=torch.Generator().manual_seed(0)).to(dtype)
    constant_UP, zero = torch.full((num, 1), value, dtype=dtype), torch.zeros((), dtype=dtype)
    assert_close(optimal_beta(a_UP, constant_UP), zero, atol=0, rtol=0)
    assert_close(squared_correlation(a_UP, constant_UP), zero, atol=0, rtol=0)
    assert_close(squared_correlation(constant_UP, a_UP), zero, atol=0, rtol=0)


def test_a_small_variation_is_not_mistaken_for_a_constant():
    """b = 1 ± 10⁻⁹ in float64 carries six digits more than the rounding of its mean; so does a tiny b."""
    sign_UP = tensor([[1.0], [-1.0], [1.0], [-1.0]])
    assert_close(optimal_beta(sign_UP, 1 + 1e-9 * sign_UP), tensor(1e9), rtol=1e-6, atol=0)
    assert_close(optimal_beta(sign_UP, 1e-20 * sign_UP), tensor(1e20), rtol=1e-12, atol=0)


def test_a_large_mean_costs_no_digits():
    """Centring b alone would do in exact arithmetic; with a mean of 10⁸ it costs seven digits."""
    a_UP, b_UP = tensor([[0.0], [1.0], [5.0]]), tensor([[0.1], [0.2], [0.4]])
    assert_close(optimal_beta(a_UP + 1e8, b_UP), optimal_beta(a_UP, b_UP), rtol=1e-12, atol=0)


def test_one_unit_has_nothing_to_fit():
    one_UP = tensor([[3.0]])
    assert_close(optimal_beta(one_UP, one_UP), tensor(0.0))
    assert_close(leave_one_out_betas(one_UP.repeat(2, 1), tensor([[1.0], [2.0]])), tensor([0.0, 0.0]))


@PROPERTY
@given(pairs(rows=st.integers(3, 5)))
def test_leave_one_out_betas_do_not_see_their_own_unit(pair):
    a_UP, b_UP = pair
    beta_U = leave_one_out_betas(a_UP, b_UP)
    for u in range(len(a_UP)):
        rest = [v for v in range(len(a_UP)) if v != u]
        assert_close(beta_U[u], optimal_beta(a_UP[rest], b_UP[rest]))


def mean_over(draws, a_NP, b_NP, betas):
    """E over the draws of mean_S(a_u − β_u (b_u − b̄)) − ā."""
    estimates = []
    for S in map(list, draws):
        beta_S = betas(a_NP[S], b_NP[S]).expand(len(S))
        estimates.append((a_NP[S] - beta_S[:, None] * (b_NP[S] - b_NP.mean(dim=0))).mean(dim=0))
    return torch.stack(estimates).mean(dim=0) - a_NP.mean(dim=0)


def test_leave_one_out_is_unbiased_with_replacement_only_and_in_sample_never():
    a_NP, b_NP = tensor([[0.0], [1.0], [0.0], [4.0]]), tensor([[0.0], [1.0], [2.0], [4.0]])
    with_replacement, without = list(product(range(4), repeat=3)), list(combinations(range(4), 3))
    assert_close(mean_over(with_replacement, a_NP, b_NP, leave_one_out_betas), tensor([0.0]), atol=1e-12, rtol=0)
    assert mean_over(without, a_NP, b_NP, leave_one_out_betas).abs() > 1e-3
    assert mean_over(with_replacement, a_NP, b_NP, optimal_beta).abs() > 1e-3
    assert mean_over(without, a_NP, b_NP, optimal_beta).abs() > 1e-3


def test_running_moments_by_hand():
    """Round one: S_ab = 2, S_bb = 8 over m − 1 = 1. Round two: 10 and 14 over 2; λ = 1/2."""
    moments = observe(no_moments(), tensor([[0.0], [1.0]]), tensor([[0.0], [4.0]]), forget=0.5)
    assert_close(tuple(moments), (tensor(2.0), tensor(8.0)))
    a_SP, b_SP = tensor([[0.0], [2.0], [4.0]]), tensor([[0.0], [1.0], [5.0]])
    moments = observe(moments, a_SP, b_SP, forget=0.5)
    assert_close(tuple(moments), (tensor(1.0 + 5.0), tensor(4.0 + 7.0)))
    assert_close(running_beta(moments), tensor(6 / 11))
    assert_close(running_beta(observe(moments, a_SP, b_SP, forget=0.0)), tensor(10 / 14))


def test_nothing_observed_is_beta_zero_and_a_round_of_one_adds_nothing():
    assert_close(running_beta(no_moments()), tensor(0.0))
    one_SP = torch.ones(1, 2)
    moments = observe(Moments(tensor(2.0), tensor(4.0)), one_SP, one_SP, forget=1.0)
    assert_close(tuple(moments), (tensor(2.0), tensor(4.0)))
    assert no_moments().var.dtype == observe(no_moments(), one_SP, one_SP, forget=1.0).cov.dtype == torch.float64


def test_moments_of_float32_rounds_are_exact_products():
    """(1 + 2⁻¹³)² needs 27 digits, which float32 has not."""
    a_SP = torch.tensor([[1.0 + 2**-13], [-1.0 - 2**-13]])
    moments = observe(no_moments(), a_SP, a_SP, forget=1.0)
    expected = tensor(2 * (1 + 2**-13) ** 2)
    assert_close(tuple(moments), (expected, expected), rtol=1e-15, atol=0)


def test_deviations_of_float32_rounds_are_not_rounded():
    """a = (2²⁴, 1, 0) deviates by numbers that float32 has not; with b = (0, 1, 3) the sum is 1 − 4/3 (2²⁴ + 1)."""
    moments = observe(
        no_moments(), torch.tensor([[2.0**24], [1.0], [0.0]]), torch.tensor([[0.0], [1.0], [3.0]]), forget=1
    )
    assert_close(moments.cov, tensor((1 - 4 / 3 * (2**24 + 1)) / 2), rtol=1e-14, atol=0)


def test_linearised_units_give_the_ratio_estimators_deviation():
    """Σ p a / Σ p − centre = Σ p (a − centre) / Σ p."""
    a_SP, p_S, centre_P = tensor([[1.0], [7.0]]), tensor([0.1, 0.3]), tensor([4.0])
    units_SP = linearised_units(a_SP, p_S, centre_P)
    assert_close(units_SP, tensor([[-0.3], [0.9]]))
    assert_close(units_SP.sum(dim=0) / p_S.sum(), tensor([5.5]) - centre_P)
    assert_close(linearised_units(a_SP[:1], p_S[:1], centre_P), tensor([[-0.3]]))


def test_coefficients_vmap():
    generator = torch.Generator().manual_seed(0)
    a_RUP, b_RUP = torch.randn(2, 3, 4, 2, generator=generator, dtype=torch.float64)

    def all_of_them(a_UP, b_UP):
        moments = observe(no_moments(), a_UP, b_UP, forget=0.9)
        return (
            optimal_beta(a_UP, b_UP)
            + squared_correlation(a_UP, b_UP)
            + running_beta(moments)
            + leave_one_out_betas(a_UP, b_UP)[0]
        )

    loop = torch.stack([all_of_them(a, b) for a, b in zip(a_RUP, b_RUP, strict=True)])
    assert_close(vmap(all_of_them)(a_RUP, b_RUP), loop)


@pytest.mark.parametrize("function", [optimal_beta, squared_correlation, leave_one_out_betas])
def test_mismatched_shapes_are_refused(function):
    with pytest.raises(ValueError, match="shapes differ"):
        function(torch.zeros(3, 2), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="shapes differ"):
        function(torch.zeros(3, 2), torch.zeros(2, 2))


def test_bad_units_are_refused():
    with pytest.raises(ValueError, match="2 units"):
        linearised_units(torch.zeros(2, 1), torch.ones(3), torch.zeros(1))
    with pytest.raises(ValueError, match="shapes differ"):
        linearised_units(torch.zeros(2, 1), torch.ones(2), torch.zeros(2))
