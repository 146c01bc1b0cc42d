"""Drift corrections: centred for any α, SCAFFOLD and FedAvg at the ends, α learned as derived."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap
from torch.testing import assert_close

from fedncv.estimators import (
    drift_corrections,
    learned_alpha,
    raw_gradient,
    recentring,
    smoothed,
    weighted_mean,
    weighted_sum,
)

PROPERTY = settings(deadline=None, max_examples=40, derandomize=True)
numbers = st.integers(-64, 64).map(lambda i: i / 8)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def corrections(c_NP, alpha_N, n_N):
    c, alpha_c = weighted_sum(c_NP, n_N), weighted_sum(c_NP, n_N * alpha_N)
    return drift_corrections(c_NP, alpha_N, weighted_mean(c), recentring(c, alpha_c))


@st.composite
def clients(draw):
    N, P = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    c_NP = tensor(draw(st.lists(numbers, min_size=N * P, max_size=N * P))).reshape(N, P)
    alpha_N = tensor(draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=N, max_size=N)))
    return c_NP, alpha_N, tensor(draw(st.lists(st.integers(0, 9), min_size=N, max_size=N).filter(any)))


@PROPERTY
@given(clients())
def test_corrections_cancel_in_the_mean_for_any_alphas_and_sizes(federation):
    c_NP, alpha_N, n_N = federation
    e_NP = corrections(c_NP, alpha_N, n_N)
    assert_close((n_N[:, None] * e_NP).sum(dim=0), torch.zeros_like(e_NP[0]), atol=1e-10, rtol=0)


@PROPERTY
@given(clients())
def test_they_are_alpha_times_the_deviation_less_the_mean_of_that(federation):
    c_NP, alpha_N, n_N = federation
    p_N1 = (n_N / n_N.sum())[:, None]
    term_NP = alpha_N[:, None] * (c_NP - (p_N1 * c_NP).sum(dim=0))
    assert_close(corrections(c_NP, alpha_N, n_N), term_NP - (p_N1 * term_NP).sum(dim=0))


@PROPERTY
@given(clients())
def test_equal_alphas_need_no_recentring_and_alpha_one_is_scaffold(federation):
    """e_u = c_u − c̄, the correction of SCAFFOLD's step y ← y − η (g − c_u + c̄)."""
    c_NP, _, n_N = federation
    ones_N = torch.ones_like(n_N)
    mean_P = weighted_mean(weighted_sum(c_NP, n_N))
    assert_close(corrections(c_NP, ones_N, n_N), c_NP - mean_P)
    assert_close(corrections(c_NP, 0 * ones_N, n_N), torch.zeros_like(c_NP))


def test_recentring_by_hand():
    """p = (1/4, 3/4), c = (4, 8), c̄ = 7, α = (1, 1/3): r = 1/4 · (−3) + 3/4 · 1/3 · 1 = −1/2."""
    c_NP, n_N, alpha_N = tensor([[4.0], [8.0]]), tensor([1.0, 3.0]), tensor([1.0, 1 / 3])
    r_P = recentring(weighted_sum(c_NP, n_N), weighted_sum(c_NP, n_N * alpha_N))
    assert_close(r_P, tensor([-0.5]))
    assert_close(drift_corrections(c_NP, alpha_N, tensor([7.0]), r_P), tensor([[-2.5], [5 / 6]]))


def test_corrections_come_in_the_clients_dtype():
    c_NP = torch.tensor([[4.0], [8.0]])
    e_NP = drift_corrections(c_NP, torch.ones(2), tensor([7.0]), tensor([-0.5]))
    assert_close(e_NP, torch.tensor([[-2.5], [1.5]]))


def test_the_raw_gradient_undoes_the_correction():
    """Two steps of η = 1/2 along g − e with g = 3, then 5: Δ = 1/2 (3 + 5 − 2e), so c = 4 for any e."""
    for e in (0.0, 1.5, -7.0):
        delta_P = tensor([0.5 * (3 + 5 - 2 * e)])
        assert_close(raw_gradient(delta_P, tensor([e]), lr=0.5, steps=2), tensor([4.0]))


def test_scaffolds_option_two():
    """c_u⁺ = c_u − c̄ + (x − y)/(Kη) with α = 1."""
    c_NP, n_N, delta_NP = tensor([[4.0], [8.0]]), tensor([1.0, 1.0]), tensor([[1.0], [3.0]])
    e_NP = corrections(c_NP, tensor([1.0, 1.0]), n_N)
    expected_NP = c_NP - 6.0 + delta_NP / (5 * 0.1)
    assert_close(raw_gradient(delta_NP, e_NP, lr=0.1, steps=5), expected_NP)


