"""Create the runs of a study on disk, compare them with the study, and list those that failed."""

import json
from dataclasses import replace
from pathlib import Path

from fedncv import store
from fedncv.config import RunConfig, differences
from fedncv.data import absolute_name, divide, holdings, load
from fedncv.data.owners import grouped
from fedncv.data.unseen import order
from fedncv.engine.check import anchored, check
from fedncv.files import sealed
from fedncv.objects import check_code, code_of
from fedncv.results import STATE, is_run, read_config, read_run
from fedncv.study import NEUTRAL, PARTITION, Cell, Study


def check_study(study: Study) -> None:
    """Raise ValueError if the study or a name in it is wrong, before a folder is made."""
    study.check()
    for cell in study.cells():
        check(cell.config)


def anchored_study(study: Study) -> Study:
    """Check the study, and return it as it works from anywhere: with absolute paths and the folder of own modules."""
    study.check()
    configs = {(cell.config.data, cell.method): cell.config for cell in study.cells()}
    found = [anchored(config).code_dir for config in configs.values()]
    return replace(
        study,
        datasets=tuple(map(absolute_name, study.datasets)),
        settings=replace(
            study.settings, data=absolute_name(study.settings.data), code_dir=next(filter(None, found), "")
        ),
    )


def prepare(out: Path, cells: list[Cell]) -> list[Path]:
    """Return the folders of the runs that have not ended, and create those that are missing.

    Raise ValueError if a folder holds a run with other settings. A failed run is not repeated: it would fail in the
    same round. A run that has started keeps its own device and engine, even if the study's have changed.
    """
    left = []
    for folder, planned, _ in cells:
        path, config = out / folder, replace(planned, code=code_of(planned))
        if is_run(path):
            found = read_config(path)
            if (path / STATE).exists():
                check_code(path, found)
            if differing := _differing(found, config):
                raise ValueError(
                    f"{path} holds a run whose settings differ from the study's ({', '.join(differing)}); "
                    "choose another --out"
                )
            if _is_over(path):
                continue
            if found != config and not (path / STATE).exists():  # not started: it takes the new device
                store.create(path, config, overwrite=True)
        else:
            store.create(path, config)
        left.append(path)
    return left


def _differing(found: RunConfig, config: RunConfig) -> list[str]:
    differing = differences(found, config, but=("code", *NEUTRAL))
    return [f"{name} {theirs!r}, not {ours!r}" for name, (theirs, ours) in differing.items()]


def _is_over(folder: Path) -> bool:
    """Return whether the run finished or failed. With damaged rows it is resumed: a checkpoint may repair them."""
    try:
        return read_run(folder).status != "unfinished"
    except ValueError:
        return False


def failures(out: Path, cells: list[Cell]) -> list[str]:
    """Return the runs that failed, each with the reason from its metrics."""
    runs = [read_run(out / cell.folder) for cell in cells if is_run(out / cell.folder)]
    return [f"{run.folder}: {run.rows[-1]['failed']}" for run in runs if run.status == "failed"]


def write_partition(folder: Path, config: RunConfig) -> None:
    """Write how many samples of each class each client holds with this seed, into the column's folder."""
    path = folder / PARTITION
    if path.exists():
        return
    dataset = load(config.data, config.data_dir or None)
    parts = grouped(divide(dataset, config.partition, num_clients=config.clients, seed=config.seed))
    words = {"data": config.data, "partition": config.partition, "seed": config.seed}
    if config.unseen:
        parts = parts.only(order(config.seed, config.unseen, len(parts)))
        words |= {"unseen": config.unseen}
    words |= holdings(dataset, parts)
    folder.mkdir(parents=True, exist_ok=True)
    store.write_atomically(path, json.dumps(sealed(words)).encode(), name="partition")
