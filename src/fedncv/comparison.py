"""Statistics over seeds. The seed is the unit: rounds and clients of one run are not repetitions.

    interval    mean ± t(0.975, n - 1) · deviation / √n
    paired      the same interval of the differences a_s - b_s over the seeds s that both methods have
    first       every paired interval against every other method is above zero
    Holm        a column's p is the largest of its comparisons (all of them must hold); k columns then share 5 %

A method is a name with a value for each of its seeds.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95

Seeds = Mapping[int, float]  # seed -> value


class Summary(NamedTuple):
    mean: float
    deviation: float  # nan with one seed
    low: float  # the 95 % interval; nan with one seed
    high: float
    num_seeds: int


class Paired(NamedTuple):
    """a - b over the seeds they share."""

    difference: float
    low: float
    high: float
    p: float  # two-sided; below 0.05 exactly if the interval excludes zero
    num_seeds: int


class Column(NamedTuple):
    """One column of a table, ordered by the mean, best first."""

    order: list[str]
    first: str | None
    """The method significantly above every other; None if there is none."""
    level: list[str]
    """Methods that are not significantly below the best, by their paired interval."""
    p: float
    """p-value of the claim that the best is first; nan if it cannot be tested."""


class Reached(NamedTuple):
    """The work of a run up to its first measurement at or above the target."""

    round: int
    samples: int
    bytes: int


def summary(values: Sequence[float]) -> Summary:
    """Return mean, deviation and interval of the seeds of one method.

    >>> [round(x, 3) for x in summary([1.0, 2.0, 3.0])]
    [2.0, 1.0, -0.484, 4.484, 3]
    """
    n = len(values)
    if n == 0:
        raise ValueError("a summary needs at least one seed")
    mean = math.fsum(values) / n
    if n == 1:
        return Summary(mean, math.nan, math.nan, math.nan, 1)
    deviation = float(np.std(values, ddof=1))
    if deviation == 0:
        return Summary(mean, 0.0, mean, mean, n)
    half = _t(n - 1) * deviation / math.sqrt(n)
    return Summary(mean, deviation, mean - half, mean + half, n)


@cache
def _t(degrees: int) -> float:
    """Return the two-sided quantile of Student's t."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees))


def paired(a: Seeds, b: Seeds) -> Paired:
    """Compare a - b seed by seed. With fewer than two common seeds there is no interval."""
    seeds = sorted(set(a) & set(b))
    if not seeds:
        return Paired(math.nan, math.nan, math.nan, math.nan, 0)
    differences = [a[s] - b[s] for s in seeds]
    mean, deviation, low, high, n = summary(differences)
    if n == 1:
        return Paired(mean, math.nan, math.nan, math.nan, 1)
    if deviation <= 1e-12 * max(abs(mean), 1e-300):  # equal differences: t would divide by zero
        return Paired(mean, mean, mean, float(mean == 0), n)
    p = stats.ttest_1samp(differences, 0.0).pvalue
    return Paired(mean, low, high, float(p), n)


def compare(methods: Mapping[str, Seeds]) -> Column:
    """Find the first method of a column, and the methods not significantly different from the best."""
    methods = {name: seeds for name, seeds in methods.items() if seeds}
    order = sorted(methods, key=lambda name: -summary(list(methods[name].values())).mean)
    if len(order) < 2:
        return Column(order, None, order, math.nan)
    best, others = order[0], order[1:]
    against = {name: paired(methods[best], methods[name]) for name in others}
    first = best if all(each.low > 0 for each in against.values()) else None
    level = [best, *(name for name, each in against.items() if not each.low > 0)]
    # all comparisons must hold at once, so the largest p counts
    ps = [1.0 if each.difference <= 0 and each.num_seeds > 1 else each.p for each in against.values()]
    worst = max(ps, key=_nan_first)
    return Column(order, first, level, worst)


def _nan_first(p: float) -> float:
    return math.inf if math.isnan(p) else p


def holm(p: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values, in the order given; nan stays nan and is not counted.

        sorted p_(1) ≤ … ≤ p_(k):  adjusted p_(i) = max over j ≤ i of min(1, (k - j + 1) p_(j))

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted = [math.nan] * len(p)
    ranked = sorted((value, i) for i, value in enumerate(p) if not math.isnan(value))
    largest = 0.0
    for j, (value, i) in enumerate(ranked):
        largest = max(largest, min(1.0, (len(ranked) - j) * value))
        adjusted[i] = largest
    return adjusted


def ranks(columns: Sequence[Mapping[str, Seeds]]) -> dict[str, float]:
    """Return the mean rank over the columns with every method: 1 is the best mean, ties share their ranks."""
    names = list(dict.fromkeys(name for column in columns for name in column))
    full = [column for column in columns if all(column.get(name) for name in names)]
    if not full:
        return {}
    means = [[summary(list(column[name].values())).mean for name in names] for column in full]
    return dict(zip(names, stats.rankdata(-np.array(means), axis=1).mean(axis=0).tolist(), strict=True))


def reached(rows: Sequence[Mapping[str, Any]], target: float, *, metric: str = "before") -> Reached | None:
    """Return the first measurement at or above the target, with the work up to it; None if there is none.

    Rows are measured every few rounds, so this is an upper bound.
    """
    for row in rows:
        value = row.get(metric)
        if value is not None and value >= target:
            spent = row.get("bytes_down", 0) + row.get("bytes_up", 0)
            return Reached(row["round"], row.get("samples", 0), spent)
    return None
