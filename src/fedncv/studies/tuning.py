"""Equal budgets: as many trials for every method, on seeds that are not reported, before the others start.

The trials of a method are ``studies.trials``. They stay in the study's folder as runs, and ``tuning.jsonl`` has a line
for each of them: what was tried, its scores and which one was chosen. Nothing is tuned twice.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedncv import store
from fedncv.results import LOWER_IS_BETTER, is_run, read_run
from fedncv.studies.trials import as_settings, of_study
from fedncv.study import TRIALS, Cell, Study, chosen_by, read_trials

Run = Callable[[list[Cell]], None]  # runs cells to their end
WHEN = ("before", "after")


def tune(study: Study, out: Path, run: Run, save: Callable[[Study], None]) -> Study:
    """Choose the settings of every method, save the study and return it."""
    if not study.untuned():
        return study
    assert study.tuning is not None
    run(trial_cells(study))
    rates = {column: dict(each) for column, each in study.lr.items()}
    others = {column: dict(each) for column, each in study.tuned.items()}
    for column, method in study.untuned():
        source, by = study.source(column), chosen_by(column, study.tuning)
        values = of_study(study, source, method)
        cells = {name: cells_of(study, source, method)[name] for name in values}
        if study.tuning.trials:
            best = first_best({name: score_by(out, each, by) for name, each in cells.items()})
        else:
            scores = {values[name]["lr"]: score_by(out, each, by) for name, each in cells.items()}
            best = f"lr-{choose(scores):g}"
        chosen = as_settings(method, values[best])
        rates.setdefault(column, {})[method] = chosen.pop("lr")
        if chosen:
            others.setdefault(column, {})[method] = chosen
    study = replace(study, lr=rates, tuned=others)
    write_trials(study, out)
    save(study)
    return study


def trial_cells(study: Study) -> list[Cell]:
    """Return the runs of all trials that decide what is not chosen yet."""
    pairs = study.to_try()
    return [cell for key in pairs for cells in cells_of(study, *key).values() for cell in cells]


def cells_of(study: Study, column: str, method: str) -> dict[str, list[Cell]]:
    """Return folder -> the runs of each trial of a method in a column."""
    return {
        name: study.tuning_cells(column, method, as_settings(method, values), name)
        for name, values in of_study(study, column, method).items()
    }


def score_by(out: Path, cells: list[Cell], by: str) -> float:
    """Return the score of a trial: a metric's, or for "mean" the mean of before and after."""
    if by != "mean":
        return score(out, cells, by)
    return math.fsum(score(out, cells, metric) for metric in WHEN) / len(WHEN)


def score(out: Path, cells: list[Cell], metric: str) -> float:
    """Return the mean over the tuning seeds at the last round, negative if lower is better; -inf if a seed failed.

    Raise ValueError if a run is unfinished, or will never finish.
    """
    runs = [read_run(out / cell.folder) for cell in cells]
    for run in runs:
        if run.status == "unfinished" and run.stopped:
            raise ValueError(
                f"tuning needs the score of {run.folder} after its last round, but it stopped after round {run.rounds} "
                f"of {run.config.rounds}: {run.stopped}; change its method, or tune with fewer rounds"
            )
    if any(run.status == "unfinished" for run in runs):
        raise ValueError(f"tuning is not finished: {out / cells[0].folder.parent}; run the same command again")
    values = [run.last(metric) for run in runs]
    if any(run.status == "failed" for run in runs) or None in values:
        return -math.inf
    sign = -1 if metric.partition("_")[2] in LOWER_IS_BETTER else 1
    return sign * math.fsum(values) / len(values)


def choose(scores: Mapping[float, float]) -> float:
    """Return the learning rate with the best score; the smallest if several are equal or all diverged.

    >>> choose({0.01: 0.5, 0.03: 0.6, 0.1: 0.6})
    0.03
    """
    return max(sorted(scores), key=lambda lr: scores[lr])


def first_best(scores: Mapping[str, float]) -> str:
    """Return the trial with the best score; the first if several are equal, so the defaults if nothing is better."""
    return max(scores, key=lambda name: scores[name])


# ---- tuning.jsonl ----------------------------------------------------------------------------------------


def write_trials(study: Study, out: Path) -> None:
    """Write a line for every trial; those whose runs are no longer on disk keep the line that they had."""
    kept = {_key(row): row for row in read_trials(out)} | {_key(row): row for row in rows(study, out)}
    lines = [json.dumps(row) + "\n" for row in kept.values()]
    store.write_atomically(out / TRIALS, "".join(lines).encode(), name="trials")


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["column"], row["method"], row["trial"]


def rows(study: Study, out: Path) -> list[dict[str, Any]]:
    """Return what was tried for every method and column, and which columns took it."""
    assert study.tuning is not None
    found = []
    pairs = dict.fromkeys((study.source(column), method) for column in study.columns() for method in study.methods)
    for column, method in pairs:
        values, cells = of_study(study, column, method), cells_of(study, column, method)
        for name, each in cells.items():
            if not all(is_run(out / cell.folder) for cell in each):
                continue
            scores = {metric: score(out, each, metric) for metric in WHEN}
            taken = [
                other
                for other in study.columns()
                if study.source(other) == column and study.chosen(other, method) == as_settings(method, values[name])
            ]
            row = {"column": column, "method": method, "trial": name, "rounds": each[0].config.rounds}
            row |= {"seeds": [cell.config.seed for cell in each], "values": values[name]}
            row |= {metric: value if math.isfinite(value) else None for metric, value in scores.items()}
            found.append(row | {"chosen_for": taken})
    return found
