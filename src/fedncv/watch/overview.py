"""The numbers of the first section: how far every run is, how fast, and how long the rest takes.

    weight of a run   rounds · seconds per round, by its own clocks; else those of its method and data, else of all
    share done        sum of weight · (round / rounds) over the runs, ended ones counting in full, over sum of weight
    time left         sum of weight · (1 - round / rounds) over the runs that will go on, over the number of processes

A round's seconds are a run's share of those that train together, so shares add up to the time of their process.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fedncv.config import RunConfig
from fedncv.report import names
from fedncv.study import TUNING, Cell, Study, data_folder_name
from fedncv.watch.condition import FAILED, FINISHED, RUNNING, UNREADABLE, WAITING, Condition
from fedncv.watch.follow import LATEST, FollowedFolder, FollowedRun

ENDED = (FINISHED, FAILED, UNREADABLE)  # states of runs that will not go on by themselves


class Line(NamedTuple):
    """One run, planned or there."""

    name: str  # its folder, from that which is watched
    column: str
    method: str  # as text; empty if the config cannot be read
    seed: int
    condition: Condition
    round: int = 0
    rounds: int = 0
    scores: tuple[str, ...] = ()  # the latest, before and after local training, in words
    rate: float | None = None  # samples per second of its process
    left: float | None = None  # seconds
    last: float = 0.0  # when its last row was written, in seconds since 1970
    is_tuning: bool = False

    @property
    def share(self) -> float:
        return min(1.0, self.round / self.rounds) if self.rounds else float(self.condition.state == FINISHED)


class Overview(NamedTuple):
    lines: list[Line]
    share: float
    left: float | None  # seconds; None if nothing trains, or no round is timed yet
    rate: float | None  # samples per second of all processes; None: unknown
    memory: int  # bytes of all training processes, without their workers
    gpu_memory: int
    processes: int

    def count(self, state: str) -> int:
        return sum(line.condition.state == state for line in self.lines)


class _Item(NamedTuple):
    line: Line
    config: RunConfig | None
    followed: FollowedRun | None


def overview(folder: FollowedFolder) -> Overview:
    items = _items(folder)
    paces = _Paces(items)
    running = [item for item in items if item.line.condition.state == RUNNING]
    together = {process: [i for i in running if _process(i) == process] for process in map(_process, running)}
    total = done = left = 0.0
    lines = []
    for item in items:
        weight = item.line.rounds * paces(item)
        ended = item.line.condition.state in ENDED
        total += weight
        done += weight * (1.0 if ended else item.line.share)
        rest = weight * (1 - item.line.share)
        left += 0.0 if ended else rest
        line = item.line
        if line.condition.state == RUNNING:
            others = together[_process(item)]
            line = line._replace(rate=_rate(others), left=rest * len(others) if paces.known else None)
        lines.append(line)
    beats = {process: each[0].followed.beat for process, each in together.items() if each[0].followed is not None}
    rates = [_rate(each) for each in together.values()]
    return Overview(
        lines=lines,
        share=done / total if total else float(bool(lines)),
        left=left / len(together) if together and paces.known else None,
        rate=sum(rate for rate in rates if rate is not None) if any(rate is not None for rate in rates) else None,
        memory=sum(beat.memory for beat in beats.values() if beat is not None),
        gpu_memory=sum(beat.gpu_memory for beat in beats.values() if beat is not None),
        processes=len(together),
    )


# ---- the runs --------------------------------------------------------------------------------------------


def _items(folder: FollowedFolder) -> list[_Item]:
    now = folder.clock()
    there = {path: _item(folder, followed, now) for path, followed in folder.runs.items()}
    items = {path: there[path] for path in sorted(there) if there[path].line.is_tuning or folder.study is None}
    for path, config, method in _planned(folder.study):
        where = folder.root / path
        line = Line(
            path.as_posix(), _column(path.parent, config), method, config.seed, Condition(WAITING),
            rounds=config.rounds, is_tuning=path.parts[0] == TUNING,
        )  # fmt: skip
        items[where] = there.get(where) or _Item(line, config, None)
    return list((items | there).values())


def _column(folder: Path, config: RunConfig) -> str:
    """Return the name of a study's column: the data, and what its folder says besides."""
    inner = [part for part in folder.parts if part != data_folder_name(config.data)]
    return ", ".join([names.dataset(config.data), *inner])


def _planned(study: Study | None) -> Iterable[Cell]:
    """Yield the runs of the study's plan: those that choose settings, while they do, and those to report."""
    if study is None:
        return
    for column, method in study.to_try():
        for name in study.tuning.names if study.tuning else ():
            yield from study.tuning_cells(column, method, {}, name)  # the knobs are drawn when it begins
    yield from study.cells()


def _item(folder: FollowedFolder, followed: FollowedRun, now: float) -> _Item:
    run, state = followed.run, followed.condition(now)
    inside = followed.folder.relative_to(folder.root).parent
    config = followed.config
    if config is None:
        return _Item(Line(followed.name, inside.as_posix(), "", -1, state), None, followed)
    column = _column(inside, config) if folder.study is not None else names.dataset(config.data)
    line = Line(followed.name, column, config.method, config.seed, state, rounds=config.rounds,
                last=followed.last_row, is_tuning=followed.is_tuning)  # fmt: skip
    if run is None:
        return _Item(line, config, followed)
    return _Item(line._replace(round=followed.rounds, scores=followed.scores), config, followed)


# ---- pace ------------------------------------------------------------------------------------------------


class _Paces:
    """Seconds per round: of a run by its own clocks, or else by those of runs like it."""

    def __init__(self, items: list[_Item]) -> None:
        self._own: dict[str, float] = {}
        groups: dict[tuple[str, ...], list[float]] = {}
        for item in items:
            clocks = item.followed.seconds if item.followed is not None else {}
            latest = [seconds for at, seconds in list(clocks.items())[-LATEST:] if at]
            if latest:
                pace = sum(latest) / len(latest)
                self._own[item.line.name] = pace
                for key in _keys(item.line):
                    groups.setdefault(key, []).append(pace)
        self._means = {key: sum(paces) / len(paces) for key, paces in groups.items()}
        self.known = bool(self._own)

    def __call__(self, item: _Item) -> float:
        known = (self._means[key] for key in _keys(item.line) if key in self._means)
        return self._own.get(item.line.name) or next(known, 0.0) or 1.0


def _keys(line: Line) -> list[tuple[str, ...]]:
    return [(line.column, line.method), (line.column,), ()]


def _process(item: _Item) -> tuple[str, int]:
    """Return what tells training processes apart; runs that do not say it count as one."""
    beat = item.followed.beat if item.followed is not None else None
    return ("", 0) if beat is None else (beat.machine, beat.pid)


def _rate(items: list[_Item]) -> float | None:
    """Return the samples per second over the latest rounds of runs that train together; None if unknown."""
    samples = seconds = 0.0
    for item in items:
        run = item.followed.run if item.followed is not None else None
        if item.followed is None or run is None:
            continue
        counts = {row["round"]: row["samples"] for row in run.rows[-LATEST - 1 :] if _is_count(row.get("samples"))}
        if not counts:
            continue
        first, last = min(counts), max(counts)
        before = counts[first] if first > 1 else 0
        clocks = item.followed.seconds
        spent = [clocks.get(t) for t in range(first + 1 if first > 1 else 1, last + 1)]
        if None not in spent and spent:
            samples += counts[last] - before
            seconds += sum(filter(None, spent))
    return samples / seconds if seconds and samples > 0 else None


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
