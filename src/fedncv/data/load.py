"""Load a dataset by name: from the decoded cache, the original files, or the hub, in this order.

The data folder is the one given, else FEDNCV_DATA, else ``data`` in the cache folder. Its files are decoded once. A
cache entry is identified by the names, sizes and times of its source files, so changed files are decoded again; that of
a folder of pictures also by the folder, the classes and the scaling.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fedncv import notes, spec
from fedncv.data import archive, hub
from fedncv.data.cache import cache_folder, open_entry, write_entry
from fedncv.data.dataset import Dataset
from fedncv.data.folder import picture_size, pictures, read_pictures
from fedncv.data.idx import present
from fedncv.data.leaf import Kind, read_leaf
from fedncv.data.leaf import files as leaf_files
from fedncv.data.raw import Raw, checked, moments
from fedncv.data.registry import DATASETS, Entry
from fedncv.data.sound import check_samples
from fedncv.data.tabular import Target, read_table
from fedncv.imports import Own, make_own, own, own_values

Note = Callable[[str], None]
LARGEST_SIDE = 2048  # pixels
LARGE = 50_000_000  # bytes of text that take a while


def load(name: str, data_dir: str | Path | None = None, *, verify: bool = True, note: Note = notes.note) -> Dataset:
    """Load the dataset ``name``.

    It is one of DATASETS; or files of your own, ``folder:path=...``, ``table:path=...,y=...`` or ``leaf:path=...``; or
    ``package.module:name``, a Dataset or a function that returns one, with its keyword-only parameters as knobs.

    ``verify`` compares checksums and the number of images with the published ones. ``note`` is called with a line
    before anything slow. Raise ValueError with the files to put where if nothing is found.
    """
    make, knobs = _named(name)
    if isinstance(make, Entry):
        return _load_entry(make, name.partition(":")[0], data_dir, verify, note, knobs)
    if isinstance(make, Own):
        return _own(make, id(own_values(make, what="dataset")[0]))
    return make(note, **knobs)


def _named(name: str) -> tuple[Entry | Own | Callable[..., Dataset], dict[str, Any]]:
    """Return what makes the dataset of this name, and the knobs that the name sets."""
    kind = name.partition(":")[0]
    theirs = own(name)
    if theirs and kind not in DATASETS and kind not in FORMS:
        return theirs, own_values(theirs, what="dataset")[1]
    if kind not in DATASETS and kind not in FORMS:
        path = os.path.expanduser(name)
        if os.path.isfile(path) and path.endswith(".py"):
            raise ValueError(f"{name!r} is a file of code; name a function in it, as in {Path(path).stem}:function")
        if os.path.isfile(path):
            raise ValueError(f"{name!r} is a file; write table:path={spec.written(name)},y=COLUMN")
        if os.path.isdir(path):
            raise ValueError(f"{name!r} is a folder; write folder:path={spec.written(name)}")
        raise ValueError(spec.nearest(kind, [*DATASETS, *FORMS, "package.module:function"], what="dataset"))
    entries = {each: entry.make or _no_knobs for each, entry in DATASETS.items()}
    _, knobs = spec.parse(name, {**FORMS, **entries}, what="dataset")
    return DATASETS.get(kind) or FORMS[kind], knobs


def _no_knobs() -> None: ...


def check_name(name: str) -> None:
    """Raise ValueError unless ``load`` knows the name and its knobs."""
    _named(name)


def absolute_name(name: str) -> str:
    """Return the name with absolute paths, so that it means the same in every folder."""
    make, knobs = _named(name)
    if knobs == spec.absolute(knobs):
        return name
    return spec.write(make.name if isinstance(make, Own) else name.partition(":")[0], spec.absolute(knobs))


@lru_cache(maxsize=2)
def _own(theirs: Own, _identity: int) -> Dataset:
    """Return the user's dataset; runs of one process share it."""
    dataset: Dataset = make_own(theirs, Dataset, what="dataset")
    check_samples(dataset)
    return dataset


