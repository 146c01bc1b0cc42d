"""The metrics that a run measured besides its score: a table of their final values."""

from html import escape

from fedncv.comparison import Summary, summary
from fedncv.report import names, series
from fedncv.report.gather import Column, Results
from fedncv.report.table import write_csv


def final(column: Column, method: str, metric: str) -> Summary | None:
    """Return the last value, mean over the seeds that have one; None if none has."""
    values = [run.last(metric) for run in column.runs[method]]
    known = [float(value) for value in values if value is not None]
    return summary(known) if known else None


def section(results: Results) -> str:
    """Return a table with a column for each metric; empty if the runs measured only their score."""
    parts: list[str] = []
    for column in results.columns:
        found = series.more_metrics(column)
        if not found:
            continue
        heads = "".join(
            f'<th data-column="{i}" aria-sort="none"><button type="button">{escape(names.metric(name))}</button></th>'
            for i, name in enumerate(found, start=1)
        )
        rows = []
        for method in column.runs:
            title = escape(names.method(method))
            cells = "".join(_cell(final(column, method, name)) for name in found)
            rows.append(f'<tr data-method="{escape(method)}"><th data-value="{title}">{title}</th>{cells}</tr>')
        table = (
            '<div class="scroll" tabindex="0" role="region" aria-label="More metrics"><table class="sortable narrow">'
            '<thead><tr><th data-column="0" aria-sort="none"><button type="button">Method</button></th>'
            f"{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        )
        opened = "" if parts else " open"
        parts.append(f"<details{opened}><summary>{escape(column.title)}</summary><div>{table}</div></details>")
    return "".join(parts)


def _cell(value: Summary | None) -> str:
    if value is None:
        return '<td class="none" data-value="">–</td>'
    spread = f" <small>± {value.deviation:.3g}</small>" if value.num_seeds > 1 else ""
    return f'<td data-value="{value.mean:.6g}"><span class="mean">{value.mean:.4g}</span>{spread}</td>'


def to_csv(results: Results) -> str:
    """Return one line per column, method and metric; empty if there are no such metrics."""
    lines: list[tuple[object, ...]] = []
    for column in results.columns:
        for metric in series.more_metrics(column):
            for method in column.runs:
                each = final(column, method, metric)
                if each is not None:
                    ends = ["" if each.num_seeds == 1 else f"{x:.6g}" for x in (each.deviation, each.low, each.high)]
                    lines.append((column.name, method, metric, each.num_seeds, f"{each.mean:.6g}", *ends))
    return (
        write_csv(("column", "method", "metric", "seeds", "mean", "deviation", "low", "high"), lines) if lines else ""
    )
