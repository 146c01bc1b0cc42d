"""Read everything a report needs from a study's folder, from any folder of runs, or from several of them.

Only finished runs are averaged. All others are listed with the reason. Runs of one folder that follow different
protocols are an error that lists the fields that differ. Several folders may differ: a method that they ran with
different settings is shown once for each folder, and different data or partitions are columns of their own.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from fedncv.config import RunConfig, Settings, changed_code, named, read_toml
from fedncv.figures import APART
from fedncv.files import records
from fedncv.report import names, paper
from fedncv.results import (
    CONFIG,
    PERCENT,
    TIMING,
    UNSEEN,
    Run,
    Score,
    check_folder,
    code_words,
    read_config,
    read_runs,
    samples_of,
)
from fedncv.study import FILE, NEUTRAL, TUNING, Study, read_study

NO_SEED = -1  # of a run whose config cannot be read
WHEN = ("before", "after")
DEPTH = 4  # levels of folders below the given one
# Settings that decide which samples a client trains and is tested on: runs that differ in them share no column.
PROBLEM = (*(name for name in named("samples") if name not in NEUTRAL), "stream", "clients", "unseen", "task")


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
    where: str = ""  # the dataset's name on the page
    apart: str = ""  # the folders, if another column has the same name
    begun: dict[str, list[Run]] = field(default_factory=dict)  # method -> unfinished runs, if they are to be shown

    @property
    def data(self) -> str:
        return self.settings.data

    @property
    def clients(self) -> int:
        return self.settings.clients

    @property
    def by(self) -> str:
        """The score that tuning chose the settings of this column by, if another column has those of the other one."""
        return next((metric for metric in WHEN if self.name.endswith(f"/by-{metric}")), "")

    @property
    def shown(self) -> tuple[str, ...]:
        """The scores in the table: both, or the one that its settings were chosen by; and those of unseen clients."""
        plain = (self.by,) if self.by else WHEN
        unseen = any(run.last(f"{UNSEEN}{plain[0]}") is not None for runs in self.runs.values() for run in runs)
        return (*plain, *(f"{UNSEEN}{metric}" for metric in plain if unseen))

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
        name = self.name.partition(APART)[0]
        variant = "" if name == self.data else name.partition("/")[2]  # a path in the data's text is none
        if variant == f"clients-{self.clients}":
            variant = f"{self.clients:,} clients"
        variant = variant.replace("by-", "/tuned for ") if self.by else variant.replace("-", " ")
        words = ", ".join([self.where or names.dataset(self.data), *filter(None, variant.split("/"))])
        return f"{words} ({self.apart})" if self.apart else words

    def scores(self, metric: str) -> dict[str, dict[int, float]]:
        """Return method -> seed -> final value; a method without one is left out."""
        found: dict[str, dict[int, float]] = {}
        for method, runs in self.runs.items():
            values = {run.config.seed: run.last(metric) for run in runs if run.last(metric) is not None}
            if values:
                found[method] = values
        return found

    @property
    def sampled(self) -> str:
        """How many clients were scored, in words; empty if all were."""
        return samples_of([run for runs in self.runs.values() for run in runs])

    def prior(self, metric: str = "before") -> float | None:
        """Accuracy of the label prior alone, mean over the seeds; None after local training, as it does not train."""
        name = {"before": "label_prior", f"{UNSEEN}before": f"{UNSEEN}label_prior"}.get(metric, "")
        priors = {run.config.seed: run.last(name) for runs in self.runs.values() for run in runs}
        known = [prior for prior in priors.values() if prior is not None]
        return sum(known) / len(known) if known else None


class Source(NamedTuple):
    """One folder that a report is made from."""

    folder: Path
    label: str  # its shortest name that no other source has
    study: Study | None
    made_with: dict[str, str]  # the command and versions, if the study has them
    runs: list[Run]  # also unfinished ones


class Results(NamedTuple):
    folder: Path  # where the page is
    title: str
    sources: list[Source]
    columns: list[Column]
    methods: list[str]
    missing: list[Missing]
    num_planned: int
    differing: list[str]  # fields that may differ, and do
    apart: list[str]  # the settings in which several folders differ, in words
    ids: dict[str, str]  # the text of a method -> its name in this report

    @property
    def study(self) -> Study | None:
        """The study, if the report is about one folder."""
        return self.sources[0].study if len(self.sources) == 1 else None

    @property
    def is_of_paper(self) -> bool:
        """Whether this is a table or a figure of the paper, with any of its datasets."""
        return self.study is not None and paper.is_of(self.study.name, self.study.datasets)

    @property
    def num_finished(self) -> int:
        return len(self.finished)

    @property
    def finished(self) -> list[Run]:
        return [run for column in self.columns for runs in column.runs.values() for run in runs]

    @property
    def score(self) -> Score:
        """The score to compare; all runs have the same one."""
        begun = (run for column in self.columns for runs in column.begun.values() for run in runs)
        return next((run.score for run in (*self.finished, *begun)), PERCENT)

    @property
    def protocol(self) -> RunConfig:
        """The settings that all runs share."""
        planned = (cell.config for source in self.sources if source.study for cell in source.study.cells())
        begun = (run.config for source in self.sources for run in source.runs)
        return next((run.config for run in self.finished), None) or next(iter((*planned, *begun)))

    @property
    def focus(self) -> str:
        """The method that the page is about: the only one of the user's own, or else FedNCV; empty if it is absent."""
        own = [method for method in self.methods if not names.is_listed(method.partition(APART)[0])]
        ours = names.OURS if names.OURS in self.methods else ""
        return own[0] if len(own) == 1 else ours


