"""The first section of the live page: how far everything is, every run at a glance, and what went wrong."""

from collections import Counter
from html import escape

from fedncv.report import names
from fedncv.study import TUNING
from fedncv.watch.clients import REASON, age, badge, is_federation, log, rows_below, table
from fedncv.watch.condition import FAILED, FINISHED, QUIET, RUNNING, STOPPED, UNREADABLE, WAITING, Condition
from fedncv.watch.follow import FollowedFolder
from fedncv.watch.overview import Line, Overview

FEW = 24  # runs that are all in the table; of more, those that need attention
SHOWN = 100  # rows of the table
DELETED = 10  # runs that are named
STATES = (RUNNING, FINISHED, FAILED, UNREADABLE, STOPPED, QUIET, WAITING)
FIRST = (FAILED, UNREADABLE, STOPPED, QUIET, RUNNING, WAITING, FINISHED)  # the order of the table
WORDS = {QUIET: "seem stopped", WAITING: "not started"}


def section(folder: FollowedFolder, found: Overview) -> str:
    """Return the section's HTML."""
    short = names.short(list(dict.fromkeys(line.method for line in found.lines if line.method)))
    titles = {text: names.method(name) for text, name in short.items()}
    parts = [_notices(folder, found), _total(found), _map(found, titles), _table(found, titles), _federations(folder)]
    return "".join(parts)


def headline(found: Overview) -> str:
    """Return how far it is, and how long the rest takes."""
    if not found.lines:
        return "No run yet"
    words = [f"{_percent(found.share)} done", f"{found.count(FINISHED)} of {_runs(len(found.lines))} finished"]
    if found.left is not None and found.left > 0:
        words.append(f"about {names.duration(found.left)} left")
    elif not found.count(RUNNING) and found.count(FINISHED) < len(found.lines):
        words.append("nothing is training now")
    return " · ".join(words)


def _runs(count: int) -> str:
    return f"{count:,} run{'s' * (count != 1)}"


def _percent(share: float) -> str:
    """
    >>> _percent(0.999), _percent(1.0), _percent(0.005)
    ('99 %', '100 %', '0 %')
    """
    return f"{int(100 * share)} %"


def _notices(folder: FollowedFolder, found: Overview) -> str:
    said = []
    if folder.error:
        said.append(f"<b>{escape(folder.error)}.</b> The page goes on when it is there again.")
    elif not found.lines:
        said.append(
            f"<b>{escape(str(folder.root))} holds no run yet</b> (no config.toml in or below it). Runs appear here as "
            "soon as <code>fedncv run</code>, <code>fedncv study</code> or a federation begins them."
        )
    if folder.deleted:
        more = f" and {len(folder.deleted) - DELETED:,} more" if len(folder.deleted) > DELETED else ""
        names_ = escape(", ".join(folder.deleted[-DELETED:]))
        said.append(f"<b>Deleted while this page was watching:</b> {names_}{more}.")
    if folder.found.links:
        said.append(f"{folder.found.links:,} symbolic links to folders were not followed.")
    if folder.found.more:
        said.append("There are more folders than are looked into; watch one study.")
    return "".join(f'<div class="notice">{each}</div>' for each in said)


def _total(found: Overview) -> str:
    if not found.lines:
        return ""
    facts = [(f"{found.count(state):,}", WORDS.get(state, state), state) for state in STATES if found.count(state)]
    if found.rate is not None:
        facts.append((names.quantity(found.rate), "samples/s", ""))
    if found.memory:
        facts.append((names.traffic(found.memory), f"memory of {_processes(found.processes)}", ""))
    if found.gpu_memory:
        facts.append((names.traffic(found.gpu_memory), "GPU memory, most so far", ""))
    tiles = "".join(
        f"<div class='fact {state}'><dd>{escape(value)}</dd><dt>{escape(word)}</dt></div>"
        for value, word, state in facts
    )
    done = 100 * found.share
    return (
        f"<p class='headline'>{headline(found)}</p>"
        f"<div class='meter' role='progressbar' aria-label='All runs' aria-valuemin='0' aria-valuemax='100' "
        f"aria-valuenow='{done:.0f}'><span style='width:{done:.2f}%'></span></div><dl class='facts'>{tiles}</dl>"
    )


def _processes(count: int) -> str:
    return f"{count} training processes" if count > 1 else "the training process"


# ---- every run at a glance -------------------------------------------------------------------------------


