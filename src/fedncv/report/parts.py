"""Gain and cost of each part: accuracy, variance and work of every method.

For a table of one column, and for each column of a table about FedNCV's parts.
"""

import math
from html import escape
from typing import NamedTuple

from fedncv.comparison import Paired, Summary, holm, paired, summary
from fedncv.report import names, series, variance
from fedncv.report.findings import signed
from fedncv.report.gather import Column, Results
from fedncv.report.table import METRICS, scaled, spread
from fedncv.report.verdict import about_parts
from fedncv.results import Score

YARDSTICK = "fedavg"
SPLIT = ("between", "within")


class Part(NamedTuple):
    method: str
    scores: list[Summary | None]  # before and after, scaled
    against: list[Paired | None]  # the same minus the reference's, by seed
    split: list[float | None]  # variance between and within clients at the last probe
    spent: series.Spent
    adjusted: list[float]  # p of each difference after Holm's correction over all differences of all columns


def tables(results: Results) -> list[tuple[str, list[Part]]]:
    """Return (title, one row per method) of each column; none if the table is not about parts."""
    columns = [column for column in results.columns if len(column.runs) > 1]
    if not reference(results) or (len(results.columns) > 1 and not all(map(about_parts, results.columns))):
        return []
    found = [_rows(results, column) for column in columns]
    gaps = [gap.p if gap else math.nan for rows in found for row in rows for gap in row.against]
    adjusted = iter(holm(gaps))
    return [
        (column.title, [row._replace(adjusted=[next(adjusted) for _ in row.against]) for row in rows])
        for column, rows in zip(columns, found, strict=True)
    ]


def parts(results: Results) -> list[Part]:
    """Return one row per method of a table of one column; none if there is nothing to compare the reference with."""
    found = tables(results) if len(results.columns) == 1 else []
    return found[0][1] if found else []


def _rows(results: Results, column: Column) -> list[Part]:
    base = reference(results)
    scores = [column.scores(metric) for metric in METRICS]
    spent = series.work(column)
    found = []
    for method in column.runs:
        mine = [each.get(method, {}) for each in scores]
        gaps = [paired(seeds, each.get(base, {})) for seeds, each in zip(mine, scores, strict=True)]
        ends = [variance.at_the_end(column, method, name) for name in SPLIT]
        found.append(
            Part(
                method,
                [scaled(summary(list(seeds.values())), results.score.scale) if seeds else None for seeds in mine],
                [gap if gap.num_seeds and method != base else None for gap in gaps],
                [end.mean if end else None for end in ends],
                spent[method],
                [math.nan] * len(gaps),
            )
        )
    return found


def reference(results: Results) -> str:
    """Return the method that the others are compared with: the focus, or else FedAvg; empty if neither has runs."""
    held = [method for column in results.columns for method in column.runs]
    return next((method for method in (results.focus, YARDSTICK) if method in held), "")


def heads(results: Results, rows: list[Part]) -> list[tuple[str, str]]:
    """Return (group, name) of every column: variances only if a method was probed, relative to FedAvg's if it was."""
    minus = f"minus {names.method(reference(results))}"
    found = [(results.score.axis(), metric) for metric in METRICS] + [(minus, metric) for metric in METRICS]
    if _probed(rows):
        of = " / FedAvg" if _yardstick(rows) else ""
        found += [(f"variance{of}", name) for name in SPLIT]
    return [*found, *(("whole run", name) for name in ("down", "up", "gradients"))]


def cells(row: Part, rows: list[Part], score: Score) -> list[tuple[float | None, str]]:
    """Return (sort key, text) for each of the heads."""
    said: list[tuple[float | None, str]] = []
    said += [(each.mean, spread(each, score)) if each else (None, "–") for each in row.scores]
    said += [
        (gap.difference, _gap(gap, score) + ("" if adjusted < 0.05 or not clear else " °")) if gap else (None, "–")
        for gap, adjusted, clear in zip(row.against, row.adjusted, sure(row), strict=True)
    ]
    if _probed(rows):
        by = _yardstick(rows) or [1.0] * len(SPLIT)
        split = [None if value is None else value / unit for value, unit in zip(row.split, by, strict=True)]
        said += [(value, "–" if value is None else f"{value:.2g}") for value in split]
    said += [(n, names.traffic(n)) for n in (row.spent.bytes_down, row.spent.bytes_up)]
    return [*said, (row.spent.gradients, names.quantity(row.spent.gradients))]


