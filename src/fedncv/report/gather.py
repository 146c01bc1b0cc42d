"""Read everything a report needs from a study's folder or from any folder of runs.

Only finished runs are averaged. All others are listed with the reason. Runs of different protocols are an error that
lists the fields that differ.
"""

import json
import math
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from fedncv.config import RunConfig, Settings, read_toml
from fedncv.report import names, paper
from fedncv.results import CONFIG, PERCENT, TIMING, Run, Score, check_folder, read_config, read_runs
from fedncv.study import FILE, NEUTRAL, TUNING, Study, read_study

NO_SEED = -1  # of a run whose config cannot be read
DEPTH = 4  # levels of folders below the given one


class Missing(NamedTuple):
    """A run that is not in the tables."""

    column: str
    method: str
    seed: int
    status: str  # not started, unfinished, failed, unreadable
    reason: str

    @property
    def name(self) -> str:
        return self.method if self.seed == NO_SEED else f"{self.method} seed {self.seed}"


@dataclass(frozen=True, eq=False)  # hashed by identity, so that computed values can be cached
class Column:
    """One dataset, or one dataset at one number of clients or in one variant of the study."""

    name: str
    settings: Settings
    runs: dict[str, list[Run]]  # method -> its finished runs, by seed
    folder: Path | None = None  # the study's folder of this column

    @property
    def data(self) -> str:
        return self.settings.data

    @property
    def clients(self) -> int:
        return self.settings.clients

    @property
    def as_in_paper(self) -> bool:
        """Whether all runs follow the paper's protocol."""
        return all(map(paper.follows, self._all_settings()))

    @property
    def as_in_fig2(self) -> bool:
        """Whether all runs follow the paper's protocol, with any number of clients."""
        return all(map(paper.follows_but_for_size, self._all_settings()))

    def _all_settings(self) -> list[Settings]:
        return [self.settings, *(run.config for runs in self.runs.values() for run in runs)]

    def printed(self, method: str, metric: str) -> paper.Printed | None:
        """Return the paper's value, if the two may be compared."""
        return paper.printed(self.data, method, metric) if self.as_in_paper else None

    @property
    def title(self) -> str:
        where, variant = names.dataset(self.data), self.name.partition("/")[2]
        if variant == f"clients-{self.clients}":
            return f"{where}, {self.clients:,} clients"
        return f"{where}, {variant.replace('-', ' ')}" if variant else where

    def scores(self, metric: str) -> dict[str, dict[int, float]]:
        """Return method -> seed -> final value; a method without one is left out."""
        found: dict[str, dict[int, float]] = {}
        for method, runs in self.runs.items():
            values = {run.config.seed: run.last(metric) for run in runs if run.last(metric) is not None}
            if values:
                found[method] = values
        return found

    def prior(self) -> float | None:
        """Accuracy of the label prior alone, mean over the seeds."""
        priors = {run.config.seed: run.last("label_prior") for runs in self.runs.values() for run in runs}
        known = [prior for prior in priors.values() if prior is not None]
        return sum(known) / len(known) if known else None


class Results(NamedTuple):
    folder: Path
    title: str
    study: Study | None
    made_with: dict[str, str]  # the command and versions, if the study has them
    columns: list[Column]
    methods: list[str]
    missing: list[Missing]
    num_planned: int
    differing: list[str]  # fields that may differ, and do

    @property
    def num_finished(self) -> int:
        return sum(len(runs) for column in self.columns for runs in column.runs.values())

    @property
    def score(self) -> Score:
        """The score to compare; all runs have the same task."""
        scores = (run.score for column in self.columns for runs in column.runs.values() for run in runs)
        return next(scores, PERCENT)

    @property
    def protocol(self) -> RunConfig:
        """The settings that all runs share."""
        finished = (run.config for column in self.columns for runs in column.runs.values() for run in runs)
        planned = (cell.config for cell in (self.study.cells() if self.study else []))
        return next(finished, None) or next(planned)


def gather(folder: Path, *, allow: tuple[str, ...] = ()) -> Results:
    """Read all results. ``allow`` names fields in which the runs of one table may differ."""
    check_folder(folder)
    study = read_study(folder) if (folder / FILE).exists() else None
    paths = _find(folder)
    if not paths and study is None:
        raise ValueError(f"{folder} holds no run (no {CONFIG} in or below it); make some with fedncv run or study")
    runs, unreadable = read_runs(paths)
    if study is not None and (study.tuning is not None or study.lr):
        allow = (*allow, "lr")
    if study is not None and len(study.clients) > 1:
        allow = (*allow, "clients", "per_round")
    if study is not None:
        allow = (*allow, *{name for changes in study.variants.values() for name in changes})
    differing = _check_protocol(folder, runs, allow)
    columns, missing = _columns(folder, study, runs, unreadable)
    if study is None and not any(column.runs for column in columns):
        first = missing[0]
        more = f"; {len(missing) - 1} more are not finished" if len(missing) > 1 else ""
        raise ValueError(
            f"{folder} holds no finished run, but a report needs one: {first.name} is {first.status} "
            f"({first.reason or 'no rounds'}){more}; continue stopped runs with `fedncv resume`"
        )
    for error in unreadable.values():
        print(f"left out: {error}", file=sys.stderr)
    planned = len(study.cells()) if study else len(runs) + len(unreadable)
    listed = list(study.methods) if study else []
    methods = list(dict.fromkeys([*listed, *(method for column in columns for method in column.runs)]))
    title = study.title if study else folder.resolve().name
    made_with = read_toml(folder / FILE).get("made_with", {}) if study else {}
    return Results(folder, title, study, made_with, columns, methods, missing, planned, differing)


