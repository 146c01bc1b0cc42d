"""Replies and their sums: weights, means and totals by hand."""

from collections import namedtuple

import pytest
import torch
from federations import vector
from torch.testing import assert_close

from fedncv.methods.base import (
    Replies,
    field_of,
    sums_from_totals,
    sums_of,
    totals_of,
    weighted_sum,
)


def test_weights_are_shares_of_the_samples_that_answered():
    replies = Replies((), torch.tensor([2, 5]), vector(1.0, 3.0), torch.ones(2))
    assert_close(replies.weight_S, vector(0.25, 0.75))


def test_a_weighted_sum_by_hand():
    """0.5 (1, 2) + 2 (3, 4), in the precision of the summands."""
    a_SP = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(weighted_sum(vector(0.5, 2.0), a_SP), torch.tensor([6.5, 9.0]))
    assert torch.equal(weighted_sum(vector(1.0, 1.0), vector(3.0, 4.0)), torch.tensor(7.0).double())


def test_sums_by_hand():
    """n = (1, 3): a by samples has the mean (2 + 3 * 6) / 4 and the sum 20, b by one (1 + 5) / 2 and 6."""
    up = namedtuple("Up", "a b c")
    c_SP = torch.stack([vector(2.0, 0.0, 4.0), vector(6.0, 8.0, 0.0)])
    replies = Replies(
        up(vector(2.0, 6.0), vector(1.0, 5.0), c_SP), torch.tensor([0, 4]), vector(1.0, 3.0), torch.ones(2)
    )
    sums = sums_of(replies, {"b": "one"})
    assert_close(sums.mean("c"), vector(5.0, 6.0, 1.0))
    assert_close(sums.sum("c"), vector(20.0, 24.0, 4.0))
    assert_close(sums_of(replies, {"c": "one"}).sum("c"), vector(8.0, 8.0, 4.0))
    assert [float(each("a")) for each in (sums.mean, sums.sum)] == [5, 20]
    assert [float(each("b")) for each in (sums.mean, sums.sum)] == [3, 6]
    assert (float(sums.samples), sums.num_replies) == (4, 2)
    totals = sums_from_totals(totals_of(replies, {"b": "one"}), {"b": "one"})
    assert [float(totals.mean(name)) for name in "ab"] == [5, 3]
    assert float(sums.with_mean("a", vector(7.0)).mean("a")) == 7
    assert float(sums.with_mean("a", vector(7.0)).mean("b")) == 3
    assert float(sums.with_mean("a", vector(7.0)).sum("a")) == 7 * 4
    assert float(sums.with_mean("a", vector(7.0)).sum("b")) == 6


def test_other_weights_replace_the_shares_of_the_samples():
    up = namedtuple("Up", "a")
    replies = Replies(up(vector(2.0, 6.0)), torch.tensor([0, 4]), vector(1.0, 3.0), torch.ones(2), vector(0.5, 2.0))
    assert float(sums_of(replies, {}).mean("a")) == 0.5 * 2 + 2 * 6
    assert float(sums_of(replies, {}).sum("a")) == (0.5 * 2 + 2 * 6) * 4


def test_totals_of_two_machines_are_the_totals_of_all():
    up = namedtuple("Up", "a b")
    ups = up(torch.arange(6.0).reshape(3, 2), vector(1.0, 5.0, 9.0))
    whole = Replies(ups, torch.tensor([0, 4, 5]), vector(1.0, 3.0, 2.0), torch.ones(3))
    halves = [
        Replies(up(*(leaf[some] for leaf in ups)), whole.ids_S[some], whole.sizes_S[some], whole.inclusion_S[some])
        for some in (slice(0, 1), slice(1, 3))
    ]
    weights = {"b": "one"}
    one, two = (totals_of(half, weights) for half in halves)
    merged, all_at_once = sums_from_totals(one.plus(two), weights), sums_of(whole, weights)
    for name in "ab":
        assert_close(merged.mean(name), all_at_once.mean(name))
        assert_close(merged.sum(name), all_at_once.sum(name))
    assert (float(merged.samples), merged.num_replies) == (6, 3)


def test_a_field_that_is_not_sent_is_named():
    up = namedtuple("Up", "a")
    with pytest.raises(ValueError, match=r"no field 'b' \(they send a\)"):
        field_of(up(vector(1.0)), "b")
