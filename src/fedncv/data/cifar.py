"""Read CIFAR-10 and CIFAR-100, which are pickles of Python 2, without running any code in them.

Such a file is a dictionary of bytes, lists of small integers and one NumPy array of bytes. The unpickler
below accepts the three names that such an array needs and replaces them by plain classes. No file can reach a NumPy
function or any other name.

A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
"""

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedncv.data.raw import Images, Labels, Raw, reason

CIFAR10_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
CIFAR100_FILES = ("train", "test")


def read_cifar10(folder: Path) -> Iterator[Raw]:
    for name in CIFAR10_FILES:
        yield read_batch(folder / name, b"labels")


def read_cifar100(folder: Path) -> Iterator[Raw]:
    """Yield the images with their 100 fine classes; the 20 coarse classes are not read."""
    for name in CIFAR100_FILES:
        yield read_batch(folder / name, b"fine_labels")


def read_batch(path: Path, labels_key: bytes) -> Raw:
    """Read one file: rows of 3 x 32 x 32 bytes, and their labels."""
    batch = safe_unpickle(path.read_bytes(), str(path))
    try:
        rows, labels = batch[b"data"].rows(), np.array(batch[labels_key])
        if labels.ndim != 1 or labels.dtype.kind != "i":
            raise TypeError("labels are not a list of integers")
        return Raw(rows.reshape(-1, 3, 32, 32), _as_labels(labels))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a CIFAR batch ({reason(error)}); fetch it again") from None


def safe_unpickle(data: bytes, source: str) -> Any:
    """Unpickle ``data``, which may hold only dictionaries, lists, tuples, bytes, numbers and ``_Array``."""
    try:
        return _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except _RefusedError as error:
        raise ValueError(f"{source} asks for {error}, which no CIFAR file needs; it is unsafe, delete it") from None
    except Exception as error:  # a damaged pickle can raise almost any error
        raise ValueError(f"{source} is truncated or damaged ({reason(error)}); fetch it again") from None


def _as_labels(labels: Any) -> Labels:
    result: Labels = labels.astype(np.int64)
    return result


class _RefusedError(Exception):
    pass


class _Array:
    """Replaces a NumPy array of bytes; keeps its shape and contents."""

    __slots__ = ("data", "shape")

    def __setstate__(self, state: Any) -> None:
        _version, self.shape, dtype, fortran, self.data = state
        if not isinstance(dtype, _Dtype) or dtype.code != b"u1" or fortran:
            raise TypeError("an array that is not of bytes")

    def rows(self) -> Images:
        return np.frombuffer(self.data, np.uint8).reshape(self.shape)


class _Dtype:
    """Replaces numpy.dtype; keeps its code."""

    __slots__ = ("code",)

    def __init__(self, code: object) -> None:
        self.code = code

    def __setstate__(self, _state: Any) -> None:
        pass  # byte order and similar, which bytes do not have


class _Name:
    """Replaces a function or class of NumPy. It has no __dict__, so a pickle cannot change it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> Any:
        if self.name == "dtype":
            return _Dtype(arguments[0])
        if self.name == "_reconstruct":
            return _Array()
        raise _RefusedError(f"a call of {self.name}")

    def __setstate__(self, _state: Any) -> None:
        raise _RefusedError(f"a change of {self.name}")


class _Unpickler(pickle.Unpickler):
    ADMITTED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ADMITTED:
            raise _RefusedError(f"{module}.{name}")
        return _Name(name)

    def persistent_load(self, pid: Any) -> Any:
        raise _RefusedError(f"the external object {pid!r}")
