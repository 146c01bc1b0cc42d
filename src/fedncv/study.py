"""A study: settings × columns × methods × seeds, and the file that describes it.

A study is a folder of runs, `<out>/<column>/<method>-seed<k>`, with `study.toml` at its root. The file holds all
settings, so that the same command resumes the study and a reader can repeat it. A column of its table is a dataset,
or a dataset with one number of clients or one variant of the settings, if the study varies those.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from fedncv.config import RunConfig, Settings, differences, from_dict, named, read_toml
from fedncv.spec import short_name

FILE = "study.toml"
TUNING = "tuning"  # the folder of the tuning runs, beside the columns
PARTITION = "partition.json"  # in a column's folder: the clients' samples per class, for the report

SEVERAL = {"datasets": str, "methods": str, "seeds": int, "clients": int}  # fields that are lists, and of which type
NEUTRAL = named("machine", "measurement")  # settings that do not change the numbers of a run


class Tuning(NamedTuple):
    """Runs that choose the learning rate: the same for every method, on seeds that are not reported."""

    grid: tuple[float, ...] = (0.01, 0.03, 0.1)
    seeds: tuple[int, ...] = (1000, 1001)
    by: str = "before"  # the metric whose mean at the last round decides


class Cell(NamedTuple):
    folder: Path  # relative to the study's folder
    config: RunConfig


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
        return found

    def cells(self) -> list[Cell]:
        """Return every reported run, with the seeds of one method together."""
        return [
            _cell(Path(column), settings, method, seed, self.lr.get(column, {}).get(method))
            for column, settings in self.columns().items()
            for method in self.methods
            for seed in self.seeds
        ]

    def tuning_cells(self, column: str, method: str, lr: float) -> list[Cell]:
        """Return the runs that score ``lr`` for ``method`` in ``column``; they are measured only at their end."""
        assert self.tuning is not None
        settings = replace(self.columns()[column], eval_every=0, after_every=0, probe="")
        where = Path(TUNING) / column / f"lr-{lr:g}"
        return [_cell(where, settings, method, seed, lr) for seed in self.tuning.seeds]

    def untuned(self) -> list[tuple[str, str]]:
        """Return the (column, method) pairs whose learning rate is not chosen yet."""
        if self.tuning is None:
            return []
        return [(c, m) for c in self.columns() for m in self.methods if m not in self.lr.get(c, {})]

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
        for cell in self.cells():
            cell.config.check()


def _cell(where: Path, settings: Settings, method: str, seed: int, lr: float | None) -> Cell:
    config = RunConfig(**(vars(settings) | ({} if lr is None else {"lr": lr})), method=method, seed=seed)
    return Cell(where / folder_name(config), config)


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
    tables |= extra or {}
    for header, table in tables.items():
        lines += ["", f"[{header}]", *(f"{_key(key)} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else _toml(name)


def _toml(value: Any) -> str:
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
            **{name: _several(where, values, name) for name in SEVERAL},
            variants=values.get("variants", {}),
            tuning=None if tuning is None else Tuning(tuple(tuning["grid"]), tuple(tuning["seeds"]), tuning["by"]),
            lr=values.get("lr", {}),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where} is not a study: {error} is missing or has the wrong type") from None


def _several(where: Path, values: dict[str, Any], name: str) -> tuple[Any, ...]:
    kind, found = SEVERAL[name], values[name]
    if not isinstance(found, list) or any(type(each) is not kind for each in found):
        words = {str: "names", int: "whole numbers"}[kind]
        raise ValueError(f"{where}: {name} must be a list of {words}, not {found!r}; restore the file, or correct it")
    return tuple(found)


def extend(old: Study, new: Study, *, where: Path) -> Study:
    """Return ``old`` with the datasets, methods and seeds of ``new``. Raise ValueError if the protocols differ."""
    changed = differences(old.settings, new.settings, but=("data", *NEUTRAL))
    differing = [f"{name} {before!r} → {after!r}" for name, (before, after) in changed.items()]
    if len(old.clients) <= 1 < len(new.clients) or len(new.clients) <= 1 < len(old.clients):
        differing.append(f"clients {list(old.clients)} → {list(new.clients)}")
    if old.variants != new.variants:
        differing.append(f"variants {', '.join(old.variants) or 'none'} → {', '.join(new.variants) or 'none'}")
    if new.tuning is not None and new.tuning != old.tuning:
        differing.append("tuning, which must come before the reported seeds")
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
    )
