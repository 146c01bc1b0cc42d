"""The sections of the page without scripts: verdict, tables, spread of clients, partitions, how to repeat the runs."""

import math
import os
from dataclasses import fields
from html import escape
from pathlib import Path
from urllib.parse import quote

from fedncv.comparison import Summary, paired
from fedncv.config import Settings
from fedncv.figures import FEW_SEEDS, looks
from fedncv.report import names, series, tuning
from fedncv.report import repeat as repeating
from fedncv.report.findings import findings
from fedncv.report.gather import Column, Results, Source
from fedncv.report.reruns import reruns
from fedncv.report.table import Entry, MainTable
from fedncv.report.verdict import AGREES, DIFFERS, PARTLY, Claim, headline
from fedncv.results import CONFIG, MACHINE, METRICS, TIMING, Score
from fedncv.study import FILE, NEUTRAL, TRIALS

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
    said += "".join(f'<div class="notice">{each}</div>' for each in (caution(results), *apart(results)) if each)
    return said + (f'<ul class="claims">{"".join(cards)}</ul>' if cards else "")


def caution(results: Results) -> str:
    """Return a warning if a method has few seeds; empty otherwise."""
    counts = [len(runs) for column in results.columns for runs in column.runs.values()]
    if not counts or min(counts) >= FEW_SEEDS:
        return ""
    if max(counts) == 1:
        return "<b>One seed:</b> there are no intervals, and differences may be chance. Train more seeds first."
    seeds = str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return (
        f"<b>Few seeds ({seeds}):</b> intervals over fewer than {FEW_SEEDS} seeds are wide and rough, and “not "
        "significant” says little. Train more seeds before you conclude."
    )


def _methods_of(results: Results, source: Source) -> list[str]:
    texts = dict.fromkeys(run.config.method for run in source.runs)
    return [names.method(results.ids.get(text, text)) for text in texts]


def apart(results: Results) -> list[str]:
    """Return the settings in which the folders of the page differ."""
    if len(results.sources) == 1:
        return []
    folders = "; ".join(
        f"<b>{escape(source.label)}</b> ({escape(', '.join(_methods_of(results, source)))})"
        for source in results.sources
    )
    if not results.apart and not reruns(results):
        return [f"Side by side: {folders}. Their settings are equal, so seeds of one method are pooled."]
    items = "".join(f"<li>{escape(each)}</li>" for each in results.apart)
    noise = "".join(f"<li>{escape(each.words(results.score))}</li>" for each in reruns(results))
    if noise:
        noise = (
            f"The same seeds with the same settings, run twice (on another machine, engine or layers):<ul>{noise}</ul>"
        )
    if not items:
        return [f"Side by side: {folders}. Their settings are equal, but not the numbers of equal seeds.", noise]
    return [
        noise,
        f"Side by side: {folders}. They differ in:<ul>{items}</ul>A method with different settings has a row for each "
        "folder; different data or partitions have their own columns.",
    ]


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
    columns = list(dict.fromkeys(column for column, _ in table.keys))
    groups = "".join(
        f'<th class="group" colspan="{len(column.shown)}">{escape(column.title)}</th>' for column in columns
    )
    edges = [metric == column.shown[0] for column, metric in table.keys]
    heads = "".join(
        f'<th data-column="{i}" aria-sort="none" class="{"edge" if edges[i - 1] else ""}">'
        f'<button type="button">{names.heading(metric)}</button></th>'
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
            _cell(table.entries[column.name, metric, method], edge, table.score)
            for (column, metric), edge in zip(table.keys, edges, strict=True)
        )
        if ranked:
            rank = table.ranks.get(method)
            cells += f'<td class="edge" data-value="{rank or ""}">{"–" if rank is None else f"{rank:.2f}"}</td>'
        rows.append(f'<tr data-method="{escape(method)}"><th data-value="{escape(names.method(method))}">'
                    f"{escape(names.method(method))}</th>{cells}</tr>")  # fmt: skip
    floor = []
    for (column, metric), at_edge in zip(table.keys, edges, strict=True):
        prior = column.prior(metric)
        floor.append(f'<td class="{"edge" if at_edge else ""}">{"" if prior is None else f"{100 * prior:.2f}"}</td>')
    tail = '<td class="edge"></td>' if ranked else ""
    foot = f'<tfoot><tr class="floor"><th>label prior alone</th>{"".join(floor)}{tail}</tr></tfoot>'
    foot = foot if any(column.prior() is not None for column in columns) else ""
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Main table"><table class="sortable" id="main">'
        f'<thead><tr><th rowspan="2" data-column="0" aria-sort="none"><button type="button">Method</button></th>'
        f"{groups}</tr><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
        f"{foot}</table></div>"
    )


