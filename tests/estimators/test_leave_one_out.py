"""Leave-one-out means against their definition, over sizes, weights and dimensions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap
from torch.testing import assert_close

from fedncv.estimators import leave_one_out_mean

PROPERTY = settings(deadline=None, max_examples=40, derandomize=True)
numbers = st.integers(-64, 64).map(lambda i: i / 8)


@st.composite
def weighted_units(draw, smallest=1):
    """-> n_U of non-negative sizes with at least one positive, a_UP."""
    U, P = draw(st.integers(smallest, 6)), draw(st.integers(1, 3))
    n = draw(st.lists(st.integers(0, 9), min_size=U, max_size=U).filter(any))
    a = draw(st.lists(numbers, min_size=U * P, max_size=U * P))
    return torch.tensor(n, dtype=torch.float64), torch.tensor(a, dtype=torch.float64).reshape(U, P)


@PROPERTY
@given(weighted_units(smallest=2))
def test_it_is_the_weighted_mean_of_the_others(units):
    n_U, a_UP = units
    mean_UP = leave_one_out_mean(a_UP, n_U)
    for u in range(len(n_U)):
        rest = [v for v in range(len(n_U)) if v != u]
        size = n_U[rest].sum()
        expected_P = (n_U[rest, None] * a_UP[rest]).sum(0) / size if size > 0 else torch.zeros_like(a_UP[0])
        assert_close(mean_UP[u], expected_P)


@PROPERTY
@given(weighted_units())
def test_only_the_proportions_of_the_sizes_matter(units):
    n_U, a_UP = units
    assert_close(leave_one_out_mean(a_UP, n_U), leave_one_out_mean(a_UP, 4 * n_U))


@PROPERTY
@given(weighted_units(smallest=2))
def test_plain_leave_one_out_means_average_to_the_plain_mean(units):
    _, a_UP = units
    assert_close(leave_one_out_mean(a_UP).mean(dim=0), a_UP.mean(dim=0))


def test_nothing_left_out_is_zero_never_nan():
    assert_close(leave_one_out_mean(torch.tensor([[3.0, 4.0]])), torch.zeros(1, 2))
    assert_close(leave_one_out_mean(torch.tensor([[3.0], [7.0]]), torch.tensor([5, 0])), torch.tensor([[0.0], [3.0]]))
    assert_close(leave_one_out_mean(torch.tensor([[3.0], [7.0]]), torch.tensor([0, 0])), torch.zeros(2, 1))


def test_any_trailing_shape_and_dtype():
    a_U = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    expected = torch.tensor([4.0, 3.5, 1.5], dtype=torch.float64)
    assert_close(leave_one_out_mean(a_U), expected)
    assert_close(leave_one_out_mean(a_U.reshape(3, 1, 1)), expected.reshape(3, 1, 1))
    assert leave_one_out_mean(a_U.half()).dtype == torch.float16


def test_vmap_over_a_leading_axis_equals_a_loop():
    n_RU = torch.tensor([[1, 2, 3], [4, 0, 0]])
    a_RUP = torch.arange(12, dtype=torch.float64).reshape(2, 3, 2)
    loop = torch.stack([leave_one_out_mean(a, n) for a, n in zip(a_RUP, n_RU, strict=True)])
    assert_close(vmap(leave_one_out_mean)(a_RUP, n_RU), loop)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="-1"):
        leave_one_out_mean(torch.zeros(2, 1), torch.tensor([1, -1]))
    with pytest.raises(ValueError, match="2 units"):
        leave_one_out_mean(torch.zeros(2, 1), torch.ones(3))
