"""Sums kept from a few replies equal sums made from scratch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap
from torch.testing import assert_close

from fedncv.estimators import WeightedSum, replace_rows, weighted_mean, weighted_sum

PROPERTY = settings(deadline=None, max_examples=40, derandomize=True)


@PROPERTY
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 10**6))
def test_rounds_of_replacements_with_changing_sizes_equal_the_sum_from_scratch(N, num_rounds, seed):
    """Integers make every product and sum exact, so the two must agree to the last bit."""
    generator = torch.Generator().manual_seed(seed)
    n_N = torch.randint(1, 50, (N,), generator=generator)
    h_NP = torch.zeros(N, 3)
    sums = weighted_sum(h_NP, n_N)
    for _ in range(num_rounds):
        S = torch.randperm(N, generator=generator)[: 1 + N // 2]
        n_new_S = torch.randint(0, 50, (len(S),), generator=generator)
        h_new_SP = torch.randint(-99, 99, (len(S), 3), generator=generator).float()
        sums = replace_rows(sums, h_NP[S], n_N[S], h_new_SP, n_new_S)
        h_NP[S], n_N[S] = h_new_SP, n_new_S
    assert torch.equal(sums.total_P, (n_N[:, None] * h_NP).double().sum(dim=0))
    assert torch.equal(sums.size, n_N.double().sum())


def test_sums_are_float64_from_float32_rows():
    sums = weighted_sum(torch.tensor([[0.1], [0.2]]), torch.tensor([3, 1]))
    assert sums.total_P.dtype == sums.size.dtype == torch.float64
    as_stored = torch.tensor([0.1, 0.2]).double()
    assert_close(sums.total_P, (3 * as_stored[0] + as_stored[1]).reshape(1), atol=1e-16, rtol=0)
    assert_close(weighted_mean(sums), (3 * as_stored[0] + as_stored[1]).reshape(1) / 4)


def test_no_data_has_mean_zero():
    assert_close(weighted_mean(weighted_sum(torch.ones(2, 3), torch.zeros(2))), torch.zeros(3).double())


def test_sums_vmap():
    h_RNP = torch.arange(12.0).reshape(2, 3, 2)
    n_RN = torch.tensor([[1, 2, 3], [4, 0, 1]])

    def mean(h_NP, n_N):
        return weighted_mean(replace_rows(weighted_sum(h_NP, n_N), h_NP[:1], n_N[:1], h_NP[1:2], n_N[2:]))

    assert_close(vmap(mean)(h_RNP, n_RN), torch.stack([mean(h, n) for h, n in zip(h_RNP, n_RN, strict=True)]))


def test_bad_rows_are_refused():
    sums = WeightedSum(torch.zeros(1).double(), torch.tensor(1.0).double())
    with pytest.raises(ValueError, match="shapes differ"):
        replace_rows(sums, torch.zeros(2, 1), torch.ones(2), torch.zeros(1, 1), torch.ones(1))
    with pytest.raises(ValueError, match="-3"):
        weighted_sum(torch.zeros(1, 1), torch.tensor([-3]))