class Given(NamedTuple):
    """What a folder holds."""

    study: Study | None
    made_with: dict[str, str]
    runs: list[Run]
    unreadable: dict[Path, str]


def on_disk(folder: Path) -> Given:
    """Read the study and all runs of a folder. Raise ValueError if it has neither."""
    study = read_study(folder) if (folder / FILE).exists() else None
    paths = _find(folder)
    if not paths and study is None:
        raise ValueError(f"{folder} holds no run (no {CONFIG} in or below it); make some with fedncv run or study")
    made_with = read_toml(folder / FILE).get("made_with", {}) if study else {}
    return Given(study, made_with, *read_runs(paths))


class Read(NamedTuple):
    """The content of one folder."""

    source: Source
    columns: list[Column]
    missing: list[Missing]
    num_planned: int


def gather(
    *folders: Path,
    allow: tuple[str, ...] = (),
    out: Path | None = None,
    given: Callable[[Path], Given] = on_disk,
    is_live: bool = False,
) -> Results:
    """Read all results. ``allow`` names fields in which the runs of one folder may differ.

    ``given`` returns what a folder holds. ``is_live``: no run needs to be finished, and columns have those that have
    begun as well.
    """
    for folder in folders:
        check_folder(folder)
    places = [folder.resolve() for folder in folders]
    for folder, place in zip(folders, places, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"{folder} is named twice; name every folder once")
    found = [
        _read(folder, label, allow, given(folder), is_live)
        for folder, label in zip(folders, _labels(folders), strict=True)
    ]
    _check_scores(found)
    ids = names.short([method for read in found for method in _methods(read)])
    columns, missing = join([_renamed(read, ids) for read in found])
    listed = [ids[method] for read in found for method in _methods(read)]
    shown = list(dict.fromkeys([*(m for c in columns for m in c.runs), *(m.method for m in missing if m.seed >= 0)]))
    each = [[m for m in shown if m.partition(APART)[0] == method] or [method] for method in dict.fromkeys(listed)]
    return Results(
        folder=out or folders[0],
        title=_title(found),
        sources=[read.source for read in found],
        columns=_titled(columns),
        methods=[method for group in each for method in group],
        missing=missing,
        num_planned=sum(read.num_planned for read in found),
        differing=_differing([run for read in found for run in read.source.runs]),
        apart=_apart([read.source for read in found]),
        ids=ids,
    )


