"""``fedncv datasets``: list the datasets, which of them are available here, and where to put the files."""

import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fedncv import spec
from fedncv.cli.arguments import parse
from fedncv.data import DATASETS, Entry
from fedncv.data.cache import open_entry
from fedncv.data.load import data_folder, find, hub_entry, remedy
from fedncv.data.table import markdown

COLUMNS = ("name", "dataset", "shape", "classes", "samples", "available", "description")

OWN = {
    "folder:path=birds,size=64": "pictures, one subfolder per class",
    "table:path=patients.csv,y=outcome,owner=hospital": "a CSV or Parquet file, one row per sample",
    "leaf:path=femnist/data": "LEAF's JSON files (FEMNIST, Shakespeare, Sent140), users are owners",
    "my.module:patients:year=2020": "a function in your Python file or package that returns a fedncv.Dataset",
}
"""Forms of data that have no entry, by an example of each. `docs/datasets.md` has all their knobs."""


@dataclass(frozen=True, kw_only=True)
class Args:
    """List the datasets, or describe one of them."""

    name: Annotated[str, tyro.conf.Positional] = ""
    """Dataset to describe: its files, checksums, hub id and what was verified."""
    data_dir: str = ""
    """Folder with the original files; empty: $FEDNCV_DATA, then the cache folder."""
    markdown: bool = False
    """Print Table 2 of the paper, generated from the registry, for docs/datasets.md."""


def main(argv: list[str]) -> int:
    args = parse(Args, argv, command="datasets")
    if args.markdown:
        print(markdown(), end="")
        return 0
    root = data_folder(args.data_dir or None)
    if not args.name:
        show([row(name, entry, root) for name, entry in DATASETS.items()])
        print("\nYour own data:")
        for form, meaning in OWN.items():
            print(f"  {form:{max(map(len, OWN))}}  {meaning}")
        return 0
    if args.name not in DATASETS:
        raise ValueError(spec.nearest(args.name, DATASETS, what="dataset"))
    print("\n".join(about(args.name, DATASETS[args.name], root)))
    return 0


def at_hand(name: str, entry: Entry, root: Path) -> str:
    """Return where the dataset is, or "no" if loading needs a download."""
    if not entry.files:
        return "built in"
    if (source := find(entry, root)) is not None:
        return str(source)
    return "cache" if open_entry(hub_entry(name), name) else "no"


def row(name: str, entry: Entry, root: Path) -> tuple[str, ...]:
    shape = "x".join(map(str, entry.shape))
    numbers = f"{entry.num_classes}", f"{entry.num_images:,}"
    return name, entry.title, shape, *numbers, at_hand(name, entry, root), entry.description


def about(name: str, entry: Entry, root: Path) -> list[str]:
    """Return all facts about one dataset, one per line."""
    lines = [f"{label}: {value}" for label, value in zip(COLUMNS, row(name, entry, root), strict=True)]
    if entry.files:
        lines.append(f"manual installation: {remedy(entry, root)}")
    if entry.make:
        knobs = [f"{knob}={inspect.signature(entry.make).parameters[knob].default}" for knob in spec.knobs(entry.make)]
        lines.append(f"knobs: {name}:{','.join(knobs)}")
    if entry.hub:
        lines.append(f"hub id: {entry.hub.id} (downloaded if no files are found; needs the extra `hub`)")
    lines += [f"md5: {md5}  {file}" for file, md5 in entry.md5.items()]
    return [*lines, f"home: {entry.home}", f"verified: {entry.checked}"]


def show(rows: list[tuple[str, ...]]) -> None:
    """Print a table on a terminal, tab-separated lines elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*COLUMNS)
        for cells in rows:
            table.add_row(*cells)
        Console().print(table)
    else:
        for cells in [COLUMNS, *rows]:
            print("\t".join(cells))
