"""The decoded cache: one memory-mapped array of bytes per dataset, shared by all runs of this user.

    <cache>/decoded/<name>-<fingerprint>/images.u8    n x channels x height x width bytes
                                         labels.i64   n labels
                                         about.json   n, shape, classes, mean, std, checksums; written last

An entry is written to a temporary folder next to it, flushed to the disk, and renamed. So it is complete or does not
exist. If two processes write the same entry, the second uses the first's. An entry whose files changed since then, by a
failing disk or anything else, does not count: it is written again.
"""

import json
import os
import secrets
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedncv.data.dataset import Dataset
from fedncv.data.raw import Moments, Raw
from fedncv.files import checksum, is_intact, parse, sealed
from fedncv.spec import expanded

FORMAT = 2
STALE_SECONDS = 86_400  # a temporary folder of that age was left by a killed process


def cache_folder() -> Path:
    """Return FEDNCV_CACHE, or ``fedncv`` in the platform's cache folder."""
    if chosen := os.environ.get("FEDNCV_CACHE"):
        return expanded(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fedncv"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "fedncv" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedncv"


_checked: dict[tuple[Path, int, int, int], int | None] = {}  # a file's path, inode, size and time -> its checksum


def _checksum(path: Path) -> int | None:
    """Return the file's checksum, computed once in a process unless the file is written to."""
    about = path.stat()
    key = (path, about.st_ino, about.st_size, about.st_mtime_ns)
    if key not in _checked:
        _checked[key] = checksum(path)
    return _checked[key]


def open_entry(entry: Path, name: str) -> Dataset | None:
    """Return the dataset, memory-mapped without a copy; None if there is no complete, intact entry of this format.

    The map is private: writing to a tensor does not change the file.
    """
    try:
        about = parse((entry / "about.json").read_bytes())
        shape = (about["n"], *about["shape"])
        images, labels = entry / "images.u8", entry / "labels.i64"
        sizes = images.stat().st_size, labels.stat().st_size
        if about["format"] != FORMAT or sizes != (int(np.prod(shape)), 8 * about["n"]) or not is_intact(about):
            return None
        if (about["images_check"], about["labels_check"]) != (_checksum(images), _checksum(labels)):
            return None
        return Dataset(
            name=name,
            x=torch.from_numpy(np.memmap(images, np.uint8, mode="c", shape=shape)),
            y=torch.from_numpy(np.memmap(labels, np.int64, mode="c", shape=(about["n"],))),
            num_classes=about["num_classes"],
            mean=tuple(about["mean"]),
            std=tuple(about["std"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_entry(
    entry: Path, pieces: Iterator[Raw], *, shape: tuple[int, ...], num_classes: int, num_images: int | None
) -> None:
    """Write all pieces as ``entry``; raise ValueError, and leave no entry, if a piece is bad or the disk is full.

    ``num_images`` is the required number of images; None accepts any number.
    """
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        _sweep(entry.parent)
        half = entry.parent / f".{entry.name}-{secrets.token_hex(8)}"
        half.mkdir()
    except OSError as error:
        raise _cannot(entry, error) from None
    try:
        n, moments, checks = 0, Moments(shape[0]), [0, 0]
        # Unbuffered: a buffer would be written at close, where we do not handle a full disk.
        with (
            (half / "images.u8").open("wb", buffering=0) as images_file,
            (half / "labels.i64").open("wb", buffering=0) as labels_file,
        ):
            for images, labels in pieces:
                for i, (file, array) in enumerate([(images_file, images), (labels_file, labels.astype("<i8"))]):
                    data = array.tobytes()
                    _put(file, data, entry)
                    checks[i] = zlib.crc32(data, checks[i])
                moments.add(images)
                n += len(labels)
            _sync(images_file, entry)
            _sync(labels_file, entry)
        if n == 0 or num_images not in (n, None):
            raise ValueError(
                f"{entry.name.rpartition('-')[0]}: {n} images, there must be {num_images or 'some'}; "
                "a file is missing, damaged or of another dataset (verify=False accepts it)"
            )
        mean, std = moments.values()
        about: dict[str, Any] = {"format": FORMAT, "n": n, "shape": shape, "num_classes": num_classes}
        about |= {"mean": mean, "std": std, "images_check": checks[0], "labels_check": checks[1]}
        with (half / "about.json").open("wb", buffering=0) as about_file:
            _put(about_file, json.dumps(sealed(about)).encode(), entry)
            _sync(about_file, entry)
        _rename(half, entry)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _put(file: FileIO, data: bytes, entry: Path) -> None:
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        raise _cannot(entry, error) from None


def _sync(file: FileIO, entry: Path) -> None:
    try:
        os.fsync(file.fileno())
    except OSError as error:
        raise _cannot(entry, error) from None


def _rename(half: Path, entry: Path) -> None:
    """Put the finished folder in its place, unless another process has just done so."""
    if open_entry(entry, "") is not None:
        return
    try:
        if entry.exists():  # it has another format or is damaged
            shutil.rmtree(entry)
        half.rename(entry)
    except OSError as error:
        if open_entry(entry, "") is None:
            raise _cannot(entry, error) from None


def _sweep(folder: Path) -> None:
    """Remove temporary folders of killed processes."""
    for half in folder.glob(".*-*"):
        if time.time() - half.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(half, ignore_errors=True)


def _cannot(entry: Path, error: OSError) -> ValueError:
    return ValueError(
        f"cannot write the decoded cache {entry}: {error.strerror or error}; "
        "free space there or set FEDNCV_CACHE to another folder"
    )