@lru_cache(maxsize=2)
def _remembered(read: Callable[..., Dataset], knobs: tuple[tuple[str, Any], ...], _key: str) -> Dataset:
    """Return ``read(**knobs)``; runs of one process share it, until a file of the key changes."""
    return read(**dict(knobs))


def load_table(
    note: Note = notes.note,
    *,
    path: Path | str,
    y: str,
    owner: str = "",
    x: str = "",
    drop: str = "",
    standardise: bool = False,
    target: Target = "auto",
) -> Dataset:
    """Load a CSV or Parquet file, as ``read_table``; ``x`` and ``drop`` are columns separated by ``|``."""
    file = spec.expanded(path)
    names = {key: tuple(filter(None, columns.split("|"))) for key, columns in (("x", x), ("drop", drop))}
    knobs = {"path": file, "y": y, "owner": owner, **names, "standardise": standardise, "target": target}
    return _remembered(read_table, tuple(knobs.items()), fingerprint([file], "") if file.exists() else "")


def load_leaf(note: Note = notes.note, *, path: Path | str, kind: Kind = "auto", length: int = 140) -> Dataset:
    """Load LEAF's JSON files, as ``read_leaf``."""
    files = leaf_files(spec.expanded(path))
    if sum(file.stat().st_size for file in files) > LARGE:
        note(f"reading {len(files)} files of {path}")
    knobs = {"path": path, "kind": kind, "length": length}
    return _remembered(read_leaf, tuple(knobs.items()), fingerprint(files, ""))


def load_folder(note: Note = notes.note, *, path: Path | str, size: int = 0, channels: int = 3) -> Dataset:
    """Load a folder with one subfolder of pictures per class, also below train/, valid/, test/ (pooled).

    ``size`` scales every picture to size x size; 0 keeps the size, which must then be equal for all. ``channels`` is
    3 for colour or 1 for grey.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels is {channels}; use 3 for colour or 1 for grey")
    if not 0 <= size <= LARGEST_SIDE:
        raise ValueError(f"folder: size is {size}; it must be from 1 to {LARGEST_SIDE:,} pixels, or 0 to keep the size")
    folder = spec.expanded(path)
    items, names = pictures(folder)
    shape = (channels, size, size) if size > 0 else (channels, *picture_size(items[0][0]))
    # everything that changes the pixels or the labels: the scaling, and which file has which class
    salt = json.dumps([str(folder.resolve()), shape, size > 0, [(str(p.relative_to(folder)), k) for p, k in items]])
    key = fingerprint([picture for picture, _ in items], salt)
    cached = cache_folder() / "decoded" / f"folder-{key}"
    if (dataset := open_entry(cached, folder.name)) is None:
        note(f"decoding {len(items)} pictures of {folder} (once, into {cached.parent})")
        decoded = read_pictures(items, size=shape[1:], channels=channels, resize=size > 0)
        write_entry(cached, decoded, shape=shape, num_classes=len(names), num_images=len(items))
        dataset = open_entry(cached, folder.name)
    assert dataset is not None
    return dataset


FORMS: Mapping[str, Callable[..., Dataset]] = {"folder": load_folder, "table": load_table, "leaf": load_leaf}
"""Forms of files that people have, each with the function that loads them."""


def _load_entry(
    entry: Entry, name: str, data_dir: str | Path | None, verify: bool, note: Note, knobs: dict[str, Any]
) -> Dataset:
    if not entry.files and entry.make is not None:
        return _remembered(entry.make, (("_folder", Path()), *knobs.items()), "")
    if not entry.files:
        return _in_memory(entry, name)
    root = data_folder(data_dir)
    source = find(entry, root)
    if entry.make is not None:
        if source is None:
            raise ValueError(f"{name} is not in {root}; {remedy(entry, root)}")
        knobs = {"folder": source, **knobs}
        return _remembered(entry.make, tuple(knobs.items()), fingerprint(key_files(entry, source), ""))
    if source is None:
        return _from_hub(entry, name, root, verify, note)
    key = fingerprint([source] if source.is_file() else key_files(entry, source), str(verify))
    cached = cache_folder() / "decoded" / f"{name}-{key}"
    if (dataset := open_entry(cached, name)) is None:
        note(f"decoding {name} from {source} (once, into {cached.parent})")
        _write(cached, entry, name, _pieces(entry, source, verify), entry.num_images if verify else None)
        dataset = open_entry(cached, name)
    assert dataset is not None
    return dataset


def data_folder(data_dir: str | Path | None) -> Path:
    """Return the folder to search for original files."""
    chosen = data_dir or os.environ.get("FEDNCV_DATA")
    folder = spec.expanded(chosen) if chosen else cache_folder() / "data"
    if chosen and not folder.is_dir():
        origin = "--data-dir" if data_dir else "FEDNCV_DATA"
        raise ValueError(f"the data folder {folder} does not exist; set another one in {origin}")
    return folder


def find(entry: Entry, root: Path) -> Path | None:
    """Return the folder with all of the entry's files, or an archive of them; None if neither exists."""
    for folder in entry.folders:
        if all(present(root / folder, name).exists() for name in entry.files):
            return root / folder
    return next((root / name for name in entry.archives if (root / name).is_file()), None)


