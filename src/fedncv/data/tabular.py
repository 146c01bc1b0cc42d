"""Read a table: a CSV or Parquet file with one row per sample.

    age,bmi,hospital,outcome
    61,22.4,Bern,healthy          y=outcome: the target       owner=hospital: the client
    47,31.0,Oslo,ill              every other column is a feature, a number

Integers, texts and booleans in the target column are classes, numbered in sorted order. Numbers with a decimal point
are values of a regression. Nothing is filled or guessed: a missing value, a text among the features, or a row of
another length is an error with its place.
"""

import csv
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from fedncv.data.dataset import Dataset
from fedncv.data.own import owner_numbers
from fedncv.data.raw import reason
from fedncv.data.sound import check_samples
from fedncv.spec import expanded, nearest, written

Target = Literal["auto", "classes", "number"]
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
INTEGER = re.compile(r"[+-]?\d+")
MISSING = {"", "na", "n/a", "#n/a", "<na>", "nan", "-nan", "null", "none", "?"}
UNNAMED_INDEX = re.compile(r"__index_level_\d+__")
SHOWN = 3  # values of a column that a message names


class Table(NamedTuple):
    path: Path
    columns: dict[str, list[Any]]  # name -> its values; texts, if it was a CSV file
    place: Callable[[int], str]  # row -> its place in the file, for messages
    row_names: tuple[str, ...] = ()  # columns that pandas wrote as the index


def read_table(
    path: Path | str,
    *,
    y: str,
    owner: str = "",
    x: Sequence[str] = (),
    drop: Sequence[str] = (),
    standardise: bool = False,
    target: Target = "auto",
) -> Dataset:
    """Read ``y`` as the target, ``owner`` as the owners (clients), and the other columns as features.

    ``x`` chooses the features, ``drop`` leaves columns out. The index that pandas writes into a Parquet file is a
    feature only if ``x`` names it. ``standardise`` scales every feature by the mean and the deviation of all clients'
    training samples. ``target`` is classes, number (regression), or auto: classes unless the column has numbers with
    a decimal point. Raise ValueError with the place of what cannot be read.
    """
    table = _read(expanded(path))
    for name in [y, *filter(None, [owner]), *x, *drop]:
        if name not in table.columns:
            raise ValueError(f"{path}: {nearest(name, table.columns, what='column')}")
    used = [y, *filter(None, [owner]), *x]
    for name in used:
        if used.count(name) > 1:
            raise ValueError(f"{path}: {name!r} is used twice; y, owner and x must differ")
    features = [
        name for name in x or table.columns if name not in (y, owner, *drop) and (x or name not in table.row_names)
    ]
    if not features:
        raise ValueError(f"{path} has no column left for the inputs; it has {', '.join(table.columns)}")
    targets, classes = _targets(table, y, target)
    dataset = Dataset(
        Path(path).stem,
        torch.from_numpy(np.stack([_numbers(table, name) for name in features], axis=1)),
        torch.from_numpy(targets),
        len(classes) or 1,
        owners=owner_numbers(_owners(table, owner), len(targets)) if owner else None,
        features=tuple(features),
        classes=classes,
        standardise=standardise,
    )
    check_samples(dataset)
    return dataset


def _owners(table: Table, name: str) -> list[str]:
    for row, value in enumerate(table.columns[name]):
        if _is_missing(value):
            raise ValueError(
                f"{table.place(row)}: the owner {name!r} is {value!r}, which counts as missing; every sample "
                "needs an owner: remove such rows, or give an owner of that name another one"
            )
    return [str(value) for value in table.columns[name]]


def _targets(table: Table, name: str, target: Target) -> tuple[np.ndarray[Any, Any], tuple[str, ...]]:
    """Return class numbers and class names, or floats and no names."""
    values = table.columns[name]
    numbers = [_number(value) for value in values]
    for row, (value, number) in enumerate(zip(values, numbers, strict=True)):
        if _is_missing(value) or (number is not None and not math.isfinite(number)):
            raise ValueError(
                f"{table.place(row)}: the target {name!r} is {value!r}, which counts as missing; "
                "remove such rows, or give a class of that name another one"
            )
    texts = [row for row, number in enumerate(numbers) if number is None]
    if texts and target == "auto" and all(_has_comma(values[row]) for row in texts):
        raise ValueError(
            f"{table.place(texts[0])}: the target {name!r} is {values[texts[0]]!r}; write numbers with a decimal "
            "point, or give target=classes"
        )
    if target == "number" or (target == "auto" and not texts and not all(map(_is_integer, values))):
        return _numbers(table, name), ()
    if 0 < len(texts) < len(values):
        raise ValueError(
            f"{table.place(texts[0])}: the target {name!r} is {values[texts[0]]!r}, but others are numbers; "
            "remove such rows, or write all classes as text"
        )
    labels: list[Any] = [str(value) for value in values] if texts else list(map(_exact, values))
    classes = sorted(set(labels))
    if len(classes) < 2:
        raise ValueError(
            f"{table.path}: the target {name!r} is always {values[0]!r}; there must be two classes or more"
        )
    number_of = {label: k for k, label in enumerate(classes)}
    return np.array([number_of[label] for label in labels], dtype=np.int64), tuple(map(str, classes))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, str) and INTEGER.fullmatch(value) is not None)


