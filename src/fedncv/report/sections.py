"""The sections of the page without scripts: verdict, tables, spread of clients, partitions, how to repeat the runs."""

import base64
import io
import math
from dataclasses import fields
from html import escape

import numpy as np
from numpy.typing import NDArray

from fedncv.comparison import paired
from fedncv.config import Settings
from fedncv.report import names, series
from fedncv.report.findings import findings
from fedncv.report.gather import Column, Results, command
from fedncv.report.table import METRICS, Entry, MainTable
from fedncv.report.verdict import AGREES, DIFFERS, PARTLY, Claim, headline
from fedncv.results import Score
from fedncv.study import NEUTRAL

Indices = NDArray[np.int64]

BADGES = {AGREES: "agrees", PARTLY: "part", DIFFERS: "differs"}


def verdict(results: Results, table: MainTable, claims: list[Claim]) -> str:
    cards = []
    for claim in claims:
        badge = f'<span class="badge {BADGES.get(claim.verdict, "open")}">{escape(claim.verdict)}</span>'
        facts = [("The paper", claim.paper), ("Measured", claim.measured), ("Note", claim.why)]
        rows = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts if text)
        cards.append(f'<li class="claim"><h3>{escape(claim.where)} {badge}</h3><dl>{rows}</dl></li>')
    said = f'<p class="headline">{escape(headline(results, table, claims))}</p>'
    said += "".join(f"<p>{escape(finding)}</p>" for finding in findings(results))
    return said + (f'<ul class="claims">{"".join(cards)}</ul>' if cards else "")


def state(results: Results) -> str:
    """Return how many runs are finished, and how many are not."""
    counts: dict[str, int] = {}
    for missing in results.missing:
        counts[missing.status] = counts.get(missing.status, 0) + 1
    words = [f"{results.num_finished} of {results.num_planned} runs finished"]
    words += [f"{count} {status}" for status, count in counts.items()]
    return ", ".join(words)


def missing(results: Results) -> str:
    if not results.missing:
        return ""
    rows = "".join(
        f"<tr><th>{escape(names.method(m.method))}</th><td>{escape(m.column)}</td>"
        f"<td>{'' if m.seed < 0 else m.seed}</td><td>{m.status}</td><td>{escape(m.reason)}</td></tr>"
        for m in results.missing
    )
    return (
        f'<div class="notice"><b>Not in these numbers: {len(results.missing)} of {results.num_planned} runs.</b> '
        "They are not averaged. Repeat the same command to finish them; then make this page again.</div>"
        f"<details><summary>Which runs are missing, and why</summary><div>"
        f'<div class="scroll left wrap"><table><thead><tr><th>Method</th><th>Column</th><th>Seed</th><th>Status</th>'
        f"<th>Why</th></tr></thead><tbody>{rows}</tbody></table></div></div></details>"
    )


# ---- the main table ------------------------------------------------------------------------------------


def main_table(table: MainTable) -> str:
    columns = [column for column, metric in table.keys if metric == METRICS[0]]
    groups = "".join(f'<th class="group" colspan="2">{escape(column.title)}</th>' for column in columns)
    heads = "".join(
        f'<th data-column="{i}" aria-sort="none" class="{"edge" if metric == METRICS[0] else ""}">'
        f'<button type="button">{metric}</button></th>'
        for i, (_, metric) in enumerate(table.keys, start=1)
    )
    ranked = bool(table.ranks)
    if ranked:
        at = len(table.keys) + 1
        groups += '<th class="group">Mean</th>'
        heads += f'<th data-column="{at}" aria-sort="none" class="edge"><button type="button">rank</button></th>'
    rows = []
    for method in table.methods:
        cells = "".join(
            _cell(table.entries[column.name, metric, method], metric, table.score) for column, metric in table.keys
        )
        if ranked:
            rank = table.ranks.get(method)
            cells += f'<td class="edge" data-value="{rank or ""}">{"–" if rank is None else f"{rank:.2f}"}</td>'
        rows.append(f'<tr data-method="{escape(method)}"><th data-value="{escape(names.method(method))}">'
                    f"{escape(names.method(method))}</th>{cells}</tr>")  # fmt: skip
    floor = []
    for column, metric in table.keys:
        prior = column.prior() if metric == METRICS[0] else None
        edge = "edge" if metric == METRICS[0] else ""
        floor.append(f'<td class="{edge}">{"" if prior is None else f"{100 * prior:.2f}"}</td>')
    tail = '<td class="edge"></td>' if ranked else ""
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Main table"><table class="sortable" id="main">'
        f'<thead><tr><th rowspan="2" data-column="0" aria-sort="none"><button type="button">Method</button></th>'
        f"{groups}</tr><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
        f'<tfoot><tr class="floor"><th>label prior alone</th>{"".join(floor)}{tail}</tr></tfoot></table></div>'
    )