def _find(folder: Path) -> list[Path]:
    """Return the folder itself or the runs below it, without tuning runs."""
    found = []
    for depth in range(DEPTH + 1):
        for path in folder.glob("/".join(["*"] * depth + [CONFIG])):
            if TUNING not in path.relative_to(folder).parts[:1]:
                found.append(path.parent)
    return sorted(found)


def _check_protocol(folder: Path, runs: list[Run], allow: tuple[str, ...]) -> list[str]:
    """Return the permitted fields that differ; raise ValueError with those that differ without permission."""
    differing, refused = [], []
    for f in fields(RunConfig):
        if f.name in ("method", "seed", "data", *NEUTRAL):
            continue
        values: dict[Any, Run] = {}
        for run in runs:
            values.setdefault(getattr(run.config, f.name), run)
        if len(values) > 1:
            differing.append(f.name)
            if f.name not in allow:
                examples = [f"{value!r} in {run.folder.relative_to(folder)}" for value, run in list(values.items())[:2]]
                refused.append(f"{f.name} ({', '.join(examples)})")
    if refused:
        raise ValueError(
            f"these runs follow different protocols and cannot share a table: {'; '.join(refused)}; "
            f"report them separately, or permit it with --allow {' '.join(word.split()[0] for word in refused)}"
        )
    return differing


def _columns(
    folder: Path, study: Study | None, runs: list[Run], unreadable: dict[Path, str]
) -> tuple[list[Column], list[Missing]]:
    columns: dict[str, Column] = {}
    if study is not None:
        for name, settings in study.columns().items():
            columns[name] = Column(name, settings, {}, folder / name)
    missing: list[Missing] = []
    seen: set[tuple[str, str, int]] = set()
    for run in runs:
        config = run.config
        name = run.folder.parent.relative_to(folder).as_posix() if study is not None else config.data
        column = columns.setdefault(name, Column(name, config, {}))
        if (name, config.method, config.seed) in seen:
            raise ValueError(f"{run.folder} repeats {config.method} on {name} with seed {config.seed}; remove one")
        seen.add((name, config.method, config.seed))
        if run.status == "finished":
            column.runs.setdefault(config.method, []).append(run)
        else:
            reason = f"round {run.rounds} of {config.rounds}"
            if run.status == "failed":
                reason = f"{run.rows[-1]['failed']} ({reason})"
            status = run.status if run.rows else "not started"
            missing.append(Missing(name, config.method, config.seed, status, reason if run.rows else ""))
    for path, error in unreadable.items():
        missing.append(_unreadable(folder, path, error, study))
        seen.add(missing[-1][:3])
    if study is not None:
        for cell in study.cells():
            key = (str(cell.folder.parent), cell.config.method, cell.config.seed)
            if key not in seen:
                missing.append(Missing(*key, "not started", ""))
    for column in columns.values():
        for group in column.runs.values():
            group.sort(key=lambda run: run.config.seed)
    order = list(study.methods) if study else []
    sort = {method: i for i, method in enumerate(order)}
    ordered = [
        replace(column, runs=dict(sorted(column.runs.items(), key=lambda item: sort.get(item[0], len(sort)))))
        for column in columns.values()
    ]
    return ordered, missing


def _unreadable(folder: Path, path: Path, error: str, study: Study | None) -> Missing:
    """Describe the run by the study's plan or its own config; if that is damaged too, by its folder."""
    for cell in study.cells() if study else []:
        if path == folder / cell.folder:
            return Missing(str(cell.folder.parent), cell.config.method, cell.config.seed, "unreadable", error)
    try:
        config = read_config(path)
    except ValueError:
        return Missing(path.parent.name, path.name, NO_SEED, "unreadable", error)
    return Missing(config.data, config.method, config.seed, "unreadable", error)


def seconds(run: Run) -> float | None:
    """Return the sum of the run's clocks; None if they are lost. Runs that trained together have equal shares."""
    path = run.folder / TIMING
    if not path.exists():
        return None
    total = 0.0
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            total += json.loads(line)["seconds"]
        except (ValueError, KeyError, TypeError):
            return None
    return total if math.isfinite(total) else None


def command(results: Results) -> str:
    """Return the command that repeats these runs."""
    if results.made_with.get("command"):
        return results.made_with["command"]
    config, plain = results.protocol, RunConfig()
    words = ["fedncv run"]
    shared = replace(config, method=plain.method, seed=plain.seed, data_dir="")
    for f in fields(RunConfig):
        if getattr(shared, f.name) != getattr(plain, f.name):
            words.append(f"--{f.name.replace('_', '-')} {getattr(shared, f.name)}")
    seeds = sorted({run.config.seed for c in results.columns for runs in c.runs.values() for run in runs})
    words.append(f"--method {' '.join(results.methods)}")
    words.append(f"--seeds {' '.join(map(str, seeds))}")
    return " ".join(words)
