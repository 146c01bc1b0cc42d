"""A study: settings × columns × methods × seeds, and the file that describes it.

A study is a folder of runs, `<out>/<column>/<method>-seed<k>`, with `study.toml` at its root. The file holds all
settings, so that the same command resumes the study and a reader can repeat it. A column of its table is a dataset,
or a dataset with one number of clients or one variant of the settings, if the study varies those.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from fedncv.config import RunConfig, Settings, differences, from_dict, named, read_toml
from fedncv.files import parse
from fedncv.spec import nearest, short_name

FILE = "study.toml"
TUNING = "tuning"  # the folder of the tuning runs, beside the columns
TRIALS = "tuning.jsonl"  # a line for every trial: what was tried, its scores, and for which columns it was chosen
PARTITION = "partition.json"  # in a column's folder: the clients' samples per class, for the report

SEVERAL = {"datasets": str, "methods": str, "seeds": int, "clients": int}  # fields that are lists, and of which type
NEUTRAL = named("machine", "measurement")  # settings that do not change the numbers of a run


BY = ("before", "after", "mean", "each")  # what tuning may choose by
EACH = ("before", "after")  # with "each": a column for what is best before local training, and one for after it


class Tuning(NamedTuple):
    """Runs that choose settings: as many for every method, on seeds that are not reported."""

    grid: tuple[float, ...] = (0.01, 0.03, 0.1)  # without trials: learning rates, all else as the method is named
    seeds: tuple[int, ...] = (1000, 1001)
    by: str = "before"  # the metric whose mean at the last round decides, "mean" of before and after, or "each"
    trials: int = 0  # random settings from the method's space (``studies.trials``), for every method; 0: the grid
    rounds: int = 0  # of a trial; 0: as many as the study has
    on: tuple[str, ...] = ()  # COLUMN=OTHER: this column takes what was tuned on the other one; OTHER: all columns do

    @property
    def names(self) -> list[str]:
        """The folders of one method's trials."""
        return [f"trial-{k}" for k in range(1, self.trials + 1)] if self.trials else [f"lr-{lr:g}" for lr in self.grid]


class Cell(NamedTuple):
    folder: Path  # relative to the study's folder
    config: RunConfig
    planned: str = ""  # the method as the study names it; its config may have knobs that tuning chose

    @property
    def method(self) -> str:
        return self.planned or self.config.method


