"""Estimate the cost of a study before it starts: runs, samples, bytes, and time from a short calibration."""

import heapq
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fedncv.config import RunConfig
from fedncv.data import DATASETS, load
from fedncv.engine.arithmetic import arithmetic
from fedncv.engine.choose import common, engine_for
from fedncv.engine.problem import State, build, start
from fedncv.engine.protocol import Engine
from fedncv.engine.sequential import one_thread
from fedncv.results import is_run, read_run
from fedncv.study import TUNING, Cell

USUAL = 50_000  # assumed samples of a dataset that cannot be loaded here


class Cost(NamedTuple):
    """Cost of one run; None if it is unknown."""

    samples: float  # expected; the exact number depends on the draw of clients
    bytes: float | None
    seconds: float | None


Line = tuple[str, str, int, Cost, str]  # column, method, runs, cost of one, why something is unknown


def expected_samples(config: RunConfig) -> float:
    """Return rounds · clients drawn · epochs · mean training samples of a client, for uniform draws without dropout."""
    samples = _num_samples(config) * (1 - config.test_share)
    return config.rounds * config.per_round * config.epochs * samples / config.clients


def measured_samples(config: RunConfig) -> float:
    """Return the samples trained on only to measure "after": every client once each time, not counted as work."""
    times = 1 + (max(0, config.rounds - 1) // config.after_every if config.after_every else 0)
    return times * config.epochs * _num_samples(config) * (1 - config.test_share)


def _num_samples(config: RunConfig) -> int:
    """Return the number of samples of a dataset; ``USUAL`` if it is neither listed nor can be loaded."""
    if config.data in DATASETS:
        return DATASETS[config.data].num_images
    return _count(config.data, config.data_dir)


@cache
def _count(data: str, data_dir: str) -> int:
    try:
        return len(load(data, data_dir or None).y)
    except (ValueError, OSError):
        return USUAL


def calibrate(configs: list[RunConfig]) -> Cost:
    """Return the cost of one of these runs, which differ only in the seed, from one round of all of them together.

    Time grows with the samples trained, including those for "after"; other measurements come on top.
    """
    problems = [build(config) for config in configs]
    problems = [problem.sharing(problems[0]) for problem in problems]
    with one_thread(), arithmetic(configs[0]):
        engine = engine_for(problems)
        try:
            states, _ = _round(engine, [start(problem) for problem in problems])  # the first one also warms up
            began = time.perf_counter()
            again, rows = _round(engine, states)
            seconds = time.perf_counter() - began
        finally:
            engine.close()
    before, after = (sum(state.totals.samples for state in each) for each in (states, again))
    total = expected_samples(configs[0])
    traffic = sum(row["bytes_down"] + row["bytes_up"] for row in rows) / len(rows) / again[0].round
    each = seconds / max(1, after - before)
    return Cost(total, traffic * configs[0].rounds, each * (total + measured_samples(configs[0])))


def _round(engine: Engine, states: list[State]) -> tuple[list[State], list[dict[str, Any]]]:
    done = []
    for outcome in engine.run_rounds(states):
        if isinstance(outcome, ArithmeticError):
            raise outcome
        done.append(outcome)
    return [state for state, _ in done], [row for _, row in done]


def _why_absent(config: RunConfig) -> str:
    """Return why the dataset cannot be loaded, or an empty text; called once per dataset."""
    try:
        load(config.data, config.data_dir or None)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def _alike(cells: list[Cell]) -> list[list[Cell]]:
    """Group the runs of one method whose rounds cost the same, whatever values tuning tries."""
    groups: dict[RunConfig, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(_kind(cell.config, cell.method), []).append(cell)
    return list(groups.values())


def _kind(config: RunConfig, method: str) -> RunConfig:
    """Return the config without what does not change the cost of a run much."""
    return replace(
        config, method=method, seed=0, lr=1.0, weight_decay=0.0, eval_every=0, after_every=0, probe="",
    )  # fmt: skip


def costs(cells: list[Cell]) -> list[Line]:
    """Return (column, method, runs, cost of one, why something is unknown) for each column and method.

    Tuning runs count for the column they tune, in a line of their own if they have another number of rounds. One round
    of the method as the study names it is measured, its seeds together.
    """
    groups = _alike(cells)
    whys = {config.data: _why_absent(config) for config in {cell.config.data: cell.config for cell in cells}.values()}
    lines = []
    for first, *others in groups:
        config, why = replace(first.config, method=first.method), whys[first.config.data]
        seeds = dict.fromkeys(
            cell.config.seed for cell in (first, *others) if cell.folder.parent == first.folder.parent
        )
        cost = Cost(expected_samples(config), None, None)
        try:
            if not why:
                cost = calibrate([replace(config, seed=seed) for seed in seeds])
        except (ValueError, ArithmeticError, OSError) as error:  # no GPU here, no memory for it, diverged
            why = str(error)
        where = first.folder.parent.parent if first.folder.parts[0] == TUNING else first.folder.parent
        lines.append((where.as_posix(), first.method, 1 + len(others), cost, why))
    return lines


def seconds_of(cells: list[Cell], lines: list[Line]) -> dict[Path, float | None]:
    """Return the expected seconds of each of the runs that ``costs`` was asked about."""
    pairs = zip(_alike(cells), lines, strict=True)
    return {cell.folder: line[3].seconds for group, line in pairs for cell in group}


def time_on(slots: int, cells: list[Cell], seconds: dict[Path, float | None], out: Path) -> float | None:
    """Return the seconds that the rounds left take on so many slots, a group on each; None if a time is unknown."""
    groups: dict[RunConfig, float] = {}
    for cell in cells:
        each, path = seconds[cell.folder], out / cell.folder
        if each is None:
            return None
        done = read_run(path).rounds if is_run(path) else 0
        share = 1 - done / cell.config.rounds if cell.config.rounds else 0.0
        groups[common(cell.config)] = groups.get(common(cell.config), 0.0) + each * share
    return makespan(list(groups.values()), slots)


def makespan(seconds: list[float], slots: int) -> float:
    """Return when the last of these is done, if the longest begin first, each on the slot that is free first.

    >>> makespan([3.0, 3.0, 2.0, 2.0, 2.0], 2)
    7.0
    """
    ends = [0.0] * slots
    for each in sorted(seconds, reverse=True):
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)