def sure(row: Part) -> list[bool]:
    """Return whether the interval of each difference to the reference excludes zero."""
    return [gap is not None and (gap.low > 0 or gap.high < 0) for gap in row.against]


def _gap(gap: Paired, score: Score) -> str:
    ends = (
        ""
        if math.isnan(gap.low) or gap.low == gap.high
        else f" ({signed(gap.low, score)} to {signed(gap.high, score)})"
    )
    return signed(gap.difference, score) + ends


def _probed(rows: list[Part]) -> bool:
    return any(value is not None for row in rows for value in row.split)


def _yardstick(rows: list[Part]) -> list[float]:
    """Return FedAvg's variances; empty if they are unknown or zero."""
    split = next((row.split for row in rows if row.method == YARDSTICK), [])
    return [value for value in split if value] if all(split) else []


# ---- as text -------------------------------------------------------------------------------------------


def to_markdown(results: Results) -> str:
    found = tables(results)
    titles = [f"## {title}\n\n" if len(found) > 1 else "" for title, _ in found]
    return "\n".join(title + _markdown(results, rows) for title, (_, rows) in zip(titles, found, strict=True))


def _markdown(results: Results, rows: list[Part]) -> str:
    columns = ["method", *(f"{group}, {name}" for group, name in heads(results, rows))]
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    for row in rows:
        said = [text for _, text in cells(row, rows, results.score)]
        for i, clear in enumerate(sure(row), start=len(METRICS)):
            said[i] = f"**{said[i]}**" if clear else said[i]
        lines.append("| " + " | ".join([names.method(row.method), *said]) + " |")
    return "\n".join(lines) + f"\n\n{words(results, rows)}\n"


def section(results: Results) -> str:
    found = tables(results)
    if len(found) < 2:
        return "".join(_table(results, rows) for _, rows in found)
    return "".join(
        f"<details{' open' * (i == 0)}><summary>{escape(title)}</summary><div>{_table(results, rows)}</div></details>"
        for i, (title, rows) in enumerate(found)
    )


def _table(results: Results, rows: list[Part]) -> str:
    columns = heads(results, rows)
    groups = [group for group, _ in columns]
    edges = {1 + groups.index(group) for group in groups}

    def edge(i: int) -> str:
        return ' class="edge"' if i in edges else ""

    top = "".join(
        f'<th class="group" colspan="{groups.count(group)}">{escape(group)}</th>' for group in dict.fromkeys(groups)
    )
    below = "".join(
        f'<th data-column="{i}" aria-sort="none"{edge(i)}><button type="button">{name}</button></th>'
        for i, (_, name) in enumerate(columns, start=1)
    )
    lines = []
    for row in rows:
        clear = dict(enumerate(sure(row), start=1 + len(METRICS)))
        body = ""
        for i, (value, text) in enumerate(cells(row, rows, results.score), start=1):
            mean, mark, rest = text.partition(" ±") if "±" in text else text.partition(" (")
            mean = f"<b>{mean}</b>" if clear.get(i) else mean
            small = f'<small class="under">{mark.strip()}{rest}</small>' if mark else ""
            body += f'<td{edge(i)} data-value="{"" if value is None else f"{value:.6g}"}">{mean}{small}</td>'
        title = escape(names.method(row.method))
        lines.append(f'<tr data-method="{escape(row.method)}"><th data-value="{title}">{title}</th>{body}</tr>')
    return (
        f"<p class='soft'>{escape(words(results, rows))}</p>"
        '<div class="scroll" tabindex="0" role="region" aria-label="Gain and cost"><table class="sortable long">'
        '<thead><tr><th rowspan="2" data-column="0" aria-sort="none"><button type="button">Method</button></th>'
        f"{top}</tr><tr>{below}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def words(results: Results, rows: list[Part]) -> str:
    unit = results.score.unit.strip() or results.score.name
    said = [
        f"Before and after: mean ± deviation over seeds, {unit}.",
        f"Minus {names.method(reference(results))}: paired by seed, with the 95 % interval; bold if it excludes zero, "
        "with ° if not after Holm's correction over all differences here.",
    ]
    if _probed(rows):
        of = ", as a multiple of FedAvg's" if _yardstick(rows) else ""
        said.append(f"Variance: of the gradients between and within clients, at the last probe of the run{of}.")
    return " ".join([*said, "Down, up and gradients: of the whole run, all clients together."])