def _cell(entry: Entry, metric: str, score: Score) -> str:
    edge = "edge" if metric == METRICS[0] else ""
    short = f'<span class="short">{entry.missing} missing</span>' if entry.missing else ""
    paper = f'<span class="paper">{entry.paper.mean:.2f}</span>' if entry.paper else ""
    ours = entry.ours
    if ours is None:
        return f'<td class="none {edge}" data-value="">–{short}{paper}</td>'
    place = {1: "best", 2: "second"}.get(entry.place, "")
    mean = f'<span class="mean">{score.written(ours.mean, 2)}</span>'
    mean = f"<b>{mean}</b>" if entry.place == 1 else mean
    spread = "" if math.isnan(ours.deviation) else f" <small>± {score.written(ours.deviation, 2)}</small>"
    low, high = score.written(ours.low, 2), score.written(ours.high, 2)
    interval = "" if math.isnan(ours.low) else f"95 % interval {low} to {high}, "
    title = f"{interval}{ours.num_seeds} seed{'s' if ours.num_seeds > 1 else ''}"
    classes = " ".join(filter(None, [place, "first" if entry.first else "", edge]))
    return f'<td class="{classes}" data-value="{ours.mean:.6f}" title="{title}">{mean}{spread}{short}{paper}</td>'


def standings(table: MainTable) -> str:
    """Return the best method of each column, its lead, and whether it stays significant after Holm's correction."""
    rows = []
    for column, metric in table.keys:
        standing = table.standing(column.name, metric)
        if standing is None:
            continue
        scores = column.scores(metric)
        ahead = "–"
        if standing.second is not None:
            difference = paired(scores[standing.best], scores[standing.second])
            ahead = table.score.show(difference.difference, 2)
            if not math.isnan(difference.low):
                ahead += f" ({table.score.show(difference.low, 2)} to {table.score.show(difference.high, 2)})"
        told = "first" if standing.survives else "first, not after Holm" if standing.first else "not significant"
        level = ", ".join(names.method(m) for m in standing.level[1:]) or "–"
        cells = [
            names.method(standing.best), ahead, names.method(standing.second) if standing.second else "–", level,
            _p(standing.p), _p(standing.adjusted_p), told,
        ]  # fmt: skip
        body = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr><th>{escape(column.title)}, {metric}</th>{body}</tr>")
    if not rows:
        return ""
    lead = "Ahead by, points (95 %)" if table.score.unit else "Ahead by (95 %)"
    heads = ("Best", lead, "Second", "Not significantly different", "p", "p, Holm", "Result")
    return (
        "<details><summary>Which method is first, and is it significant?</summary><div><p class='soft small'>"
        "Differences are paired by seed. First: every paired 95 % interval against every other method is above zero. "
        "A column's p is the largest of its comparisons; Holm's correction shares 5 % among all columns.</p>"
        '<div class="scroll left"><table><thead><tr><th>Column</th>'
        + "".join(f"<th>{head}</th>" for head in heads)
        + f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div></div></details>"
    )


def _p(value: float) -> str:
    return "–" if math.isnan(value) else "< 0.0001" if value < 1e-4 else f"{value:.4f}"


# ---- clients and partitions ----------------------------------------------------------------------------


def clients(results: Results) -> str:
    parts = []
    for i, column in enumerate(results.columns):
        sides = []
        for metric, by_method in series.clients(column).items():
            low, high = (0.0, 1.0) if results.score.unit else _ends(list(by_method.values()))
            bars = "".join(_bar(names.method(method), q, low, high, results.score) for method, q in by_method.items())
            marks = "".join(f"<span>{results.score.show(x, 0)}</span>" for x in (low, (low + high) / 2))
            last = f"<span>{results.score.show(high, 0)}{results.score.unit}</span>"
            scale = f"<span></span><div class='scale'>{marks}{last}</div><span></span>"
            sides.append(f"<div><h3>{names.metric(metric)}</h3><div class='bars'>{bars}{scale}</div></div>")
        if sides:
            parts.append(_details(column.title, f"<div class='sides'>{''.join(sides)}</div>", opened=i == 0))
    return "".join(parts)


