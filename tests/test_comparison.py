"""Statistics against textbook values and algebra."""

import math

import pytest

from fedncv.comparison import compare, holm, paired, ranks, reached, summary

approx = pytest.approx


def seeds(*values):
    return dict(enumerate(values))


def test_the_interval_of_three_seeds_is_the_textbooks():
    """1, 2, 3: mean 2, deviation 1, t(0.975, 2) = 4.303 (any table), half width 4.303/√3."""
    found = summary([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.deviation == approx(1)
    assert found.high - 2 == approx(4.30265 / math.sqrt(3), rel=1e-5)
    assert found.low == approx(4 - found.high)


def test_students_sleep_data_give_students_interval():
    """Student 1908: ten patients, two drugs; mean difference 1.58, 95 % interval 0.70 to 2.46, p = 0.00283."""
    a = seeds(1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4)
    b = seeds(0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0)
    found = paired(a, b)
    assert found.difference == approx(1.58)
    assert (found.low, found.high) == approx((0.7001142, 2.4598858), rel=1e-6)
    assert found.p == approx(0.00283289, rel=1e-5)


def test_one_seed_has_no_interval():
    found = summary([0.5])
    assert found.mean == 0.5
    assert math.isnan(found.deviation)
    assert math.isnan(found.low)
    assert math.isnan(paired(seeds(1.0), seeds(0.5)).low)
    with pytest.raises(ValueError, match="at least one seed"):
        summary([])


def test_only_common_seeds_are_paired():
    found = paired({0: 1.0, 1: 2.0, 7: 100.0}, {0: 0.5, 1: 1.0, 8: -100.0})
    assert found.num_seeds == 2
    assert found.difference == approx(0.75)
    assert paired({0: 1.0}, {1: 1.0}).num_seeds == 0


def test_equal_differences_need_no_division_by_zero():
    assert paired(seeds(2.0, 3.0), seeds(1.0, 2.0))[:4] == (1.0, 1.0, 1.0, 0.0)
    assert paired(seeds(2.0, 3.0), seeds(2.0, 3.0))[:4] == (0.0, 0.0, 0.0, 1.0)


def test_pairing_finds_what_overlapping_intervals_hide():
    """Seeds vary by 10, the difference by 0.1: the plain intervals overlap, the paired one does not reach zero."""
    a, b = seeds(51.0, 61.1, 70.9), seeds(50.0, 60.0, 70.0)
    assert summary(list(a.values())).low < summary(list(b.values())).high
    column = compare({"a": a, "b": b})
    assert column.first == "a"
    assert column.level == ["a"]


def test_first_needs_every_interval_above_zero():
    close = {"a": seeds(51.0, 61.1, 70.9), "b": seeds(50.0, 60.0, 70.0), "c": seeds(52.0, 59.0, 71.0)}
    column = compare(close)
    assert column.order == ["a", "c", "b"]
    assert column.first is None
    assert column.level == ["a", "c"]
    assert column.p == paired(close["a"], close["c"]).p


def test_one_seed_makes_nobody_first():
    column = compare({"a": seeds(0.9), "b": seeds(0.1), "empty": {}})
    assert column.first is None
    assert column.order == ["a", "b"]
    assert math.isnan(column.p)
    assert compare({"a": seeds(0.9, 0.8)}).first is None


def test_the_interval_excludes_zero_exactly_where_p_is_below_five_percent():
    for shift in (0.0, 0.5, 1.0, 1.2, 1.24, 1.25, 2.0):
        found = paired(seeds(-0.5 + shift, shift, 0.5 + shift), seeds(0.0, 0.0, 0.0))
        assert (found.low > 0) == (found.p < 0.05 and found.difference > 0)


def test_holm_by_hand():
    """Sorted 0.01, 0.03, 0.04 times 3, 2, 1: 0.03, 0.06, and 0.04 is lifted to 0.06."""
    assert holm([0.01, 0.04, 0.03]) == approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_leaves_untestable_columns_out():
    found = holm([math.nan, 0.02, 0.04])
    assert math.isnan(found[0])
    assert found[1:] == approx([0.04, 0.04])


def test_ranks_share_ties_and_skip_columns_with_gaps():
    columns = [
        {"a": seeds(3.0), "b": seeds(2.0), "c": seeds(1.0)},
        {"a": seeds(1.0), "b": seeds(1.0), "c": seeds(0.0)},
        {"a": seeds(9.0), "b": {}, "c": seeds(1.0)},
    ]
    assert ranks(columns) == {"a": 1.25, "b": 1.75, "c": 3.0}
    assert ranks([{"a": {}, "b": seeds(1.0)}]) == {}


def test_reaching_a_target_counts_what_was_spent_by_then():
    rows = [
        {"round": 0, "before": 0.1},
        {"round": 1, "samples": 10, "bytes_down": 3, "bytes_up": 4},
        {"round": 2, "samples": 20, "bytes_down": 6, "bytes_up": 8, "before": 0.5},
        {"round": 3, "samples": 30, "bytes_down": 9, "bytes_up": 12, "before": 0.7},
    ]
    assert reached(rows, 0.5) == (2, 20, 14)
    assert reached(rows, 0.05) == (0, 0, 0)
    assert reached(rows, 0.8) is None


@pytest.mark.parametrize("b", [{2: 0.4, 3: 0.3}, {1: 0.4, 2: 0.3}, {1: 0.6, 2: 0.1}])
def test_with_fewer_than_two_seeds_in_common_nothing_is_tested(b):
    """a leads in the mean; the seed they share may say otherwise, and is one seed."""
    column = compare({"a": {0: 0.6, 1: 0.5}, "b": b})
    assert column.order == ["a", "b"]
    assert column.first is None
    assert math.isnan(column.p)