def _read(folder: Path, label: str, allow: tuple[str, ...], given: Given, is_live: bool) -> Read:
    study, made_with, runs, unreadable = given
    if study is not None:
        runs = _as_planned(folder, study, runs)
    if study is not None and (study.tuning is not None or study.lr):
        allow = (*allow, "lr", *{name for each in study.tuned.values() for chosen in each.values() for name in chosen})
    if study is not None and len(study.clients) > 1:
        allow = (*allow, "clients", "per_round")
    if study is not None:
        allow = (*allow, *{name for changes in study.variants.values() for name in changes})
    _check_protocol(folder, runs, allow)
    columns, missing = _columns(folder, study, runs, unreadable, is_live)
    if study is None and not is_live and not any(column.runs for column in columns):
        first = missing[0]
        more = f"; {len(missing) - 1} more are not finished" if len(missing) > 1 else ""
        raise ValueError(
            f"{folder} holds no finished run, but a report needs one: {first.name} is {first.status} "
            f"({first.reason or 'no rounds'}){more}; continue stopped runs with `fedncv resume`"
        )
    for error in unreadable.values() if not is_live else ():
        print(f"left out: {error}", file=sys.stderr)
    planned = len(study.cells()) if study else len(runs) + len(unreadable)
    return Read(Source(folder, label, study, made_with, runs), columns, missing, planned)


def _as_planned(folder: Path, study: Study, runs: list[Run]) -> list[Run]:
    """Return the runs with their methods as the study names them, without the knobs that tuning chose."""
    planned = {folder / cell.folder: cell for cell in study.cells()}

    def named(run: Run) -> Run:
        cell = planned.get(run.folder)
        is_it = cell is not None and cell.config.method == run.config.method != cell.method
        return run._replace(config=replace(run.config, method=cell.method)) if cell and is_it else run

    return list(map(named, runs))


def _methods(read: Read) -> list[str]:
    """Return the texts of the folder's methods, planned ones first."""
    planned = read.source.study.methods if read.source.study else ()
    return list(dict.fromkeys([*planned, *(run.config.method for run in read.source.runs)]))


def _labels(folders: tuple[Path, ...]) -> list[str]:
    """Return the name of each folder, or its path where two have one name."""
    last = [folder.resolve().name for folder in folders]
    return [name if last.count(name) == 1 else str(folder) for folder, name in zip(folders, last, strict=True)]


def _title(found: list[Read]) -> str:
    """Return the study's title where it is true: those of the paper are about its datasets."""
    if len(found) > 1:
        return ", ".join(read.source.label for read in found)
    ((source, columns, *_),) = found
    study = source.study
    if study is None:
        return source.folder.resolve().name
    if all(data in names.DATASETS for data in study.datasets):
        return paper.title(study.title, study.datasets)
    return f"{source.folder.resolve().name}: {', '.join(dict.fromkeys(column.title for column in _titled(columns)))}"


def _titled(columns: list[Column]) -> list[Column]:
    shown = names.datasets([column.data for column in columns])
    return [replace(column, where=shown[column.data]) for column in columns]


def _find(folder: Path) -> list[Path]:
    """Return the folder itself or the runs below it, without tuning runs."""
    found = []
    for depth in range(DEPTH + 1):
        for path in folder.glob("/".join(["*"] * depth + [CONFIG])):
            if TUNING not in path.relative_to(folder).parts[:1]:
                found.append(path.parent)
    return sorted(found)


