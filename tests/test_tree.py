"""Trees: what is finite."""

import pytest
import torch

from fedncv.tree import all_finite

INF, NAN, LARGE = float("inf"), float("nan"), 3e38


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([], True),
        ([1.0, -2.0], True),
        ([LARGE, LARGE, LARGE], True),  # their sum is not finite
        ([LARGE, LARGE, -LARGE, -LARGE], True),
        ([1.0, NAN], False),
        ([INF, -INF, 1.0], False),
        ([LARGE, LARGE, INF], False),
    ],
)
def test_a_tree_is_finite_if_every_number_in_it_is(numbers, expected):
    sound = torch.ones(3)
    assert all_finite((sound, {"a": torch.tensor(numbers, dtype=torch.float32), "n": torch.tensor([1])})) is expected


def test_whole_numbers_are_finite():
    assert all_finite((torch.tensor([2**62, 2**62]), 3, "text"))
