"""Make the page: one HTML file that needs no network and no other file."""

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from fedncv.figures import looks
from fedncv.report import metrics, names, partition, parts, sections, series, variance
from fedncv.report.gather import Column, Results
from fedncv.report.table import MainTable, is_sample
from fedncv.report.table import sampled as sampled_clients
from fedncv.report.verdict import Claim

HERE = Path(__file__).parent
MADE_BY = (
    "Made by <code>fedncv report</code> from the runs' own result files; its tables and figures are in "
    "<code>report/</code>, next to this page."
)


class Part(NamedTuple):
    """A section of the page: its id, heading, words below that in HTML, and body in HTML."""

    key: str
    title: str
    words: str
    body: str

    @property
    def html(self) -> str:
        words = f"<p class='soft'>{self.words}</p>" if self.words else ""
        return f'<h2 id="{self.key}-title">{self.title}</h2>{words}{self.body}'


class Frame(NamedTuple):
    """What is around the sections, as text."""

    title: str
    facts: str = ""
    state: str = ""
    machine: str = ""
    eyebrow: str = "fedncv report"
    footer: str = MADE_BY
    css: str = ""
    js: str = ""
    nonce: str = ""  # without which a browser runs no script of a page that is served


def page(
    results: Results,
    table: MainTable,
    claims: list[Claim],
    *,
    target: float | None = None,
    written: Sequence[Path] = (),
) -> str:
    """Return the page; ``written`` are the files beside it, for its links."""
    data = chart_data(results)
    files = Part("files", "Files", "", sections.files(results, list(written)))
    return document(frame(results), [*content(results, table, claims, data, target=target), files], data)


def frame(results: Results) -> Frame:
    """Return title and facts of the results."""
    return Frame(results.title, facts(results), sections.state(results), sections.machine_line(results))