def _check_protocol(folder: Path, runs: list[Run], allow: tuple[str, ...]) -> None:
    """Raise ValueError with the fields that differ without permission."""
    _check_sample(runs)
    refused = []
    code = changed_code(run.config for run in runs)
    for name in _differing(runs):
        if name not in allow:
            values: dict[Any, Run] = {}
            for run in runs:
                value = getattr(run.config, name) if name != "code" else code_words(run.config, code[:1])
                if value != "" or name != "code":  # it names none of the functions
                    values.setdefault(value, run)
            examples = [f"{value!r} in {run.folder.relative_to(folder)}" for value, run in list(values.items())[:2]]
            refused.append(f"{name} ({', '.join(examples)})")
    if refused:
        raise ValueError(
            f"these runs follow different protocols and cannot share a table: {'; '.join(refused)}; "
            f"report them separately, or permit it with --allow {' '.join(word.split()[0] for word in refused)}"
        )


def _differing(runs: list[Run]) -> list[str]:
    """Return the settings that change the numbers and are not the same in all runs; several datasets are columns."""
    compared = [f.name for f in fields(RunConfig) if f.name not in ("method", "seed", "data", "code", *NEUTRAL)]
    found = [name for name in compared if len({_value(run.config, name) for run in runs}) > 1]
    return found + ["code"] * bool(changed_code(run.config for run in runs))


def _value(config: RunConfig, name: str) -> Any:
    """Return a setting for comparison: a sample of at least all clients is all of them."""
    value = getattr(config, name)
    return 0 if name == "eval_clients" and value >= config.clients else value


def _check_sample(runs: list[Run]) -> None:
    """Raise ValueError if runs were scored on other clients, so that their scores do not compare."""
    sizes = {_value(run.config, "eval_clients"): run.folder for run in runs}
    if len(sizes) > 1:
        words = ", ".join(f"{f'{size:,}' if size else 'all'} in {folder}" for size, folder in sorted(sizes.items()))
        raise ValueError(f"these runs scored different numbers of clients ({words}); report them separately")


def _apart(sources: list[Source]) -> list[str]:
    """Return in words the settings in which the sources differ: "rounds: 20 in a, 40 in b"."""
    said = []
    for name in ["data", *_differing([run for source in sources for run in source.runs])]:
        values = [dict.fromkeys(str(getattr(run.config, name)) for run in source.runs) for source in sources]
        if any(set(each) != set(values[0]) for each in values):
            words = [f"{', '.join(v) or 'none'} in {s.label}" for v, s in zip(values, sources, strict=True)]
            said.append(f"{name}: {'; '.join(words)}")
    return said


def _check_scores(found: list[Read]) -> None:
    """Raise ValueError if the folders measure different scores, which cannot share a table."""
    _check_sample([run for read in found for run in read.source.runs])
    scores = {run.score.name: read.source.label for read in found for run in read.source.runs if run.rows}
    if len(scores) > 1:
        words = ", ".join(f"{name} in {label}" for name, label in scores.items())
        raise ValueError(f"these runs measure different scores ({words}); report them separately")