@dataclass(frozen=True, kw_only=True)
class Study:
    name: str
    title: str
    settings: Settings
    datasets: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    clients: tuple[int, ...] = ()
    """Each of several numbers of clients is a column; the clients drawn per round grow in proportion."""
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> the settings it changes. Each variant is a column, in place of the plain settings."""
    tuning: Tuning | None = None
    lr: dict[str, dict[str, float]] = field(default_factory=dict)
    """column -> method -> learning rate chosen by tuning; without one, the learning rate of the settings holds."""
    tuned: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """column -> method -> other settings chosen by tuning: the method with its knobs, weight_decay."""
    num_seeds: dict[str, int] = field(default_factory=dict)
    """dataset -> number of its seeds, the first of ``seeds``; a dataset that is not named has all."""
    transfers: dict[str, str] = field(default_factory=dict)
    """dataset -> the dataset whose tuned settings it takes by default; not in study.toml, where ``Tuning.on`` is."""

    def columns(self) -> dict[str, Settings]:
        """Return the settings of each column, by the name of its folder."""
        found: dict[str, Settings] = {}
        for data in self.datasets:
            plain, folder = replace(self.settings, data=data), data_folder_name(data)
            found |= {f"{folder}/{name}": replace(plain, **changes) for name, changes in self.variants.items()}
            if len(self.clients) <= 1 and not self.variants:
                found[folder] = plain
            if len(self.clients) <= 1:
                continue
            for clients in self.clients:
                drawn = max(1, round(plain.per_round * clients / plain.clients))
                found[f"{folder}/clients-{clients}"] = replace(plain, clients=clients, per_round=min(drawn, clients))
        if self.tuning is not None and self.tuning.by == "each":
            return {f"{column}/by-{metric}": each for column, each in found.items() for metric in EACH}
        return found

    def trial_columns(self) -> dict[str, Settings]:
        """Return the settings of each column that trials can be of; with "each", two columns have the same trials."""
        return {column_of_trials(name): each for name, each in self.columns().items()}

    def cells(self) -> list[Cell]:
        """Return every reported run, with the seeds of one method together."""
        return [
            _cell(Path(column), settings, method, seed, self.chosen(column, method))
            for column, settings in self.columns().items()
            for method in self.methods
            for seed in self.seeds_of(settings.data)
        ]

    def seeds_of(self, data: str) -> tuple[int, ...]:
        return self.seeds[: self.num_seeds.get(data, len(self.seeds))]

    def chosen(self, column: str, method: str) -> dict[str, Any]:
        """Return the settings that tuning chose for the method; empty if it chose none."""
        rate = self.lr.get(column, {}).get(method)
        return ({} if rate is None else {"lr": rate}) | self.tuned.get(column, {}).get(method, {})

    def source(self, column: str) -> str:
        """Return the column whose trials decide the settings of this one: itself, unless ``Tuning.on`` says another."""
        column = column_of_trials(column)
        return sources(self.tuning.on if self.tuning else ()).get(column) or _for_all(self.tuning) or column

    def tuning_cells(self, column: str, method: str, values: Mapping[str, Any], name: str) -> list[Cell]:
        """Return the runs of one trial, the settings ``values``; they are measured only at their end."""
        assert self.tuning is not None
        settings = replace(self.trial_columns()[column], eval_every=0, after_every=0, probe="")
        if self.tuning.rounds:
            settings = replace(settings, rounds=self.tuning.rounds)
        where = Path(TUNING) / column / name
        return [_cell(where, settings, method, seed, values) for seed in self.tuning.seeds]

    def untuned(self) -> list[tuple[str, str]]:
        """Return the (column, method) pairs whose learning rate is not chosen yet."""
        if self.tuning is None:
            return []
        return [(c, m) for c in self.columns() for m in self.methods if m not in self.lr.get(c, {})]

    def to_try(self) -> list[tuple[str, str]]:
        """Return the (column, method) pairs whose trials decide what is not chosen yet, each once."""
        return list(dict.fromkeys((self.source(column), method) for column, method in self.untuned()))

    def check(self) -> None:
        """Raise ValueError if the plan is wrong. ``studies.cells.check_study`` also checks the names in it."""
        for name in ("datasets", "seeds"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"nothing to run: give at least one value to --{name}")
            if len(set(values)) < len(values):
                raise ValueError(f"--{name} repeats a value: {' '.join(map(str, values))}")
        if self.variants and len(self.clients) > 1:
            raise ValueError(f"{self.name} has its own columns; give only one number to --clients")
        if len(set(self.methods)) < len(self.methods):
            raise ValueError(f"--methods repeats a value: {' '.join(self.methods)}")
        if self.tuning is not None:
            both = set(self.seeds) & set(self.tuning.seeds)
            if both:
                raise ValueError(f"seed {min(both)} is used for tuning and cannot be reported; choose other seeds")
            _check_tuning(self)
        for cell in self.cells():
            cell.config.check()


def _cell(where: Path, settings: Settings, method: str, seed: int, values: Mapping[str, Any]) -> Cell:
    config = RunConfig(**(vars(settings) | {"method": method, "seed": seed} | dict(values)))
    return Cell(where / folder_name(replace(config, method=method)), config, method)


def column_of_trials(column: str) -> str:
    """Return the column without what its settings are chosen by: both have the same trials.

    >>> column_of_trials("cifar10/by-after"), column_of_trials("cifar10/clients-100")
    ('cifar10', 'cifar10/clients-100')
    """
    return next((column.removesuffix(f"/by-{metric}") for metric in EACH if column.endswith(f"/by-{metric}")), column)


def chosen_by(column: str, tuning: Tuning) -> str:
    """Return what the settings of a column are chosen by: before, after or mean, or another metric."""
    return column.rpartition("/by-")[2] if tuning.by == "each" else tuning.by


def sources(on: Iterable[str]) -> dict[str, str]:
    """Return column -> the column that it takes its settings from.

    >>> sources(["mnist=fashion_mnist", "cifar10"])
    {'mnist': 'fashion_mnist'}
    """
    return {word.partition("=")[0]: word.partition("=")[2] for word in on if "=" in word}


def _for_all(tuning: Tuning | None) -> str:
    """Return the column whose settings all columns take that are not named; empty: each has its own."""
    return next((word for word in (tuning.on if tuning else ()) if "=" not in word), "")


def _check_tuning(study: Study) -> None:
    """Raise ValueError if the budget of tuning or a column that it names is wrong."""
    assert study.tuning is not None
    tuning = study.tuning
    if not tuning.seeds or not tuning.names:
        raise ValueError("--tune needs at least one trial, or one learning rate, and one seed")
    if tuning.rounds < 0:
        raise ValueError(f"--tuning-rounds must be at least 1, or 0 for the study's rounds, not {tuning.rounds}")
    columns = list(study.trial_columns())
    for_all = [word for word in tuning.on if "=" not in word]
    named = [*sources(tuning.on).items(), *(("", word) for word in for_all)]
    if for_all and len(tuning.on) > 1:
        raise ValueError(
            f"--tuned-on {' '.join(tuning.on)}: name one column whose settings all take, or pairs COLUMN=OTHER"
        )
    for column, other in named:
        for each in filter(None, (column, other)):
            if each not in columns:
                raise ValueError(nearest(each, columns, what="column in --tuned-on"))
        if study.source(other) != other:
            raise ValueError(f"--tuned-on {column}={other}: {other} is not tuned itself; name {study.source(other)}")


def data_folder_name(data: str) -> str:
    """Return the dataset's name if it can name a folder; otherwise a short name and a few digits that tell it apart.

    >>> data_folder_name("cifar10"), data_folder_name("folder:path=/home/me/my birds,size=32")
    ('cifar10', 'my_birds_size_32-de7015')
    """
    if re.fullmatch(r"[a-z0-9_]+", data):
        return data
    safe = re.sub(r"[^\w.]+", "_", short_name(data)).strip("._")[:40]
    return f"{safe or 'data'}-{hashlib.sha256(data.encode()).hexdigest()[:6]}"


def folder_name(config: RunConfig) -> str:
    """fedprox:mu=0.1 with seed 3 -> fedprox-mu-0.1-seed3."""
    method = "".join(c if c.isalnum() or c in "._" else "-" for c in config.method)
    return f"{method}-seed{config.seed}"


# ---- study.toml ----------------------------------------------------------------------------------------


def to_toml(study: Study, extra: dict[str, dict[str, str]] | None = None) -> str:
    """Return the study as TOML; ``extra`` holds tables of text, such as the versions it was made with."""
    lines = [f"name = {_toml(study.name)}", f"title = {_toml(study.title)}"]
    lines += [f"{name} = {_toml(list(getattr(study, name)))}" for name in SEVERAL]
    tables: dict[str, dict[str, Any]] = {"settings": asdict(study.settings)}
    if study.tuning is not None:
        tables["tuning"] = study.tuning._asdict()
    tables |= {f"variants.{_key(name)}": changes for name, changes in study.variants.items()}
    tables |= {f"lr.{_key(column)}": dict(chosen) for column, chosen in study.lr.items()}
    tables |= {f"tuned.{_key(column)}": dict(chosen) for column, chosen in study.tuned.items()}
    tables |= {"num_seeds": study.num_seeds} if study.num_seeds else {}
    tables |= extra or {}
    for header, table in tables.items():
        lines += ["", f"[{header}]", *(f"{_key(key)} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    # one-line strings, numbers and lists are the same in TOML and JSON
    return json.dumps(value, ensure_ascii=False)


def read_study(folder: Path) -> Study:
    """Return the study in ``folder``. Raise ValueError with the field that is missing or wrong."""
    where = folder / FILE
    values = read_toml(where)
    try:
        settings = from_dict(values["settings"], where=f"{where}, [settings]")
        tuning = values.get("tuning")
        return Study(
            name=values["name"],
            title=values["title"],
            settings=Settings(**{f.name: getattr(settings, f.name) for f in fields(Settings)}),
            datasets=_several(where, values, "datasets"),
            methods=_several(where, values, "methods"),
            seeds=_several(where, values, "seeds"),
            clients=_several(where, values, "clients"),
            variants=values.get("variants", {}),
            tuning=None if tuning is None else _tuning(tuning),
            lr=values.get("lr", {}),
            tuned=values.get("tuned", {}),
            num_seeds=values.get("num_seeds", {}),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where} is not a study: {error} is missing or has the wrong type") from None


def _tuning(values: dict[str, Any]) -> Tuning:
    """Return the tuning of a study.toml; those of earlier versions have a grid alone."""
    found: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in values.items()}
    return Tuning(found.pop("grid"), found.pop("seeds"), found.pop("by"))._replace(**found)


def _several(where: Path, values: dict[str, Any], name: str) -> tuple[Any, ...]:
    kind, found = SEVERAL[name], values[name]
    if not isinstance(found, list) or any(type(each) is not kind for each in found):
        words = {str: "names", int: "whole numbers"}[kind]
        raise ValueError(f"{where}: {name} must be a list of {words}, not {found!r}; restore the file, or correct it")
    return tuple(found)


def read_trials(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of tuning.jsonl; none if there is no such file. Raise ValueError if it is damaged."""
    path = folder / TRIALS
    try:
        return [parse(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    except ValueError:
        raise ValueError(f"{path} is damaged; delete it, and repeat the study's command to write it anew") from None


def extend(old: Study, new: Study, *, where: Path) -> Study:
    """Return ``old`` with the datasets, methods and seeds of ``new``. Raise ValueError if the protocols differ."""
    changed = differences(old.settings, new.settings, but=("data", *NEUTRAL))
    differing = [f"{name} {before!r} → {after!r}" for name, (before, after) in changed.items()]
    if len(old.clients) <= 1 < len(new.clients) or len(new.clients) <= 1 < len(old.clients):
        differing.append(f"clients {list(old.clients)} → {list(new.clients)}")
    if old.variants != new.variants:
        differing.append(f"variants {', '.join(old.variants) or 'none'} → {', '.join(new.variants) or 'none'}")
    if new.tuning is not None and (old.tuning is None or new.tuning._replace(on=old.tuning.on) != old.tuning):
        differing.append(_other_tuning(old.tuning, new.tuning))
    elif new.tuning is not None:
        both = [column for column in new.columns() if column in old.columns()]
        differing += [
            f"{column} tuned on {old.source(column)} → {new.source(column)}"
            for column in both
            if old.source(column) != new.source(column)
        ]
    if differing:
        raise ValueError(f"{where} holds a study with another protocol ({', '.join(differing)}); choose another --out")

    def joined(name: str) -> Any:
        return tuple(dict.fromkeys([*getattr(old, name), *getattr(new, name)]))

    return replace(
        old,
        settings=replace(old.settings, **{name: getattr(new.settings, name) for name in NEUTRAL}),
        datasets=joined("datasets"),
        methods=joined("methods"),
        seeds=joined("seeds"),
        clients=joined("clients"),
        num_seeds=_num_seeds(old, new),
        tuning=None if old.tuning is None else old.tuning._replace(on=_joined_on(old, new)),
    )


def _num_seeds(old: Study, new: Study) -> dict[str, int]:
    """Return dataset -> number of its seeds: the larger of both studies', where that is not all."""
    if not (old.num_seeds or new.num_seeds):
        return {}
    most = len({*old.seeds, *new.seeds})
    found = {
        data: max(len(study.seeds_of(data)) for study in (old, new) if data in study.datasets)
        for data in dict.fromkeys([*old.datasets, *new.datasets])
    }
    return {data: number for data, number in found.items() if number < most}


def _joined_on(old: Study, new: Study) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*(old.tuning.on if old.tuning else ()), *(new.tuning.on if new.tuning else ())]))


def _other_tuning(old: Tuning | None, new: Tuning) -> str:
    """Return what is wrong with tuning that the study has not, and how to ask for the one that it has."""
    if old is None:
        return "tuning, which must come before the reported seeds"
    if new.trials and not old.trials:
        rates = " ".join(f"{lr:g}" for lr in old.grid)
        return f"tuning: the study's is --tuning-lr {rates} --tuning-seeds {len(old.seeds)}"
    changed = [f"{name} {before!r} → {after!r}" for name, before, after in zip(Tuning._fields, old, new, strict=True)
               if before != after and name != "on"]  # fmt: skip
    return f"tuning, which must come before the reported seeds: {', '.join(changed)}"