def key_files(entry: Entry, folder: Path) -> list[Path]:
    return [present(folder, name) for name in entry.files]


def fingerprint(files: list[Path], salt: str) -> str:
    """Twelve hexadecimal digits that change with the name, size or time of any file."""
    text = hashlib.sha256(salt.encode())
    for path in files:
        about = path.stat()
        text.update(f"\n{path.name} {about.st_size} {about.st_mtime_ns}".encode())
    return text.hexdigest()[:12]


def _pieces(entry: Entry, source: Path, verify: bool) -> Iterator[Raw]:
    if source.is_dir():
        for path in key_files(entry, source):
            if verify and path.name in entry.md5 and path.is_file():
                archive.check_md5(path, entry.md5[path.name])
        yield from entry.read(source)
        return
    if verify and source.name in entry.md5:
        archive.check_md5(source, entry.md5[source.name])
    limit = max(archive.LIMIT, 4 * entry.num_images * math.prod(entry.shape))
    with archive.unpacked(source, cache_folder() / "unpacked", limit=limit) as folder:
        inner = find(entry, folder)
        if inner is None or not inner.is_dir():
            raise ValueError(f"{source} does not hold {', '.join(entry.files)}; it is the wrong archive")
        yield from entry.read(inner)


def hub_entry(name: str, verify: bool = True) -> Path:
    """Return the cache entry of a downloaded dataset."""
    return cache_folder() / "decoded" / f"{name}-{'hub' if verify else 'hub_unverified'}"


def _from_hub(entry: Entry, name: str, root: Path, verify: bool, note: Note) -> Dataset:
    cached = hub_entry(name, verify)
    if (dataset := open_entry(cached, name)) is not None:
        return dataset
    assert entry.hub is not None
    note(f"{name} is not in {root}; downloading {entry.hub.id} (once, into {cached.parent})")
    try:
        _write(cached, entry, name, hub.download(entry), entry.num_images if verify else None)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; or {remedy(entry, root)}") from None
    dataset = open_entry(cached, name)
    assert dataset is not None
    return dataset


def remedy(entry: Entry, root: Path) -> str:
    """Return a sentence with the files to add, and where."""
    files = ", ".join(entry.files)
    packed = f" (or the archive {root / entry.archives[0]})" if entry.archives else ""
    return f"put {files} into {root / entry.folders[0]}{packed}, from {entry.home}"


def _write(cached: Path, entry: Entry, name: str, pieces: Iterator[Raw], num_images: int | None) -> None:
    sound = checked(pieces, name=name, shape=entry.shape, num_classes=entry.num_classes)
    write_entry(cached, sound, shape=entry.shape, num_classes=entry.num_classes, num_images=num_images)


def _in_memory(entry: Entry, name: str) -> Dataset:
    (images, labels), *_ = checked(entry.read(Path()), name=name, shape=entry.shape, num_classes=entry.num_classes)
    mean, std = moments(images)
    return Dataset(name, torch.from_numpy(images), torch.from_numpy(labels), entry.num_classes, mean, std)