def _ends(quantiles: list[list[float]]) -> tuple[float, float]:
    """Return the lowest and the highest of them, or a slightly wider range if they are equal."""
    low, high = min(q[0] for q in quantiles), max(q[-1] for q in quantiles)
    return low, high if high > low else low + 1.0


def _bar(name: str, quantiles: list[float], low: float, high: float, score: Score) -> str:
    """Return one bar on a track from ``low`` to ``high``."""
    words = [score.show(q, 1) for q in quantiles]
    title = f"5 % of clients below {words[0]}, a quarter below {words[1]}, half below {words[2]}, 95 % below {words[4]}"
    q05, q25, q50, q75, q95 = (100 * (q - low) / (high - low) for q in quantiles)
    return (
        f"<span class='name'>{escape(name)}</span><div class='track' role='img' aria-label='{title}' title='{title}'>"
        f"<span class='wide' style='left:{q05:.2f}%;width:{q95 - q05:.2f}%'></span>"
        f"<span class='box' style='left:{q25:.2f}%;width:{q75 - q25:.2f}%'></span>"
        f"<span class='middle' style='left:{q50:.2f}%'></span></div><span class='number'>{words[2]}</span>"
    )


def partitions(results: Results) -> str:
    parts = []
    for i, column in enumerate(results.columns):
        found = series.partition(column)
        if found is None:
            continue
        counts_NK = np.array(found["counts"], dtype=np.int64)
        picture = _partition_picture(counts_NK)
        held = np.median((counts_NK > 0).sum(1))
        sizes = counts_NK.sum(1)
        caption = (
            f"{len(counts_NK):,} clients from left to right, sorted by their largest class; {counts_NK.shape[1]} "
            f"classes from top to bottom; darker is a larger share of the client's samples. Above, sample counts: "
            f"{sizes.min():,} to {sizes.max():,}. The median client holds {held:.0f} classes. {found['partition']}, "
            f"seed {found['seed']}."
        )
        body = f"<div class='partition'>{picture}</div><p class='small soft'>{escape(caption)}</p>"
        parts.append(_details(column.title, body, opened=i == 0))
    return "".join(parts)


def _partition_picture(counts_NK: Indices) -> str:
    """Return a picture with one pixel per client and class, scaled by the browser: small, sharp, for light and dark."""
    from matplotlib.image import imsave

    share_NK = counts_NK / np.maximum(counts_NK.sum(1, keepdims=True), 1)
    order = np.lexsort((-share_NK.max(1), share_NK.argmax(1)))
    pixels = np.zeros((*share_NK.T.shape, 4))
    pixels[..., :3] = (0.16, 0.47, 0.76)
    pixels[..., 3] = share_NK[order].T ** 0.6
    image = io.BytesIO()
    imsave(image, pixels, format="png")
    sizes = counts_NK.sum(1)[order]
    heights = np.log10(sizes + 1) if sizes.max() > 50 * max(sizes.min(), 1) else sizes
    top = float(heights.max())
    path = "".join(f"M{i} 100v{-100 * h / top:.1f}h.85v{100 * h / top:.1f}z" for i, h in enumerate(heights))
    bars = f'<svg viewBox="0 0 {len(sizes)} 100" preserveAspectRatio="none" aria-hidden="true"><path d="{path}"/></svg>'
    source = base64.b64encode(image.getvalue()).decode()
    return f'{bars}<img alt="Which client holds which classes" src="data:image/png;base64,{source}">'


