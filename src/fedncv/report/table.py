"""The main table: every method, every column, before and after, with the paper's value next to ours."""

import csv
import io
import math
from collections.abc import Sequence
from typing import NamedTuple

from fedncv.comparison import Summary, compare, holm, ranks, summary
from fedncv.report import names
from fedncv.report.gather import Column, Results
from fedncv.report.paper import Printed
from fedncv.results import Run, Score, sampling_error

METRICS = ("before", "after")


class Entry(NamedTuple):
    """One cell: our value, the paper's value, and the place in the column."""

    ours: Summary | None  # accuracy in %
    paper: Printed | None
    place: int  # 1 is the best mean, shared by equals; 0: no finished run
    first: bool
    """Significantly above every other method of its column."""
    missing: int  # planned runs that are not averaged
    error: float | None = None  # standard error that scoring a sample of the clients causes; None: all were scored


class Standing(NamedTuple):
    """One column's verdict."""

    column: str
    metric: str
    best: str
    second: str | None
    first: str | None
    level: list[str]  # the best, and the methods not significantly different from it
    p: float
    adjusted_p: float  # after Holm, over all columns of the table

    @property
    def survives(self) -> bool:
        return self.first is not None and self.adjusted_p < 0.05


class MainTable(NamedTuple):
    keys: list[tuple[Column, str]]  # the columns: (dataset, metric)
    methods: list[str]
    score: Score
    entries: dict[tuple[str, str, str], Entry]  # (column, metric, method)
    standings: list[Standing]
    ranks: dict[str, float]

    @property
    def beside_paper(self) -> bool:
        """Whether any cell has a printed value."""
        return any(entry.paper for entry in self.entries.values())

    def standing(self, column: str, metric: str) -> Standing | None:
        return next((s for s in self.standings if (s.column, s.metric) == (column, metric)), None)


def main_table(results: Results) -> MainTable:
    keys = [(column, metric) for column in results.columns for metric in column.shown]
    compared = [compare(column.scores(metric)) for column, metric in keys]
    adjusted = holm([each.p for each in compared])
    standings = [
        Standing(
            column.name, metric, each.order[0], each.order[1] if len(each.order) > 1 else None,
            each.first, each.level, each.p, adjusted[i],
        )
        for i, ((column, metric), each) in enumerate(zip(keys, compared, strict=True)) if each.order
    ]  # fmt: skip
    entries = {}
    for (column, metric), each in zip(keys, compared, strict=True):
        scores = column.scores(metric)
        means = {method: summary(list(seeds.values())).mean for method, seeds in scores.items()}
        for method in results.methods:
            values = list(scores.get(method, {}).values())
            entries[column.name, metric, method] = Entry(
                scaled(summary(values), results.score.scale) if values else None,
                column.printed(method, metric) if results.score.unit else None,
                1 + sum(mean > means[method] for mean in means.values()) if values else 0,
                each.first == method,
                sum(1 for m in results.missing if (m.column, m.method) == (column.name, method)),
                _scaled_error(column.runs.get(method, []), metric, results.score),
            )
    ranked = ranks([column.scores(metric) for column, metric in keys if column.scores(metric)])
    ranked = ranked if len(results.methods) > 1 else {}
    return MainTable(keys, results.methods, results.score, entries, standings, ranked)


def _scaled_error(runs: list[Run], metric: str, score: Score) -> float | None:
    error = sampling_error(runs, metric)
    return None if error is None else score.scale * error


def sampled(columns: Sequence[Column]) -> str:
    """Return a sentence about the sample of clients that was scored; empty if all were scored in all columns."""
    words = {column.title: column.sampled for column in columns}
    if not any(words.values()):
        return ""
    same = len(set(words.values())) == 1
    said = [each if same else f"{title}: {each or 'all clients scored'}" for title, each in words.items()]
    text = "; ".join(dict.fromkeys(said))
    error = "; s.e.: the standard error that this sample causes" if any(map(is_sample, words.values())) else ""
    return f"{text[0].upper()}{text[1:]}{error}."


def is_sample(sampled: str) -> bool:
    """Return whether these words are about a sample that was drawn, not about clients of a federation that agreed."""
    return sampled.startswith("scored on ")


def scaled(each: Summary, by: int) -> Summary:
    return Summary(by * each.mean, by * each.deviation, by * each.low, by * each.high, each.num_seeds)


def percent(each: Summary) -> Summary:
    return scaled(each, 100)


# ---- files ---------------------------------------------------------------------------------------------


