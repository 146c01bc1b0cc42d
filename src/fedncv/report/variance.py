"""The section on gradient variance: a small plot for every method that was probed, and a table."""

import math
from html import escape
from typing import NamedTuple

from fedncv.figures import looks
from fedncv.report import names, series
from fedncv.report.gather import Column, Results

# dash and width of each number; the colour is the method's
LINES = {"within": ("", 1.4), "between": ("", 3.2), "sampling": ("6 3", 2.2), "signal": ("2 3", 1.8)}
SHOWN = ("signal", "within", "between", "snr", "sampling", "batches")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 300, 190, 44, 8, 8, 24


class Value(NamedTuple):
    """A number of the last probe with its 95 % interval, over seeds or, with one seed, over clients."""

    mean: float
    low: float | None
    high: float | None


def section(results: Results) -> str:
    """Return plots and table of every column in which a method was probed; empty if none was."""
    parts: list[str] = []
    for column in results.columns:
        found = probed(column)
        if found:
            few = [method for method in found if method in (*series.drawn(results), "fedavg")]
            chosen = f"<p class='soft small'>{len(few)} of {len(found)} methods are plotted: FedNCV, FedAvg and the "
            chosen += "most accurate others. The table has all.</p>"
            pictures = f"{_legend()}{chosen if len(few) < len(found) else ''}"
            body = f"{pictures}<div class='panels'>{_pictures(results, column, few)}</div>{_table(column, found)}"
            opened = "" if parts else " open"
            parts.append(f"<details{opened}><summary>{escape(column.title)}</summary><div>{body}</div></details>")
    return "".join(parts)


def probed(column: Column) -> list[str]:
    """Return the methods whose runs have the variance metrics."""
    curves = series.curves(column)
    return [method for method in column.runs if method in curves.get("variance_between", {})]


def at_the_end(column: Column, method: str, name: str) -> Value | None:
    """Return the last probe's number; None if it was not measured."""
    points = series.curves(column).get(f"variance_{name}", {}).get(method)
    if not points:
        return None
    last = points[-1]
    if last.num_seeds > 1:
        return Value(last.mean, last.low, last.high)
    (row,) = (row for row in column.runs[method][0].rows if row["round"] == last.round)
    return Value(last.mean, row.get(f"variance_{name}_low"), row.get(f"variance_{name}_high"))


# ---- pictures ------------------------------------------------------------------------------------------


def _legend() -> str:
    keys = "".join(
        f'<li><svg viewBox="0 0 34 12" aria-hidden="true"><line x1="1" x2="33" y1="6" y2="6" stroke="var(--soft)" '
        f'stroke-width="{width}" stroke-dasharray="{dash}"/></svg>{names.metric(f"variance_{name}")}</li>'
        for name, (dash, width) in LINES.items()
    )
    return f"<ul class='keys'>{keys}</ul>"


def _pictures(results: Results, column: Column, methods: list[str]) -> str:
    curves, found = {method: _lines(column, method) for method in methods}, looks(results.methods)
    points = [point for lines in curves.values() for line in lines.values() for point in line]
    if not points:
        return ""
    last = max(p.round for p in points) or 1
    low, high = (f(math.log10(p.mean) for p in points) for f in (min, max))
    low, high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
    return "".join(_picture(method, lines, last, low, high, found[method].colour) for method, lines in curves.items())


def _lines(column: Column, method: str) -> dict[str, list[series.Point]]:
    """Return name -> points, without zeros, which a logarithmic axis cannot show."""
    curves = series.curves(column)
    found = {name: curves.get(f"variance_{name}", {}).get(method, []) for name in LINES}
    return {name: [p for p in points if p.mean > 0] for name, points in found.items()}


def _picture(method: str, lines: dict[str, list[series.Point]], last: int, low: int, high: int, colour: int) -> str:
    """Plot squared gradient norms on a logarithmic axis, the same for all methods of a column."""

    def x(t: float) -> float:
        return LEFT + t / last * (WIDTH - LEFT - RIGHT)

    def y(exponent: float) -> float:
        return TOP + (high - exponent) / (high - low) * (HEIGHT - TOP - BOTTOM)

    step = -(-(high - low) // 5)
    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(e):.1f}" y2="{y(e):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y(e) + 4:.1f}" text-anchor="end">{10.0**e:g}</text>'
        for e in range(low, high + 1, step)
    ]
    parts += [
        f'<text x="{x(t):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{t:g}{word}</text>'
        for t, anchor, word in ((0, "middle", ""), (last, "end", " rounds"))
    ]
    for i, (name, points) in enumerate(lines.items()):
        dash, width = LINES[name]
        at = [(x(p.round), y(math.log10(p.mean)), p.round, p.mean) for p in points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b, _, _ in at)
        stroke = f'stroke="var(--c{colour})" stroke-dasharray="{dash}" style="stroke-width:{width}"'
        parts.append(f'<polyline class="line" points="{path}" {stroke}/>')
        for p in points:
            if p.low is not None and p.high is not None:  # the interval, as far as the axis shows it
                ends = [min(high, max(low, math.log10(max(end, 1e-300)))) for end in (p.low, p.high)]
                beside = x(p.round) + 2.4 * (i - 1.5)
                bar = f'x1="{beside:.1f}" x2="{beside:.1f}" y1="{y(ends[0]):.1f}" y2="{y(ends[1]):.1f}"'
                parts.append(f'<line class="ends" stroke="var(--c{colour})" {bar}/>')
        said = names.metric(f"variance_{name}")
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2" fill="var(--c{colour})" data-number="{name}" data-round="{t}" '
            f'data-value="{v:.6g}"><title>{said}, round {t}: {v:.3g}</title></circle>'
            for a, b, t, v in at
        ]
    title = escape(names.method(method))
    label = f"{title}: variance within and between clients and of client sampling, and the squared gradient"
    return (
        f'<figure data-method="{escape(method)}"><figcaption>{title}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg></figure>'
    )


# ---- the table -----------------------------------------------------------------------------------------


def _table(column: Column, methods: list[str]) -> str:
    heads = "".join(
        f'<th data-column="{i}" aria-sort="none"><button type="button">{names.metric(f"variance_{name}")}</button></th>'
        for i, name in enumerate(SHOWN, start=1)
    )
    rows = []
    for method in methods:
        cells = "".join(_cell(at_the_end(column, method, name)) for name in SHOWN)
        title = escape(names.method(method))
        rows.append(f'<tr data-method="{escape(method)}"><th data-value="{title}">{title}</th>{cells}</tr>')
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Variance at the last probe">'
        '<table class="sortable long">'
        '<thead><tr><th data-column="0" aria-sort="none"><button type="button">Method</button></th>'
        f"{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(value: Value | None) -> str:
    if value is None:
        return '<td class="none" data-value="">–</td>'
    ends = value.low is not None and value.high is not None and math.isfinite(value.low)
    interval = f'<small class="under">{value.low:.3g} to {value.high:.3g}</small>' if ends else ""
    return f'<td data-value="{value.mean:.6g}"><span class="mean">{value.mean:.3g}</span>{interval}</td>'
