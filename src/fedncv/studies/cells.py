"""The runs of a study on disk: made, compared with the study, and asked what became of them."""

import json
from pathlib import Path

from fedncv import store
from fedncv.config import RunConfig, differences
from fedncv.data import divide, load, statistics
from fedncv.engine.check import check
from fedncv.results import STATE, is_run, read_config, read_run
from fedncv.study import NEUTRAL, PARTITION, Cell, Study


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