def to_csv(table: MainTable) -> str:
    """Return one line per cell, with all its values."""
    header = (
        "column", "dataset", "clients", "metric", "method", "seeds", "mean", "deviation", "low", "high", "place",
        "first", "paper", "paper_deviation", "missing_runs", "lr", "scored", "standard_error",
    )  # fmt: skip
    lines: list[tuple[object, ...]] = []
    for column, metric in table.keys:
        for method in table.methods:
            entry = table.entries[column.name, metric, method]
            ours = entry.ours
            numbers = [_number(x) for x in ours[:4]] if ours else [""] * 4
            paper = [entry.paper.mean, entry.paper.deviation] if entry.paper else ["", ""]
            rates = dict.fromkeys(run.config.lr for run in column.runs.get(method, []))
            lines.append(
                (column.name, column.data, column.clients, metric, method, ours.num_seeds if ours else 0, *numbers,
                 entry.place or "", "yes" if entry.first else "no", *paper, entry.missing,
                 " ".join(f"{lr:g}" for lr in rates), column.sampled.removeprefix("scored on "),
                 "" if entry.error is None else _number(entry.error))
            )  # fmt: skip
    return write_csv(header, lines)


def write_csv(header: tuple[str, ...], lines: list[tuple[object, ...]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(lines)
    return text.getvalue()


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4f}"


def to_markdown(table: MainTable) -> str:
    """Return Markdown: best in bold, second in italics, * for significantly first, the paper's value in brackets."""
    header = ["method", *(f"{column.title} {names.heading(metric)}" for column, metric in table.keys)]
    lines = [_row(header), _row(["---", *["---:"] * len(table.keys)])]
    for method in table.methods:
        cells = []
        for column, metric in table.keys:
            entry = table.entries[column.name, metric, method]
            if entry.ours is None:
                cells.append("–")
                continue
            text = spread(entry.ours, table.score) + (" *" if entry.first else "")
            text = {1: f"**{text}**", 2: f"_{text}_"}.get(entry.place, text)
            text += "" if entry.error is None else f" (s.e. {table.score.written(entry.error, 2)})"
            text += f" ({entry.ours.num_seeds} seeds only)" if entry.missing else ""
            cells.append(text + (f" [{entry.paper.mean:.2f}]" if entry.paper else ""))
        lines.append(_row([names.method(method), *cells]))
    if any(prior_cells(table)):
        lines.append(_row(["label prior alone", *prior_cells(table)]))
    return "\n".join(lines) + f"\n\n{_legend(table)}\n"


def _legend(table: MainTable) -> str:
    unit = table.score.unit.strip() or table.score.name
    paper = "; in brackets: the paper" if table.beside_paper else ""
    return (
        f"Mean ± deviation over seeds, {unit}. Bold: best mean; italics: second; *: every paired 95 % interval against "
        f"every other method is above zero{paper}."
        + (f" {said}" if (said := sampled([column for column, _ in table.keys])) else "")
    )


def prior_cells(table: MainTable) -> list[str]:
    """Return the label prior's accuracy, only for "before", because it does not train."""
    priors = [column.prior(metric) for column, metric in table.keys]
    return ["" if prior is None else f"{100 * prior:.2f}" for prior in priors]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def spread(each: Summary, score: Score) -> str:
    return score.written(each.mean, 2) + (
        "" if math.isnan(each.deviation) else f" ± {score.written(each.deviation, 2)}"
    )


def to_latex(table: MainTable) -> str:
    """Return LaTeX in the paper's layout: two columns per dataset, deviation in brackets."""
    columns = list(dict.fromkeys(column for column, _ in table.keys))
    heads = [names.heading(metric).capitalize() for _, metric in table.keys]
    lines = [
        r"\begin{tabular}{l" + "".join("|" + "c" * len(column.shown) for column in columns) + "}",
        r"\hline",
        " & ".join(["", *(rf"\multicolumn{{{len(c.shown)}}}{{c}}{{{_tex(c.title)}}}" for c in columns)]) + r" \\",
        " & ".join(["Method", *map(_tex, heads)]) + r" \\",
        r"\hline",
    ]
    for method in table.methods:
        cells = [_tex(names.method(method))]
        for column, metric in table.keys:
            entry = table.entries[column.name, metric, method]
            cells.append("--" if entry.ours is None else _tex_cell(entry, table.score))
        lines.append(" & ".join(cells) + r" \\")
    if any(prior_cells(table)):
        lines += [r"\hline", " & ".join(["Label prior alone", *prior_cells(table)]) + r" \\"]
    if said := sampled(columns):
        worst = max((e.error for e in table.entries.values() if e.error is not None), default=math.nan)
        most = "unknown" if math.isnan(worst) else f"at most {table.score.written(worst, 2)}"
        words = _tex(f"{said.removesuffix('.')}: {most}.")
        lines += [r"\hline", rf"\multicolumn{{{1 + len(table.keys)}}}{{l}}{{{words}}} \\"]
    lines += [r"\hline", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _tex_cell(entry: Entry, score: Score) -> str:
    assert entry.ours is not None
    text = score.written(entry.ours.mean, 2)
    text = {1: rf"\textbf{{{text}}}", 2: rf"\underline{{{text}}}"}.get(entry.place, text)
    return text + ("" if math.isnan(entry.ours.deviation) else f"({score.written(entry.ours.deviation, 2)})")


def _tex(text: str) -> str:
    return "".join(f"\\{c}" if c in "&%$#_{}" else c for c in text)