def document(around: Frame, parts: list[Part], data: dict[str, Any]) -> str:
    """Return the HTML of a page with these sections, except empty ones; ``data`` are the numbers of its charts."""
    shown = [part for part in parts if part.body]
    first = shown[0]
    fill = {
        "title": escape(around.title),
        "eyebrow": escape(around.eyebrow),
        "facts": escape(around.facts),
        "state": escape(around.state),
        "machine": escape(around.machine),
        "footer": around.footer,
        "skip": f'<a class="skip" href="#{first.key}">Skip to the {first.title.lower()}</a>',
        "links": "".join(f'<li><a href="#{part.key}">{part.title}</a></li>' for part in shown),
        "body": "".join(
            f'<section id="{part.key}" aria-labelledby="{part.key}-title">{part.html}</section>' for part in shown
        ),
        "nonce": f' nonce="{escape(around.nonce)}"' if around.nonce else "",
        "css": (HERE / "page.css").read_text(encoding="utf-8") + around.css,
        "js": (HERE / "page.js").read_text(encoding="utf-8") + around.js,
        # inside a script only "<" could end it
        "data": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    text = (HERE / "page.html").read_text(encoding="utf-8")
    pieces = text.split("@@")  # names between @@ and @@ are replaced
    return "".join(fill[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def content(
    results: Results,
    table: MainTable,
    claims: list[Claim],
    data: dict[str, Any],
    *,
    target: float | None = None,
    is_live: bool = False,
) -> list[Part]:
    """Return the sections; those that the results do not fill have no body. ``data`` are the numbers of the charts.

    ``is_live``: the page says elsewhere which runs are missing.
    """
    score, called = escape(results.score.axis().capitalize()), escape(results.score.name.capitalize())
    beside = "; below it the paper's value" if table.beside_paper else ""
    sampled = escape(f" {sampled_clients(results.columns)}".rstrip())
    drawn = any(is_sample(column.sampled) for column in results.columns)
    whose = "a sample of clients'" if drawn else "the clients'" if sampled else "all clients'"
    return [
        Part("verdict", "Verdict", "", sections.verdict(results, table, claims)
             + ("" if is_live else sections.missing(results))),
        Part("table", "Results", f"{score}{TABLE_WORDS.format(beside=beside, whose=whose)}{sampled}",
             sections.main_table(table) + sections.standings(table)),
        Part("metrics", "More metrics", METRIC_WORDS, metrics.section(results)),
        Part("gain", "Gain and cost", "", parts.section(results)),
        Part("curves", "Curves", CURVE_WORDS, _chart("curves", "round samples bytes", "score")
             if data["curves"] else ""),
        Part("scale", "More clients", f"{called}{SCALE_WORDS}",
             _chart("scale", "clients", "score") if data["scale"] else ""),
        Part("clients", "Clients", f"{called}{CLIENT_WORDS}{sampled}", sections.clients(results)),
        Part("partition", "Partition", "", partition.section(results)),
        Part("variance", "Variance", VARIANCE_WORDS, variance.section(results) + _chart("variance",
             "round samples bytes", "variance") if data["variance"] else ""),
        Part("work", "Work and cost", WORK_WORDS, sections.work(results, target)),
        Part("repeat", "Repeat it", "", sections.repeat(results)),
    ]  # fmt: skip


def facts(results: Results) -> str:
    """Return data, clients, rounds and model in one line."""
    config = results.protocol
    where = ", ".join(dict.fromkeys(column.where or names.dataset(column.data) for column in results.columns))
    drawn = "" if "per_round" in results.differing else f" of {config.per_round} clients"
    counts = {"rounds": "rounds", "epochs": "local epochs"}
    rounds, epochs = (
        f"{'various' if name in results.differing else getattr(config, name)} {word}" for name, word in counts.items()
    )
    epochs = "1 local epoch" if epochs == "1 local epochs" else epochs
    per = f"{rounds}{drawn}, {epochs}" + ("" if "batch_size" in results.differing else f", batch {config.batch_size}")
    skew = "" if "partition" in results.differing else f"{config.partition} · "
    population = "" if "clients" in results.differing else f"{config.clients} clients{', ' if skew else ' · '}"
    model = "various models" if "model" in results.differing else names.thing(config.model)
    return f"{where} · {population}{skew}{per} · {model}"


def _chart(name: str, axes: str, kind: str) -> str:
    return f'<div id="{name}-chart" data-chart="{name}" data-x="{axes}" data-kind="{kind}"></div>'


def chart_data(results: Results) -> dict[str, Any]:
    """Return the numbers of the charts, rounded to visible precision."""
    accuracy: list[dict[str, Any]] = []
    probes: list[dict[str, Any]] = []
    for column in results.columns:
        found = series.curves(column)
        plain = {metric: lines for metric, lines in found.items() if not metric.startswith(series.VARIANCE)}
        other = {metric: lines for metric, lines in found.items() if metric.startswith(series.VARIANCE)}
        so_far = begun(column)
        if plain or so_far:
            group = {"title": column.title, "floor": column.prior(), "metrics": _points(plain)}
            accuracy.append(group | ({"name": column.name, "begun": so_far} if so_far else {}))
        if other:
            probes.append({"title": column.title, "floor": None, "metrics": _points(other)})
    scale = [
        {"title": data, "floor": None, "metrics": {
            metric: {method: [[clients, 0, 0, *_numbers(point)] for clients, point in points]
                     for method, points in lines.items()}
            for metric, lines in metrics.items()
        }}
        for data, metrics in series.over_clients(results).items()
    ]  # fmt: skip
    wanted = {metric for group in (*accuracy, *probes) for metric in (*group["metrics"], *group.get("begun", ()))}
    look = looks(results.methods)
    return {
        "ours": results.focus,
        "score": results.score.name,
        "percent": list(series.SCORES) if results.score.unit else [],
        "methods": [
            {"id": method, "label": names.method(method), "colour": look[method].colour, "line": look[method].line}
            for method in results.methods
        ],
        "metrics": {metric: names.metric(metric) for metric in sorted(wanted)},
        "curves": accuracy,
        "variance": probes,
        "scale": scale,
    }


def begun(column: Column) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return metric -> method -> the curves of its unfinished runs, for the charts."""
    return {
        metric: {
            method: [{"seed": part.seed, "points": list(map(_point, part.points))} for part in parts]
            for method, parts in lines.items()
        }
        for metric, lines in series.begun(column).items()
    }


def _points(curves: series.Curves) -> dict[str, Any]:
    return {
        metric: {method: list(map(_point, points)) for method, points in lines.items()}
        for metric, lines in curves.items()
    }


def _point(p: series.Point) -> list[float | int | None]:
    return [p.round, round(p.samples), round(p.bytes), *_numbers(p)]


def _numbers(point: series.Point) -> list[float | int | None]:
    values = [None if x is None or math.isnan(x) else float(f"{x:.6g}") for x in (point.mean, point.low, point.high)]
    return [*values, point.num_seeds]


TABLE_WORDS = (
    ", over {whose} own test samples, mean ± deviation over seeds{beside}. "
    "<b>Bold</b>: best mean. <u>Underlined</u>: second. ★: significantly first: every paired 95 % interval against "
    "every other method is above zero. Click a heading to sort."
)
METRIC_WORDS = "At the end of the runs, mean ± deviation over seeds. Undefined values are left out."
CURVE_WORDS = (
    "Mean over seeds. Bands, or the bars at the end of the lines, are 95 % intervals by Student's t. Click a name to "
    "hide or show its line. Point at a name to highlight its line with the interval at every round. Move over the "
    "chart, or use the arrow keys, to read values."
)
SCALE_WORDS = (
    " at the end of runs with more and more clients, each with fewer samples; bars: 95 % intervals over seeds."
)
CLIENT_WORDS = (
    " of single clients at the end, over all seeds: the line is the median client, the box the middle half, "
    "the thin bar from the 5th to the 95th percentile; the bracket below, with several seeds, the 95 % interval of the "
    "median client's score over seeds."
)
VARIANCE_WORDS = (
    "Variance of the clients' gradients at the model of that round: squared norms summed over parameters. Within: one "
    "mini-batch around its client's gradient. Between: clients around the gradient of all samples. Sampling: the mean "
    "over a round's clients, over draws of clients. Signal: the squared gradient of all samples. The table shows the "
    "last probe, with 95 % intervals over seeds or, with one seed, over clients. Vertical lines in the plots are 95 % "
    "intervals over seeds. Each plot has its method's colour."
)
WORK_WORDS = (
    "Work of training, without measurements. Seconds are the run's own clocks; runs that trained together on one "
    "device have equal shares. Seeds that never reached the target are not averaged; “reached it” counts the others."
)