def test_no_step_is_no_nan():
    assert_close(raw_gradient(tensor([0.0]), tensor([2.0]), lr=0.1, steps=0), tensor([2.0]))


def test_learned_alpha_by_hand():
    """c̄ = (1, 1); old deviations (2, 0), (1, 1), (0, 2), (0, 0): projections 1/2, −1 → 0, 3 → 1, and 0."""
    mean_P = tensor([1.0, 1.0])
    old_SP = tensor([[3.0, 1.0], [2.0, 2.0], [1.0, 3.0], [1.0, 1.0]])
    new_SP = tensor([[2.0, 9.0], [0.0, 0.0], [5.0, 7.0], [4.0, 4.0]])
    seen_S = torch.tensor([True, True, True, True])
    assert_close(learned_alpha(new_SP, old_SP, mean_P, seen_S), tensor([0.5, 0.0, 1.0, 0.0]))
    assert_close(learned_alpha(new_SP, old_SP, mean_P, ~seen_S), tensor([0.0, 0.0, 0.0, 0.0]))
    cube = learned_alpha(new_SP.reshape(4, 1, 2), old_SP.reshape(4, 1, 2), mean_P.reshape(1, 2), seen_S)
    assert_close(cube, tensor([0.5, 0.0, 1.0, 0.0]))


@PROPERTY
@given(clients())
def test_no_alpha_in_the_unit_interval_does_better_than_the_learned_one(federation):
    old_SP, alpha_S, _ = federation
    new_SP, mean_P = old_SP.flip(0) + 1, old_SP.mean(dim=0) + 0.5
    error = lambda a_S: ((new_SP - mean_P) - a_S[:, None] * (old_SP - mean_P)).square().sum(dim=1)  # noqa: E731
    learned_S = learned_alpha(new_SP, old_SP, mean_P, torch.ones(len(old_SP), dtype=torch.bool))
    assert (error(learned_S) <= error(alpha_S) + 1e-9).all()


def test_smoothing_moves_part_of_the_way():
    alpha_S, target_S = tensor([0.0, 1.0]), tensor([1.0, 0.5])
    assert_close(smoothed(alpha_S, target_S, rate=0.25), tensor([0.25, 0.875]))
    assert_close(smoothed(alpha_S, target_S, rate=1.0), target_S)
    assert_close(smoothed(alpha_S, target_S, rate=0.0), alpha_S)


def test_drift_functions_vmap():
    generator = torch.Generator().manual_seed(0)
    c_RNP, new_RNP = torch.randn(2, 3, 4, 2, generator=generator, dtype=torch.float64)
    alpha_RN, n_RN = torch.rand(2, 3, 4, generator=generator, dtype=torch.float64)
    steps_R = torch.tensor([1, 0, 7])

    def all_of_them(c_NP, new_NP, alpha_N, n_N, steps):
        e_NP = corrections(c_NP, alpha_N, n_N)
        target_N = learned_alpha(new_NP, c_NP, weighted_mean(weighted_sum(c_NP, n_N)), alpha_N > 0.5)
        return raw_gradient(new_NP, e_NP, lr=0.1, steps=steps), smoothed(alpha_N, target_N, rate=0.5)

    args = (c_RNP, new_RNP, alpha_RN, n_RN, steps_R)
    rows = [all_of_them(*row) for row in zip(*args, strict=True)]
    assert_close(vmap(all_of_them)(*args), tuple(torch.stack(z) for z in zip(*rows, strict=True)))


def test_bad_input_is_refused():
    c_SP, mean_P, two_S = torch.zeros(2, 1), torch.zeros(1), torch.ones(2)
    with pytest.raises(ValueError, match="2 units"):
        drift_corrections(c_SP, torch.ones(3), mean_P, mean_P)
    with pytest.raises(ValueError, match="-1"):
        drift_corrections(c_SP, -two_S, mean_P, mean_P)
    for wrong in ((torch.zeros(2), mean_P), (mean_P, torch.zeros(2))):
        with pytest.raises(ValueError, match="shapes differ"):
            drift_corrections(c_SP, two_S, *wrong)
    with pytest.raises(ValueError, match="shapes differ"):
        raw_gradient(mean_P, torch.zeros(2), lr=0.1, steps=1)
    for wrong in (
        (torch.zeros(3, 1), mean_P, two_S > 0),
        (c_SP, torch.zeros(2), two_S > 0),
        (c_SP, mean_P, torch.tensor([True])),
    ):
        with pytest.raises(ValueError, match="shapes differ"):
            learned_alpha(c_SP, *wrong)
    with pytest.raises(ValueError, match="shapes differ"):
        smoothed(two_S, torch.ones(1), rate=0.5)