def _exact(value: Any) -> int | float:
    """Return a number that is a class: whole ones as integers, which floats would merge from 2^53 on."""
    number = int(value) if _is_integer(value) else float(value)
    return int(number) if number == int(number) else number


def _number(value: Any) -> float | None:
    """Return the number that is written there, or None. Python would read 1_000 as 1000."""
    try:
        return None if isinstance(value, str) and "_" in value else float(value)
    except (TypeError, ValueError):
        return None


def _numbers(table: Table, name: str) -> np.ndarray[Any, Any]:
    """Return a column of numbers. Raise ValueError with the first value that is missing or not a number."""
    values = table.columns[name]
    if all(str(value).lower() in ("true", "false") for value in values):
        return np.array([str(value).lower() == "true" for value in values], dtype=np.float64)
    numbers = [_number(value) for value in values]
    if None not in numbers and np.isfinite(found := np.array(numbers, dtype=np.float64)).all():
        return found
    texts = [value for value, number in zip(values, numbers, strict=True) if number is None and not _is_missing(value)]
    if texts:
        shown = ", ".join(map(repr, itertools.islice(dict.fromkeys(texts), SHOWN)))
        point = " with a decimal point" if any(map(_has_comma, texts)) else ""
        raise ValueError(
            f"{table.path}: column {name!r} holds text ({shown}); write it as numbers{point}, "
            f"or leave it out with drop={written(name)}"
        )
    for row, number in enumerate(numbers):
        if number is None or not math.isfinite(number):
            raise ValueError(
                f"{table.place(row)}: {name!r} is {values[row]!r}; remove such rows, fill the value, "
                f"or leave the column out with drop={written(name)}"
            )
    raise AssertionError("a column without such a value was returned above")


def _has_comma(value: Any) -> bool:
    return isinstance(value, str) and DECIMAL_COMMA.fullmatch(value) is not None


def _is_missing(value: Any) -> bool:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return True
    return str(value).strip().lower() in MISSING


# ---- files ---------------------------------------------------------------------------------------------


def _read(path: Path) -> Table:
    if not path.is_file():
        raise ValueError(f"there is no file {path}; give the path of a .csv or .parquet file")
    with path.open("rb") as file:
        parquet = file.read(4) == b"PAR1"
    table = _parquet(path) if parquet or path.suffix == ".parquet" else _csv(path)
    if not any(table.columns.values()):
        raise ValueError(f"{path} has no rows; give at least one sample")
    return table


def _csv(path: Path) -> Table:
    """Read text in UTF-8, separated by commas, semicolons or tabs, whichever the header has most of."""
    lines: list[int] = []
    rows: list[list[str]] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max(",;\t", key=first.count), strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_header(path, header)
            for row in reader:
                if not row:  # an empty line
                    continue
                if len(row) != len(header):
                    raise ValueError(
                        f"{path}, line {reader.line_num}: {len(row)} values, but the header has {len(header)} columns"
                    )
                rows.append([value.strip() for value in row])
                lines.append(reader.line_num)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not text in UTF-8 ({error.reason}, byte {error.start}); save it as UTF-8"
        ) from None
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file ({error})") from None
    columns = dict(zip(header, map(list, zip(*rows, strict=True)), strict=True)) if rows else {}
    return Table(path, columns, lambda row: f"{path}, line {lines[row]}")


def _parquet(path: Path) -> Table:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError("reading Parquet files needs pyarrow; pip install 'fedncv[tables]', or save as CSV") from None
    try:
        table = pyarrow.parquet.read_table(path)
        by_pandas = (table.schema.pandas_metadata or {}).get("index_columns", ())
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} is not a complete Parquet file ({reason(error)})") from None
    _check_header(path, table.column_names)
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    index = tuple(name for name in columns if name in by_pandas or UNNAMED_INDEX.fullmatch(name))
    return Table(path, columns, lambda row: f"{path}, row {row + 1}", index)


def _check_header(path: Path, header: Iterable[str]) -> None:
    names = list(header)
    if not names:
        raise ValueError(f"{path} is empty; its first line must name the columns")
    for name in names:
        if not name or names.count(name) > 1:
            what = f"two columns called {name!r}" if name else "a column without a name"
            raise ValueError(f"{path} has {what}; give every column its own name, in the first line")
