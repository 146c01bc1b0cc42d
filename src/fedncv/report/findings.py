"""Sentences about the numbers: the focus's worst column, and the gain of FedNCV's parts. Empty if runs are missing."""

import math

from fedncv.comparison import Paired, compare, paired, summary
from fedncv.report import names
from fedncv.report.gather import Column, Results
from fedncv.report.names import OURS
from fedncv.report.table import METRICS
from fedncv.results import Score


def findings(results: Results) -> list[str]:
    """Compare the focus with the best other method if there are several columns; give the parts' gains if one."""
    if len(results.columns) > 1:
        return _at_worst(results)
    return [said for column in results.columns for said in _parts(column, results.score)]


def _at_worst(results: Results) -> list[str]:
    gaps: list[tuple[Paired, str, str]] = []
    sure, focus = 0, results.focus
    for column in results.columns:
        for metric in (metric for metric in METRICS if metric in column.shown):
            scores = column.scores(metric)
            others = [method for method in scores if method != focus and not method.startswith(f"{focus}:")]
            if focus not in scores or not others:
                continue
            best = max(others, key=lambda method: summary(list(scores[method].values())).mean)
            gap = paired(scores[focus], scores[best])
            if gap.num_seeds:
                gaps.append((gap, best, f"{column.title}, {metric} local training"))
                sure += compare({method: scores[method] for method in (focus, *others)}).first == focus
    if not gaps:
        return []
    ahead = sum(gap.difference > 0 for gap, _, _ in gaps)
    gap, best, where = min(gaps, key=lambda each: each[0].difference)
    points = " points" if results.score.unit else ""
    by = "level with"
    if gap.difference:
        by = f"{results.score.show(abs(gap.difference), 2)}{points} {'above' if gap.difference > 0 else 'below'}"
    interval = f" (95 %: {_ends(gap, results.score)})" if not math.isnan(gap.low) else ""
    return [
        f"{names.method(focus)} is better than the best other method in {ahead} of {len(gaps)} columns; in {sure} of "
        "them every paired 95 % interval against every other method is above zero.",
        f"At worst it is {by} {names.method(best)}{interval}: {where}.",
    ]


def _parts(column: Column, score: Score) -> list[str]:
    said = []
    alone = _gain(column, "fedavg+prior", "fedavg", score)
    within = _gain(column, OURS, f"{OURS}:prior=off", score) or _gain(column, OURS, f"{OURS}:tau=0", score)  # once so
    given = [f"gives FedAvg {alone}"] * bool(alone) + [f"gives FedNCV's other parts {within}"] * bool(within)
    if given:
        said.append(f"The label prior {'; it '.join(given)}.")
    drift = _gain(column, OURS, f"{OURS}:drift=off", score)
    if drift:
        said.append(f"The drift correction adds {drift} to the label prior and all other parts.")
    return said


def _gain(column: Column, method: str, without: str, score: Score) -> str:
    """Return a - b before and after; empty if one of them has no run."""
    words: list[str] = []
    for metric in METRICS:
        scores = column.scores(metric)
        gap = paired(scores.get(method, {}), scores.get(without, {}))
        if not gap.num_seeds:
            continue
        points = " points" if score.unit and not words else ""
        interval = "" if math.isnan(gap.low) else f" (95 %: {_ends(gap, score)})"
        words.append(f"{signed(gap.difference, score)}{points} {metric}{interval}")
    return " and ".join(words)


def _ends(gap: Paired, score: Score) -> str:
    return f"{signed(gap.low, score)} to {signed(gap.high, score)}"


def signed(value: float, score: Score) -> str:
    """
    >>> signed(-0.0123, Score("accuracy", 100, " %")), signed(0.5, Score("accuracy", 100, " %"))
    ('−1.23', '+50.00')
    """
    return ("−" if value < 0 else "+" if value > 0 else "") + score.show(abs(value), 2)