def _columns(
    folder: Path, study: Study | None, runs: list[Run], unreadable: dict[Path, str], is_live: bool
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
            if is_live and run.rows:
                column.begun.setdefault(config.method, []).append(run)
            reason = f"round {run.rounds} of {config.rounds}"
            if run.status == "failed":
                reason = f"{run.rows[-1]['failed']} ({reason})"
            elif run.stopped:
                reason += f", {run.stopped}"
            status = run.status if run.rows else "not started"
            missing.append(Missing(name, config.method, config.seed, status, reason if run.rows else ""))
    for path, error in unreadable.items():
        missing.append(_unreadable(folder, path, error, study))
        seen.add(missing[-1][:3])
    if study is not None:
        for cell in study.cells():
            key = (str(cell.folder.parent), cell.method, cell.config.seed)
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
            return Missing(str(cell.folder.parent), cell.method, cell.config.seed, "unreadable", error)
    try:
        config = read_config(path)
    except ValueError:
        return Missing(path.parent.name, path.name, NO_SEED, "unreadable", error)
    return Missing(config.data, config.method, config.seed, "unreadable", error)


# ---- several folders -----------------------------------------------------------------------------------


def _renamed(read: Read, ids: dict[str, str]) -> Read:
    """Return the folder with short names of the methods."""

    def by_id(runs: dict[str, list[Run]]) -> dict[str, list[Run]]:
        return {ids[method]: each for method, each in runs.items()}

    columns = [replace(column, runs=by_id(column.runs), begun=by_id(column.begun)) for column in read.columns]
    missing = [each._replace(method=ids.get(each.method, each.method)) for each in read.missing]
    return read._replace(columns=columns, missing=missing)


def join(found: list[Read]) -> tuple[list[Column], list[Missing]]:
    """Return the columns and the missing runs of all folders.

    Columns of one name are one column if their clients hold the same samples. In it, a method that two folders ran
    with equal settings is one method; equal runs count once. With other settings, or other numbers for a seed, it is
    a method of its own for each folder.
    """
    if len(found) == 1:
        return found[0].columns, found[0].missing
    groups: dict[tuple[Any, ...], list[tuple[Read, Column]]] = {}
    for read in found:
        for column in read.columns:
            problem = tuple(getattr(column.settings, name) for name in PROBLEM)
            groups.setdefault((column.name, *problem), []).append((read, column))
    columns, missing = [], []
    for (name, *_), group in groups.items():
        twice = sum(other == name for other, *_ in groups) > 1
        labels = ", ".join(read.source.label for read, _ in group)
        new = f"{name}{APART}{labels}" if twice else name
        runs, renamed = _pooled(group)
        first = group[0][1]
        columns.append(replace(first, name=new, runs=runs, apart=labels if twice else ""))
        for read, column in group:
            absent = [each for each in read.missing if each.column == column.name]
            missing += [
                each._replace(column=new, method=renamed.get((read.source.label, each.method), each.method))
                for each in absent
            ]
    placed = {(id(read), column.name) for group in groups.values() for read, column in group}
    lost = [each for read in found for each in read.missing if (id(read), each.column) not in placed]
    return columns, missing + lost


def _pooled(group: list[tuple[Read, Column]]) -> tuple[dict[str, list[Run]], dict[tuple[str, str], str]]:
    """Return the runs of one column by method, and (folder, method) -> the name of a method that is told apart."""
    pooled: dict[str, list[Run]] = {}
    renamed: dict[tuple[str, str], str] = {}
    for method in dict.fromkeys(method for _, column in group for method in column.runs):
        theirs = {read.source.label: column.runs[method] for read, column in group if method in column.runs}
        if _agree([run for runs in theirs.values() for run in runs]):
            once = {run.config.seed: run for runs in reversed(theirs.values()) for run in runs}
            pooled[method] = [once[seed] for seed in sorted(once)]
            continue
        for label, runs in theirs.items():
            renamed[label, method] = f"{method}{APART}{label}"
            pooled[renamed[label, method]] = runs
    return pooled, renamed


def same_protocol(runs: list[Run]) -> bool:
    """Return whether the runs have equal settings, but for the seed, the method's name and the machine."""
    return not _differing(runs)


def _agree(runs: list[Run]) -> bool:
    """Return whether the runs are seeds of one method with equal settings, and equal if they have one seed."""
    rows = {run.config.seed: run.rows for run in runs}
    return not _differing(runs) and all(run.rows == rows[run.config.seed] for run in runs)


# ---- clocks --------------------------------------------------------------------------------------------


def seconds(run: Run) -> float | None:
    """Return the sum of the run's clocks; None if one is lost. Runs that trained together have equal shares."""
    rows = records(run.folder / TIMING) or []
    clocks = [row.get("seconds") for row in rows]
    if {row["round"] for row in run.rows if "failed" not in row} - {
        row.get("round") for row in rows if type(row.get("round")) is int
    }:
        return None
    total = sum(clock if isinstance(clock, int | float) else math.nan for clock in clocks)
    return total if clocks and math.isfinite(total) else None