def _cell(entry: Entry, at_edge: bool, score: Score) -> str:
    edge = "edge" if at_edge else ""
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
    spread += "" if entry.error is None else f" <small>(s.e. {score.written(entry.error, 2)})</small>"
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
        rows.append(f"<tr><th>{escape(column.title)}, {names.heading(metric)}</th>{body}</tr>")
    if not rows or len(table.methods) == 1:
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
    found = looks(results.methods)
    for i, column in enumerate(results.columns):
        sides = []
        for metric, by_method in series.clients(column).items():
            low, high = (0.0, 1.0) if results.score.unit else _ends(list(by_method.values()))
            bars = "".join(
                _bar(names.method(method), q, low, high, results.score, found[method].colour,
                     series.median_client(column, method, metric))
                for method, q in by_method.items()
            )  # fmt: skip
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


def _bar(name: str, quantiles: list[float], low: float, high: float, score: Score, colour: int, median: Summary) -> str:
    """Return one bar on a track from ``low`` to ``high``, in the method's colour."""
    words = [score.show(q, 1) for q in quantiles]
    title = f"5 % of clients below {words[0]}, a quarter below {words[1]}, half below {words[2]}, 95 % below {words[4]}"
    q05, q25, q50, q75, q95 = (100 * (q - low) / (high - low) for q in quantiles)
    ends = ""
    if median.num_seeds > 1:
        left, right = (min(100.0, max(0.0, 100 * (end - low) / (high - low))) for end in (median.low, median.high))
        title += f"; 95 % interval of the median {score.show(median.low, 1)} to {score.show(median.high, 1)}"
        ends = f"<span class='ends' style='left:{left:.2f}%;width:{right - left:.2f}%'></span>"
    return (
        f"<span class='name'>{escape(name)}</span><div class='track' role='img' aria-label='{title}' title='{title}' "
        f"style='--of:var(--c{colour})'>"
        f"<span class='wide' style='left:{q05:.2f}%;width:{q95 - q05:.2f}%'></span>"
        f"<span class='box' style='left:{q25:.2f}%;width:{q75 - q25:.2f}%'></span>"
        f"<span class='middle' style='left:{q50:.2f}%'></span>{ends}</div><span class='number'>{words[2]}</span>"
    )


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
    private = any(each.epsilon is not None for each in spent.values())
    heads = ["samples", "gradients", "down", "up", "seconds", "reached it", "rounds", "samples", "bytes"]
    heads += ["ε of a client"] * private
    top = "".join(
        f'<th data-column="{i}" aria-sort="none" class="{"edge" if i in (1, 6, 10) else ""}">'
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
            *[(each.epsilon, "–" if each.epsilon is None else f"{each.epsilon:.3g} (δ {each.delta:g})")] * private,
        ]
        body = "".join(
            f'<td class="{"edge" if i in (0, 5, 9) else ""}" data-value="{"" if value is None else value}">{text}</td>'
            for i, (value, text) in enumerate(cells)
        )
        rows.append(
            f"<tr><th data-value='{escape(names.method(method))}'>{escape(names.method(method))}</th>{body}</tr>"
        )
    over = '<th class="group">differential privacy</th>' * private
    return (
        '<div class="scroll"><table class="sortable"><thead><tr><th rowspan="2" data-column="0" aria-sort="none">'
        '<button type="button">Method</button></th><th class="group" colspan="5">whole run, mean over seeds</th>'
        f'<th class="group" colspan="4">to {score.show(goal, 1)}{score.unit} before local training</th>'
        f"{over}</tr><tr>{top}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def repeat(results: Results) -> str:
    blocks = repeating.again(results)
    commands = "\n".join(each.text for each in blocks[:-1] if not each.words)
    said = f"<pre><code>{escape(commands)}</code></pre>" if commands else ""
    for each in blocks:
        if each.words:
            said += f"<p>{escape(each.words)}</p><pre><code>{escape(each.text)}</code></pre>"
    said += f"<p>Then make this page:</p><pre><code>{escape(blocks[-1].text)}</code></pre>"
    config = results.protocol
    shown = [f.name for f in fields(Settings) if f.name not in (*NEUTRAL, "data")]
    values = {name: "varies" if name in results.differing else str(getattr(config, name)) for name in shown}
    seeds = sorted({run.config.seed for run in results.finished})
    tuned = tuning.section(results)
    return (
        said
        + (f"<p class='soft small'>Seeds {', '.join(map(str, seeds))}.</p>" if seeds else "")
        + _details("Machine and versions", machine(results))
        + _details("All settings", _facts(values))
        + (_details("Tuning", tuned) if tuned else "")
    )


def _facts(values: dict[str, str]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in values.items())
    return f'<div class="scroll left wrap"><table><tbody>{rows}</tbody></table></div>'


def machine(results: Results) -> str:
    """Return what the runs recorded of their machine; of a study of an earlier version, the versions it recorded."""
    facts, unknown = repeating.machines(results)
    for source in results.sources:
        for name, value in source.made_with.items():
            if name != "command":
                facts.setdefault(name, value)
    silent = ""
    if unknown:
        silent = f"<p class='soft small'>{unknown} of {results.num_finished} runs did not record their machine.</p>"
    return (_facts(facts) if facts else "") + silent or "<p class='soft'>No run is finished yet.</p>"


def machine_line(results: Results) -> str:
    """Return date, machine, engine and versions in one line; empty if no run recorded them."""
    facts, _ = repeating.machines(results)
    if not facts:
        return ""
    cores = f"{facts['cores']} cores" if "cores" in facts else ""
    threads = f"threads per process: {facts['threads']}" if "threads" in facts else ""
    engine = f"engine {facts.get('engine', 'unknown')}, {facts.get('layers', 'unknown')} layers"
    versions = ", ".join(f"{name} {facts[name]}" for name in ("fedncv", "torch") if name in facts)
    place = facts.get("gpu", "") or facts.get("processor", "") or facts.get("system", "")
    words = [facts.get("date", ""), ", ".join(filter(None, [place, cores, threads])), engine, versions]
    return " · ".join(filter(None, words))


# ---- files ---------------------------------------------------------------------------------------------


def files(results: Results, written: list[Path]) -> str:
    """Return links to the files beside the page and to those of each run, relative to the page."""
    beside = "".join(f"<li>{_link(path, results.folder, path.name)}</li>" for path in written)
    rows = []
    for column in results.columns:
        for method, runs in column.runs.items():
            for run in runs:
                named = (CONFIG, METRICS, TIMING, MACHINE)
                links = [
                    _link(run.folder / name, results.folder, name) for name in named if (run.folder / name).exists()
                ]
                cells = f"<td>{run.config.seed}</td><td>{' · '.join(links)}</td>"
                rows.append(f"<tr><th>{escape(names.method(method))}</th><td>{escape(column.title)}</td>{cells}</tr>")
    of_study = [source.folder / name for source in results.sources if source.study for name in (FILE, TRIALS)]
    studies = [path for path in of_study if path.exists()]
    above = "".join(f"<li>{_link(path, results.folder, f'{path.parent.name}/{path.name}')}</li>" for path in studies)
    table = (
        '<div class="scroll left"><table><thead><tr><th>Method</th><th>Column</th><th>Seed</th><th>Files</th></tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
    listed = f"<ul class='files'>{above}{beside}</ul>" if above or beside else ""
    return listed + (_details(f"Files of {len(rows)} runs", table) if rows else "")


def _link(path: Path, page: Path, text: str) -> str:
    """Return a link from the page's folder; it works if the two are moved together."""
    where = quote(Path(os.path.relpath(path.absolute(), page.absolute())).as_posix())
    return f'<a href="{escape(where)}">{escape(text)}</a>'
