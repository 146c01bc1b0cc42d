"""The runs of a study: made on disk, and run to their end, those of one method and shape together.

`run_group` is the only place that knows how runs are run.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fedncv import store
from fedncv.config import RunConfig, differences
from fedncv.data import divide, load, statistics
from fedncv.engine.check import check
from fedncv.engine.choose import common
from fedncv.engine.problem import build
from fedncv.results import STATE, is_run, read_config, read_rows, read_run
from fedncv.simulation import Course, Row, advance_together
from fedncv.study import NEUTRAL, PARTITION, Cell, Study


class Watch(NamedTuple):
    """Who is told what happens."""

    begin: Callable[[list[RunConfig], list[int]], None]  # the runs that go on, and the rounds they already have
    row: Callable[[RunConfig, Row], None]
    end: Callable[[list[RunConfig]], None]  # of those that began together, also where some failed
    say: Callable[[str], None]


def check_study(study: Study) -> None:
    """Raise ValueError before a folder is made."""
    study.check()
    for cell in study.cells():
        check(cell.config)


def prepare(out: Path, cells: list[Cell]) -> list[Path]:
    """The runs that are to go on, with a folder for each; one that holds another config is refused.

    A run that failed is not tried again: it would fail in the same round. Device and engine may have changed
    since a run was begun; it keeps its own.
    """
    left = []
    for folder, config in cells:
        path = out / folder
        if is_run(path):
            found = read_config(path)
            if differing := _differing(found, config):
                raise ValueError(
                    f"{path} holds a run with other settings than the study's ({', '.join(differing)}); "
                    "choose another --out"
                )
            if _is_over(path):
                continue
            if found != config and not (path / STATE).exists():  # not begun: it takes the new device
                store.create(path, config, overwrite=True)
        else:
            store.create(path, config)
        left.append(path)
    return left


def _differing(found: RunConfig, config: RunConfig) -> list[str]:
    differing = differences(found, config, but=NEUTRAL)
    return [f"{name} {theirs!r}, not {ours!r}" for name, (theirs, ours) in differing.items()]


def _is_over(folder: Path) -> bool:
    """Finished or failed. Where rows are damaged it goes on, for a checkpoint may mend them."""
    try:
        return read_run(folder).status != "unfinished"
    except ValueError:
        return False


def run_cells(folders: list[Path], watch: Watch) -> None:
    """Every run to its end, group after group; ValueError at the end for those that cannot be gone on with."""
    refused: list[str] = []
    for group in alike(folders):
        try:
            run_group(group, watch)
        except ValueError as error:
            refused += str(error).splitlines()
    if refused:
        raise ValueError("\n".join(dict.fromkeys(refused)))  # what all lack, such as data, is told once


def run_group(group: list[Path], watch: Watch) -> None:
    """Every run to its end; one that diverges says so, in its metrics too, and does not stop the others.

    Nor does one that cannot be gone on with, as its files are damaged: a ValueError tells at the end.
    """
    courses: list[Course] = []
    refused: list[str] = []
    for folder in group:
        try:
            courses.append(_as_it_was_left(folder, courses, runs=len(group)))
        except ValueError as error:
            refused.append(str(error))
    for together in _at_the_same_round(courses):
        _run_together(together, watch)
    if refused:
        raise ValueError("\n".join(dict.fromkeys(refused)))


def alike(folders: list[Path]) -> list[list[Path]]:
    """What an engine can stack, together: seeds, learning rates and partitions of one method."""
    groups: dict[RunConfig, list[Path]] = {}
    for folder in folders:
        groups.setdefault(common(read_config(folder)), []).append(folder)
    return list(groups.values())


def _as_it_was_left(folder: Path, others: list[Course], *, runs: int) -> Course:
    """The run at its latest checkpoint."""
    problem = build(read_config(folder))
    if others:  # the samples are the same: on the device once
        problem = problem._replace(dataset=others[0].problem.dataset)
    state = store.load_state(folder, problem, runs=runs)
    return Course(problem, state, read_rows(folder), folder)


def _at_the_same_round(courses: list[Course]) -> list[list[Course]]:
    """Those that stand furthest back first.

    Round 0 is where a run stands before the initial model is measured and after it: only the rows tell which.
    """
    groups: dict[tuple[int, int], list[Course]] = {}
    for course in courses:
        groups.setdefault((course.state.round, len(course.rows)), []).append(course)
    return [together for _, together in sorted(groups.items())]


def _run_together(courses: list[Course], watch: Watch) -> None:
    configs = [course.problem.config for course in courses]
    watch.begin(configs, [course.state.round for course in courses])
    try:
        advance_together(courses, on_round=lambda course, row: watch.row(course.problem.config, row))
    except ArithmeticError:
        for course in courses:
            if course.error is not None:
                watch.say(f"{course.folder}: {course.error}")
    watch.end(configs)


def failures(out: Path, cells: list[Cell]) -> list[str]:
    """The runs that failed, with the reason each left in its metrics."""
    runs = [read_run(out / cell.folder) for cell in cells if is_run(out / cell.folder)]
    return [f"{run.folder}: {run.rows[-1]['failed']}" for run in runs if run.status == "failed"]


def write_partition(folder: Path, config: RunConfig) -> None:
    """How many samples of each class each client holds under this seed, beside the runs of the column."""
    path = folder / PARTITION
    if path.exists():
        return
    dataset = load(config.data, config.data_dir or None)
    parts = divide(dataset, config.partition, num_clients=config.clients, seed=config.seed)
    counts = statistics(dataset.labels.numpy(), parts, dataset.num_classes).counts
    words = {"data": config.data, "partition": config.partition, "seed": config.seed, "counts": counts.tolist()}
    folder.mkdir(parents=True, exist_ok=True)
    store.write_atomically(path, json.dumps(words).encode(), name="partition")
