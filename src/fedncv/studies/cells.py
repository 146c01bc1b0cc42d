"""The runs of a study: made on disk, and run to their end, the seeds of one method together.

`run_cells` is the only place that knows how runs are run.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fedncv import store
from fedncv.config import RunConfig
from fedncv.data import divide, load, statistics
from fedncv.results import STATE, is_run, read_config, read_run
from fedncv.simulate import Row, resume
from fedncv.studies.study import PARTITION, Cell


class Watch(NamedTuple):
    """Who is told what happens."""

    begin: Callable[[list[RunConfig], list[int]], None]  # the runs that go on, and the rounds they already have
    row: Callable[[RunConfig, Row], None]
    say: Callable[[str], None]


def prepare(out: Path, cells: list[Cell]) -> list[Path]:
    """A folder for every cell that has none yet; one with another config is refused, finished ones left out.

    The device and the place of the data may have changed since: they do not change what a run is.
    """
    left = []
    for folder, config in cells:
        path = out / folder
        if is_run(path):
            run = read_run(path)
            same = replace(
                run.config, device=config.device, data_dir=config.data_dir, checkpoint_every=config.checkpoint_every
            )
            if same != config:
                raise ValueError(f"{path} holds a run with other settings than the study's; choose another --out")
            if run.status == "finished":
                continue
            if run.config != config and not (path / STATE).exists():  # not begun: it takes the new device
                store.create(path, config, overwrite=True)
        else:
            store.create(path, config)
        left.append(path)
    return left


def run_cells(folders: list[Path], watch: Watch) -> list[str]:
    """Every run to its end; those that diverged do not stop the others and are returned in words."""
    failures: list[str] = []
    for group in alike(folders):
        failures += _run_group(group, watch)
    return failures


def alike(folders: list[Path]) -> list[list[Path]]:
    """Runs that differ in their seed only, together: what an engine can stack."""
    groups: dict[RunConfig, list[Path]] = {}
    for folder in folders:
        groups.setdefault(replace(read_config(folder), seed=0), []).append(folder)
    return list(groups.values())


def _run_group(folders: list[Path], watch: Watch) -> list[str]:
    failures = []
    for folder in folders:
        config = read_config(folder)
        watch.begin([config], [read_run(folder).rounds])
        try:
            resume(folder, on_round=lambda row, config=config: watch.row(config, row))  # type: ignore[misc]
        except ArithmeticError as error:
            failures.append(f"{folder}: {error}")
            watch.say(failures[-1])
    return failures


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
