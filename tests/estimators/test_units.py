"""Checks name the offending value, stay out of vmap's way, and ratios are defined at zero."""

import pytest
import torch
from torch.func import vmap
from torch.testing import assert_close

from fedncv.estimators.units import (
    check_same_shape,
    check_sizes,
    check_weights,
    column,
    ratio,
    readable,
    weighted_total,
)


def test_different_shapes_are_named():
    check_same_shape(torch.zeros(2, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(3, 2\)"):
        check_same_shape(torch.zeros(2, 3), torch.zeros(3, 2))


def test_one_size_for_every_unit_and_none_negative():
    a_UP = torch.zeros(2, 3)
    check_sizes(torch.tensor([0.0, 1.0]), a_UP)
    with pytest.raises(ValueError, match=r"2 units need sizes of shape \(2,\), got \(3,\)"):
        check_sizes(torch.ones(3), a_UP)
    with pytest.raises(ValueError, match=r"got \(2, 1\)"):
        check_sizes(torch.ones(2, 1), a_UP)
    with pytest.raises(ValueError, match=r"negative, got -4"):
        check_sizes(torch.tensor([5, -4]), a_UP)


def test_weights_sum_to_one_up_to_rounding():
    a_UP = torch.zeros(3, 1)
    check_weights(torch.tensor([0.1, 0.2, 0.7]), a_UP)
    check_weights(torch.full((3,), 1 / 3), a_UP)
    with pytest.raises(ValueError, match=r"sum to one, got 1\.5"):
        check_weights(torch.full((3,), 0.5), a_UP)
    with pytest.raises(ValueError, match=r"sum to one, got 0\.75"):
        check_weights(torch.full((3,), 0.25), a_UP)
    with pytest.raises(ValueError, match="negative"):
        check_weights(torch.tensor([1.0, 1.0, -1.0]), a_UP)


@pytest.mark.parametrize("excess", [2**-21, -(2**-21)])
def test_weights_may_miss_one_by_an_epsilon_a_unit_and_no_more(excess):
    """float32 has eps = 2^-23: three units may miss by 3 · 2^-23, and 2^-21 is four of them."""
    check_weights(torch.tensor([0.5, 0.25, 0.25 + excess / 2]), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="sum to one"):
        check_weights(torch.tensor([0.5, 0.25, 0.25 + excess]), torch.zeros(3, 1))


def test_missing_one_by_exactly_an_epsilon_a_unit_passes():
    check_weights(torch.tensor([0.25, 0.25, 0.25, 0.25 + 2**-21]), torch.zeros(4, 1))


def test_values_are_not_read_under_vmap_nor_off_the_cpu():
    assert readable(torch.zeros(2))
    assert not readable(torch.zeros(2, device="meta"))
    seen = []
    vmap(lambda x: (seen.append(readable(x)), x)[1])(torch.zeros(2, 3))
    assert seen == [False]


def test_shapes_are_checked_under_vmap_and_values_are_not():
    def checked(n_U):
        check_weights(n_U, torch.zeros(3, 1))
        return n_U

    vmap(checked)(torch.full((2, 3), -1.0))
    with pytest.raises(ValueError, match="3 units"):
        vmap(checked)(torch.ones(2, 4))


def test_a_column_multiplies_any_trailing_shape():
    w_U = torch.tensor([1, 2])
    assert column(w_U, torch.zeros(2)).shape == (2,)
    w_U11 = column(w_U, torch.zeros(2, 3, 4, dtype=torch.float64))
    assert w_U11.shape == (2, 1, 1)
    assert w_U11.dtype == torch.float64


def test_a_weighted_total_of_any_trailing_shape():
    w_U, a_U = torch.tensor([1, 3]), torch.tensor([2.0, 5.0], dtype=torch.float64)
    assert_close(weighted_total(w_U, a_U), torch.tensor(17.0, dtype=torch.float64))
    assert_close(weighted_total(w_U, a_U.reshape(2, 1, 1)), torch.tensor([[17.0]], dtype=torch.float64))
    a_UPQ = torch.stack([a_U, 2 * a_U], dim=1).reshape(2, 2, 1)
    assert_close(weighted_total(w_U, a_UPQ), torch.tensor([[17.0], [34.0]], dtype=torch.float64))


def test_a_ratio_over_nothing_is_zero_and_so_is_its_derivative():
    x, y = torch.tensor([6.0, 5.0, 1.0]), torch.tensor([3.0, 0.0, 0.5])
    assert_close(ratio(x, y), torch.tensor([2.0, 0.0, 2.0]))
    slope = torch.func.grad(lambda y: ratio(x, y).sum())(y)
    assert_close(slope, torch.tensor([-6 / 9, 0.0, -4.0]))
