"""``fedncv partition``: show which client holds which samples, as numbers and as a picture."""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedncv.cli.arguments import parse
from fedncv.config import short_name
from fedncv.data import Clients, Dataset, Statistics, divide, load, prior_accuracy, split, statistics
from fedncv.data.owners import Floats, Indices
from fedncv.data.picture import draw

SIZES = ("clients", "samples per client", "samples moved to reach the minimum", "training, test samples")


@dataclass(frozen=True, kw_only=True)
class Args:
    """Draw how many samples of each class each client holds."""

    data: str = "digits"
    """Dataset name, folder:path=..., table:path=...,y=..., leaf:path=..., or package.module:function.
    `fedncv datasets` lists them."""
    data_dir: str = ""
    """Folder with the original files; empty: $FEDNCV_DATA, then the cache folder."""
    partition: str = "dirichlet:alpha=0.1"
    """dirichlet, dirichlet_equal, dirichlet_sizes, lognormal_sizes, classes, shards, iid or natural; with
    knobs: dirichlet:alpha=0.1,min_samples=10."""
    clients: int = 100
    """Number of clients, at least 1."""
    test_share: float = 0.25
    """Share of each client's samples kept for testing, at least 0 and below 1."""
    seed: int = 0
    """Seed of the partition and of the split."""
    out: Path = Path("partition.png")
    """File for the picture; its suffix sets the format (png, svg, pdf)."""


def main(argv: list[str]) -> int:
    args = parse(Args, argv, command="partition")
    if not 0 <= args.seed < 2**64:
        raise ValueError(f"seed must be from 0 to 2^64 - 1, not {args.seed}")
    if not args.out.suffix:
        raise ValueError(f"--out {args.out} has no suffix; end it with .png, .svg or .pdf")
    dataset = load(args.data, args.data_dir or None)
    parts = divide(dataset, args.partition, num_clients=args.clients, seed=args.seed)
    clients = split(parts, args.test_share, args.seed)
    is_regression = dataset.labels.is_floating_point()
    if is_regression:  # one class, so that only the sizes differ
        dataset = dataset._replace(groups=torch.zeros(len(dataset.y), dtype=torch.int64), num_classes=1)
    stats = statistics(dataset.labels.numpy(), parts, dataset.num_classes)
    draw(stats, f"{short_name(args.data)}, {args.partition}, {args.clients:,} clients, seed {args.seed}", args.out)
    show([row for row in summary(dataset, stats, clients) if not is_regression or row[0] in SIZES])
    print(f"picture: {args.out}")
    return 0


def summary(dataset: Dataset, stats: Statistics, clients: Clients) -> list[tuple[str, str]]:
    """Return the lines to print, each a name and a value."""
    held = (stats.counts > 0).sum(axis=1)
    prior = prior_accuracy(dataset.labels.numpy(), clients, dataset.num_classes)
    return [
        ("samples", f"{stats.sizes.sum():,} of {dataset.num_classes} classes"),
        ("clients", f"{len(stats.sizes):,}"),
        ("samples per client", spread(stats.sizes, "{:,.0f}")),
        ("classes per client", spread(held, "{:,.0f}")),
        ("label entropy (bits)", f"{spread(stats.entropy, '{:.2f}')}, at most {np.log2(dataset.num_classes):.2f}"),
        ("earth mover's distance to the pool", spread(stats.distance, "{:.2f}")),
        ("samples moved to reach the minimum", f"{stats.moved:,}"),
        ("training, test samples", f"{clients.sizes.sum():,}, {clients.test_sizes.sum():,}"),
        ("accuracy of the label prior alone", f"{100 * prior:.2f} %"),
    ]


def spread(values: Indices | Floats, form: str) -> str:
    low, middle, high = np.quantile(values, [0, 0.5, 1])
    return f"{form.format(low)} to {form.format(high)}, median {form.format(middle)}"


def show(rows: list[tuple[str, str]]) -> None:
    """Print a table on a terminal, plain lines elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(show_header=False)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
    else:
        for name, value in rows:
            print(f"{name}: {value}")
