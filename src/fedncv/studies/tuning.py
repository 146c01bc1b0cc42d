"""Fair tuning: the same learning rates for every method, on seeds that are not reported, before the others start."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fedncv.results import LOWER_IS_BETTER, read_run
from fedncv.study import Cell, Study

Run = Callable[[list[Cell]], None]  # runs cells to their end


def tune(study: Study, out: Path, run: Run, save: Callable[[Study], None]) -> Study:
    """Choose every learning rate, save the study and return it. Trials stay on disk, so nothing is tuned twice."""
    open_pairs = study.untuned()
    if not open_pairs:
        return study
    assert study.tuning is not None
    trials = {key: {lr: study.tuning_cells(*key, lr) for lr in study.tuning.grid} for key in open_pairs}
    run([cell for grid in trials.values() for cells in grid.values() for cell in cells])
    chosen = {column: dict(rates) for column, rates in study.lr.items()}
    for (column, method), grid in trials.items():
        scores = {lr: score(out, cells, study.tuning.by) for lr, cells in grid.items()}
        chosen.setdefault(column, {})[method] = choose(scores)
    study = replace(study, lr=chosen)
    save(study)
    return study


def score(out: Path, cells: list[Cell], metric: str) -> float:
    """Return the mean over the tuning seeds at the last round, negative if lower is better; -inf if a seed failed.

    Raise ValueError if a run is unfinished.
    """
    runs = [read_run(out / cell.folder) for cell in cells]
    if any(run.status == "unfinished" for run in runs):
        raise ValueError(f"tuning is not finished: {out / cells[0].folder.parent}; run the same command again")
    values = [run.last(metric) for run in runs]
    if any(run.status == "failed" for run in runs) or None in values:
        return -math.inf
    sign = -1 if metric.partition("_")[2] in LOWER_IS_BETTER else 1
    return sign * math.fsum(values) / len(values)


def choose(scores: dict[float, float]) -> float:
    """Return the learning rate with the best score; the smallest if several are equal or all diverged.

    >>> choose({0.01: 0.5, 0.03: 0.6, 0.1: 0.6})
    0.03
    """
    return max(sorted(scores), key=lambda lr: scores[lr])
