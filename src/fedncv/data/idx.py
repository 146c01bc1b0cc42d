"""IDX files: MNIST, Fashion-MNIST, EMNIST.

    0 0 8 ndim | ndim sizes, 4 bytes each, the highest byte first | the values, one byte each

Files may be gzipped or not. EMNIST stores its images transposed; its letters are numbered from 1.
"""

import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fedncv.data.raw import PIECE, Images, Labels, Raw, reason

LIMIT = 2 << 30  # bytes; EMNIST has 638 million

MNIST_FILES = tuple(f"{part}-{what}-ubyte.gz" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1"))


def emnist_files(subset: str) -> tuple[str, ...]:
    parts = ("train", "test")
    return tuple(f"emnist-{subset}-{p}-{what}-ubyte.gz" for p in parts for what in ("images-idx3", "labels-idx1"))


def read_mnist(folder: Path) -> Iterator[Raw]:
    """Read the four files of MNIST, or of Fashion-MNIST under the same names."""
    return _read(folder, MNIST_FILES)


def read_emnist(folder: Path, *, subset: str, first_label: int = 0) -> Iterator[Raw]:
    """Read one subset of EMNIST, turned upright, with labels from 0."""
    for images, labels in _read(folder, emnist_files(subset)):
        yield Raw(images.swapaxes(2, 3), labels - first_label)


def _read(folder: Path, files: tuple[str, ...]) -> Iterator[Raw]:
    for images_name, labels_name in zip(files[::2], files[1::2], strict=True):
        labels = read_labels(present(folder, labels_name))
        start = 0
        for images in read_images(present(folder, images_name)):
            yield Raw(images, labels[start : start + len(images)])
            start += len(images)
        if start != len(labels):
            raise ValueError(f"{folder / images_name} has {start} images, {labels_name} has {len(labels)} labels")


def present(folder: Path, name: str) -> Path:
    """Return the file, or the same file already decompressed."""
    path = folder / name
    return path if path.exists() or path.suffix != ".gz" else path.with_suffix("")


def read_images(path: Path) -> Iterator[Images]:
    """Yield images (n, 1, height, width), a piece at a time."""
    with _open(path) as file:
        n, height, width = _header(file, path, 3)
        for start in range(0, n, PIECE):
            count = min(PIECE, n - start)
            yield _values(file, path, count * height * width).reshape(count, 1, height, width)
        _at_end(file, path)


def read_labels(path: Path) -> Labels:
    with _open(path) as file:
        (n,) = _header(file, path, 1)
        labels = _values(file, path, n).astype(np.int64)
        _at_end(file, path)
    return labels


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]  # GzipFile reads like any binary file
    return path.open("rb")


def _take(file: BinaryIO, path: Path, count: int) -> bytes:
    try:
        return file.read(count)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is truncated or damaged ({reason(error)}); fetch it again") from None


def _header(file: BinaryIO, path: Path, ndim: int) -> tuple[int, ...]:
    head = _take(file, path, 4 + 4 * ndim)
    if len(head) < 4 + 4 * ndim or head[:4] != bytes([0, 0, 8, ndim]):
        raise ValueError(f"{path} is not an IDX file of bytes in {ndim} dimensions; fetch it again")
    sizes = tuple(int(size) for size in np.frombuffer(head, ">u4", offset=4))
    if math.prod(sizes) > LIMIT:
        raise ValueError(
            f"{path} says that it holds {' x '.join(map(str, sizes))} bytes; it is damaged, fetch it again"
        )
    return sizes


def _values(file: BinaryIO, path: Path, count: int) -> Images:
    data = _take(file, path, count)
    if len(data) != count:
        raise ValueError(f"{path} is truncated: {len(data)} of {count} bytes left; fetch it again")
    return np.frombuffer(data, np.uint8)


def _at_end(file: BinaryIO, path: Path) -> None:
    if _take(file, path, 1):
        raise ValueError(f"{path} is longer than its header says; fetch it again")