def _map(found: Overview, titles: dict[str, str]) -> str:
    """Return a small bar for each run, in a row for each method of a column."""
    if len(found.lines) < 2:
        return ""
    groups: dict[tuple[bool, str], dict[str, list[Line]]] = {}
    for line in found.lines:
        groups.setdefault((line.is_tuning, line.column), {}).setdefault(line.method, []).append(line)
    blocks = []
    for (_, column), methods in sorted(groups.items(), key=lambda item: not item[0][0]):
        rows = "".join(
            f"<span class='name'>{escape(titles.get(method, method) or 'unreadable')}</span><div class='tiles'>"
            f"{''.join(map(_tile, sorted(lines, key=lambda line: (line.seed, line.name))))}</div>{_ended(lines)}"
            for method, lines in methods.items()
        )
        heading = f"<h3>{escape(column)}</h3>" if len(groups) > 1 else ""
        blocks.append(f"<div>{heading}<div class='map'>{rows}</div></div>")
    states = [state for state in STATES if found.count(state)]
    full = {FINISHED: 100}
    keys = "".join(
        f"<li><i class='run {state}' style='--done:{full.get(state, 60)}%'></i>{Condition(state).words}</li>"
        for state in states
    )
    return f"<div class='maps'>{''.join(blocks)}</div><ul class='keys'>{keys}</ul>"


def _ended(lines: list[Line]) -> str:
    count = Counter(line.condition.state for line in lines)
    return f"<span class='number'>{count[FINISHED]} of {len(lines)}</span>"


def _tile(line: Line) -> str:
    words = f"seed {line.seed}: {line.condition.words}" if line.method else f"{line.name}: {line.condition.words}"
    words += f", round {line.round} of {line.rounds}" if line.rounds else ""
    words += f", {' / '.join(line.scores)}" if line.scores else ""
    words += f" ({line.condition.why[:REASON]})" if line.condition.why else ""
    done = 100 * line.share
    return f"<i class='run {line.condition.state}' style='--done:{done:.0f}%' title='{escape(words)}'></i>"


# ---- the table -------------------------------------------------------------------------------------------


def _table(found: Overview, titles: dict[str, str]) -> str:
    lines = sorted(found.lines, key=lambda line: FIRST.index(line.condition.state))
    kept = lines if len(lines) <= FEW else [each for each in lines if each.condition.state not in (FINISHED, WAITING)]
    if not kept:
        return ""
    heads = ("Run", "Progress", "State", "Before / after", "Time left", "Samples/s", "Last row")
    said = rows_below("Runs", heads, [_row(line, titles) for line in kept[:SHOWN]])
    if len(kept) > SHOWN:
        said += f"<p class='soft small'>{len(kept) - SHOWN:,} more runs are not listed.</p>"
    if left_out := len(lines) - len(kept):
        said += f"<p class='soft small'>Without {_runs(left_out)} that are finished or not started.</p>"
    return said


def _row(line: Line, titles: dict[str, str]) -> str:
    title = titles.get(line.method, line.method) or line.name
    why = f"<small class='why'>{escape(line.condition.why[:REASON])}</small>" if line.condition.why else ""
    tuning = "tuning" if line.is_tuning and TUNING not in line.column else ""
    words = [f"seed {line.seed}" if line.seed >= 0 else "", line.column, tuning]
    place = f"<small>{escape(' · '.join(filter(None, words)))}</small>"
    progress = (
        f"<span class='meter small'><span style='width:{100 * line.share:.1f}%'></span></span>"
        f"<small>{line.round:,} of {line.rounds:,}</small>"
        if line.rounds
        else "–"
    )
    left = "–" if line.left is None or line.condition.state != RUNNING else names.duration(line.left)
    rate = "–" if line.rate is None else names.quantity(line.rate)
    return (
        f"<tr data-run='{escape(line.name)}'><th>{escape(title)}{place}</th><td>{progress}</td>"
        f"<td>{badge(line.condition.state, line.condition.words)}{why}</td>"
        f"<td>{escape(' / '.join(line.scores)) or '–'}</td><td>{left}</td><td>{rate}</td>"
        f"<td>{age(line.last)}</td></tr>"
    )


# ---- federations -----------------------------------------------------------------------------------------


def _federations(folder: FollowedFolder) -> str:
    parts = []
    for followed in folder.runs.values():
        run = followed.run
        if run is not None and is_federation(followed, run):
            told = f"<p class='soft'>{run.score.name} {run.scorers}</p>" if run.scorers else ""
            parts.append(f"<h3>Clients of {escape(followed.name)}</h3>{told}{table(followed, run)}{log(followed)}")
    return "".join(parts)