def _details(title: str, body: str, *, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary><div>{body}</div></details>"


# ---- work and how to repeat it -------------------------------------------------------------------------


def work(results: Results, target: float | None) -> str:
    return "".join(
        _details(column.title, _work_table(column, target, results.score), opened=i == 0)
        for i, column in enumerate(results.columns)
    )


def _work_table(column: Column, target: float | None, score: Score) -> str:
    spent = series.work(column, target)
    if not spent:
        return "<p class='soft'>No finished run yet.</p>"
    goal = next(iter(spent.values())).target
    heads = ["samples", "gradients", "down", "up", "seconds", "reached it", "rounds", "samples", "bytes"]
    top = "".join(
        f'<th data-column="{i}" aria-sort="none" class="{"edge" if i in (1, 6) else ""}">'
        f'<button type="button">{head}</button></th>'
        for i, head in enumerate(heads, start=1)
    )
    rows = []
    for method, each in spent.items():
        cells = [
            (each.samples, names.quantity(each.samples)),
            (each.gradients, names.quantity(each.gradients)),
            (each.bytes_down, names.traffic(each.bytes_down)),
            (each.bytes_up, names.traffic(each.bytes_up)),
            (each.seconds, "–" if each.seconds is None else f"{each.seconds:,.1f}"),
            (each.reached, f"{each.reached} of {each.seeds}"),
            (each.rounds_to, "–" if each.rounds_to is None else f"{each.rounds_to:.1f}"),
            (each.samples_to, "–" if each.samples_to is None else names.quantity(each.samples_to)),
            (each.bytes_to, "–" if each.bytes_to is None else names.traffic(each.bytes_to)),
        ]
        body = "".join(
            f'<td class="{"edge" if i in (0, 5) else ""}" data-value="{"" if value is None else value}">{text}</td>'
            for i, (value, text) in enumerate(cells)
        )
        rows.append(
            f"<tr><th data-value='{escape(names.method(method))}'>{escape(names.method(method))}</th>{body}</tr>"
        )
    return (
        '<div class="scroll"><table class="sortable"><thead><tr><th rowspan="2" data-column="0" aria-sort="none">'
        '<button type="button">Method</button></th><th class="group" colspan="5">whole run, mean over seeds</th>'
        f'<th class="group" colspan="4">to {score.show(goal, 1)}{score.unit} before local training</th></tr>'
        f"<tr>{top}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def tuning(results: Results) -> str:
    study = results.study
    if study is None or study.tuning is None or not study.lr:
        return ""
    grid = sorted(study.tuning.grid)
    heads = "".join(f"<th>{escape(column.title)}</th>" for column in results.columns)
    rows = []
    for method in study.methods:
        cells = []
        for column in results.columns:
            lr = study.lr.get(column.name, {}).get(method)
            edge = " <small>(edge)</small>" if len(grid) > 1 and lr in (grid[0], grid[-1]) else ""
            cells.append(f"<td>{'–' if lr is None else f'{lr:g}'}{edge}</td>")
        rows.append(f"<tr><th>{escape(names.method(method))}</th>{''.join(cells)}</tr>")
    about = (
        f"Every method was tuned with learning rates {', '.join(f'{lr:g}' for lr in grid)} on seeds "
        f"{', '.join(map(str, study.tuning.seeds))}, which are not reported; the best mean “{study.tuning.by}” at the "
        "last round was chosen before the reported seeds started. Edge: the best may be outside the grid."
    )
    return (
        f"<p class='soft small'>{escape(about)}</p><div class='scroll'><table><thead><tr><th>Method</th>{heads}</tr>"
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def repeat(results: Results) -> str:
    versions = {name: value for name, value in results.made_with.items() if name != "command"}
    made = f"Made with {', '.join(f'{name} {value}' for name, value in versions.items())}." if versions else ""
    config = results.protocol
    shown = [f.name for f in fields(Settings) if f.name not in (*NEUTRAL, "data")]
    values = {name: "varies" if name in results.differing else str(getattr(config, name)) for name in shown}
    rows = "".join(f"<tr><th>{name}</th><td>{escape(value)}</td></tr>" for name, value in values.items())
    table = f'<div class="scroll left"><table><tbody>{rows}</tbody></table></div>'
    seeds = sorted({run.config.seed for c in results.columns for runs in c.runs.values() for run in runs})
    return (
        f"<pre><code>{escape(command(results))}\nfedncv report {escape(results.folder.name)}</code></pre>"
        f"<p class='soft small'>Seeds {', '.join(map(str, seeds))}. {escape(made)}</p>"
        + _details("All settings", table)
        + (_details("Learning rates, tuned", tuning(results)) if tuning(results) else "")
    )
