"""Read LEAF's JSON files: {"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}.

    femnist      x: 784 numbers 0..1 -> pictures 1x28x28 of bytes;  y: 0..61
    shakespeare  x: 80 characters -> ids of LEAF's alphabet;        y: the next character
    sent140      x: the fields of a tweet, its text at place 4 -> bytes + 1, zeros after the end;  y: 0 or 1 (LEAF: 4)
    numbers      x: numbers of any shape (LEAF's synthetic);        y: 0, 1, …

Users are owners. LEAF's own split into train/ and test/ is not used: both are pooled, and each client's samples are
split anew by ``test_share``, as for every dataset. S. Caldas et al., "LEAF: a benchmark for federated settings", 2018.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedncv.data.dataset import Dataset
from fedncv.data.text import ALPHABET, characters
from fedncv.files import parse
from fedncv.spec import expanded

Kind = Literal["auto", "femnist", "shakespeare", "sent140", "numbers"]
Array = NDArray[Any]
TEXT = 4  # place of the text among the fields of a tweet
SENTIMENT = {"0": 0, "1": 1, "4": 1}


class _Reader(NamedTuple):
    x: Callable[[list[Any], int], Array]  # samples of a user, and the knob ``length``
    y: Callable[[list[Any]], Array]
    num_classes: int  # 0: the largest label plus one
    classes: tuple[str, ...] = ()


def _integers(labels: list[Any]) -> Array:
    found = np.array(labels)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(f"labels are {found.dtype}, not integers")
    return found.astype(np.int64)


def _pictures(samples: list[Any], _length: int) -> Array:
    """Return bytes: LEAF writes pixels as bytes / 255. They need a quarter of the memory, and are the same values."""
    x = np.array(samples, dtype=np.float64).reshape(-1, 1, 28, 28)
    whole = np.rint(255 * x)
    if np.abs(255 * x - whole).max(initial=0) > 1e-6 or whole.min(initial=0) < 0 or whole.max(initial=0) > 255:
        raise ValueError("pixels are not multiples of 1/255 from 0 to 1; use kind=numbers")
    return whole.astype(np.uint8)


def _windows(samples: list[str], _length: int) -> Array:
    sizes = {len(sample) for sample in samples}
    if len(sizes) > 1:
        raise ValueError(f"windows have {min(sizes)} to {max(sizes)} characters; they must be of equal length")
    return characters("".join(samples)).reshape(len(samples), -1)


def _letters(labels: list[Any]) -> Array:
    for sample, label in enumerate(labels):
        if not isinstance(label, str) or len(label) != 1:
            raise ValueError(f"sample {sample}: y is {label!r}, not one character")
    return characters("".join(labels)).astype(np.int64)


def _numbers(samples: list[Any], _length: int) -> Array:
    sizes = {len(sample) for sample in samples if isinstance(sample, list)}
    if len(sizes) > 1:
        raise ValueError(f"samples have {min(sizes)} to {max(sizes)} numbers; they must be of equal length")
    return np.array(samples, dtype=np.float32)


def _tweets(samples: list[list[str]], length: int) -> Array:
    ids = np.zeros((len(samples), length), dtype=np.int16)
    for row, fields in zip(ids, samples, strict=True):
        text = fields[TEXT].encode()[:length]
        row[: len(text)] = np.frombuffer(text, dtype=np.uint8).astype(np.int16) + 1
    return ids


READERS: dict[str, _Reader] = {
    "femnist": _Reader(_pictures, _integers, 62),
    "shakespeare": _Reader(_windows, _letters, len(ALPHABET), tuple(ALPHABET)),
    "sent140": _Reader(_tweets, lambda y: np.array([SENTIMENT[str(each)] for each in y]), 2, ("negative", "positive")),
    "numbers": _Reader(_numbers, _integers, 0),
}


LONGEST = 10_000  # bytes of a tweet


def read_leaf(path: Path | str, *, kind: Kind = "auto", length: int = 140) -> Dataset:
    """Read a file, a folder of files, or a folder with train/ and test/, or all_data/, of LEAF.

    ``kind`` is found from the first sample if it is not given. ``length`` is the number of bytes kept of a tweet.
    """
    if not 1 <= length <= LONGEST:
        raise ValueError(f"leaf: length is {length}; it must be from 1 to {LONGEST:,}")
    folder = expanded(path)
    x, y, owners = [], [], []
    for file in files(folder):
        for user, (samples, labels) in _users(file).items():
            found = _kind(samples[0], labels[0], f"{file}: {user!r}") if kind == "auto" else kind
            try:
                x.append(READERS[found].x(samples, length))
                y.append(READERS[found].y(labels))
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                said = f"{error} is not a label" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"{file}: the samples of {user!r} are not LEAF's {found} ({said})") from None
            kind = found
            owners += [user] * len(samples)
    if not x:
        raise ValueError(f"{folder} has no samples; give LEAF files with at least one")
    reader = READERS[kind]
    shapes = {each.shape[1:] for each in x}
    if len(shapes) > 1:
        raise ValueError(
            f"{folder}: samples have the shapes {' and '.join(map(str, sorted(shapes)))}; they must be equal"
        )
    labels_n = np.concatenate(y)
    num_classes = reader.num_classes or int(labels_n.max()) + 1
    if not 0 <= labels_n.min() <= labels_n.max() < num_classes:
        wrong = labels_n.min() if labels_n.min() < 0 else labels_n.max()
        raise ValueError(f"{folder}: label {wrong} is out of range 0..{num_classes - 1} of {kind}")
    numbers = np.unique(np.array(owners), return_inverse=True)[1].astype(np.int64)
    return Dataset(
        f"leaf-{kind}" if kind != "numbers" else folder.stem,
        torch.from_numpy(np.concatenate(x)),
        torch.from_numpy(labels_n),
        num_classes,
        owners=torch.from_numpy(numbers),
        classes=reader.classes,
    )


def files(path: Path) -> list[Path]:
    """Return the JSON files of a LEAF dataset; raise ValueError if there are none."""
    if path.is_file():
        return [path]
    for inner in ("", "data"):
        for places in (("train", "test"), ("all_data",), ("",)):
            found = [file for place in places for file in sorted((path / inner / place).glob("*.json"))]
            if found:
                return found
    raise ValueError(f"{path} has no LEAF files; give a .json file, or a folder with train/ and test/, or all_data/")


def _users(file: Path) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return user -> inputs and labels; users without samples are left out."""
    try:
        held = parse(file.read_bytes())
        data = {str(user): (held["user_data"][user]["x"], held["user_data"][user]["y"]) for user in held["users"]}
    except (ValueError, RecursionError):
        raise ValueError(f"{file} is not complete JSON; fetch or make it again") from None
    except (KeyError, TypeError):
        raise ValueError(f'{file} is not a LEAF file; it must have "users" and "user_data" with "x" and "y"') from None
    for user, (samples, labels) in data.items():
        if not isinstance(samples, list) or not isinstance(labels, list) or len(samples) != len(labels):
            raise ValueError(f"{file}: {user!r} must have as many x as y, in lists")
    return {user: both for user, both in data.items() if both[0]}


def _kind(sample: Any, label: Any, where: str) -> Kind:
    if isinstance(sample, str) and isinstance(label, str):
        return "shakespeare"
    if isinstance(sample, list) and len(sample) > TEXT and isinstance(sample[TEXT], str):
        return "sent140"
    if isinstance(sample, list) and sample and not isinstance(sample[0], str):
        return "femnist" if len(sample) == 784 and isinstance(sample[0], int | float) else "numbers"
    raise ValueError(
        f"{where}: cannot tell what the samples are (x {str(sample)[:40]!r}, y {label!r}); only LEAF's "
        "femnist, shakespeare, sent140 and lists of numbers can be read"
    )
