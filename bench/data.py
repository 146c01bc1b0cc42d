"""Time the loading and dividing of data, and plot the gallery of partitions.

    python bench/data.py                    times: every available dataset, every partition at four sizes
    python bench/data.py --figures docs/figures

The largest case, 1,000,000 samples over 100,000 clients, must take less than 10 s for every partition; otherwise the
exit code is not 0.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedncv import keys
from fedncv.data import DATASETS, PARTITIONS, divide, load, split, statistics
from fedncv.data.load import data_folder, find
from fedncv.data.picture import draw
from fedncv.data.stream import arrivals

T = TypeVar("T")
LIMIT_SECONDS = 10.0
CASES: list[tuple[int, int, dict[str, int]]] = [  # samples, clients, knobs
    (60_000, 100, {}),
    (1_000_000, 1_000, {}),
    (1_000_000, 100_000, {"min_samples": 1}),
    (1_000_000, 100_000, {"min_samples": 10}),
]
GALLERY = {
    "dirichlet": "dirichlet:alpha=0.1",
    "dirichlet_equal": "dirichlet_equal:alpha=0.1",
    "dirichlet_sizes": "dirichlet_sizes:alpha=1",
    "lognormal_sizes": "lognormal_sizes:sigma=1",
    "classes": "classes:k=2",
    "shards": "shards:per_client=2",
    "iid": "iid",
}


def timed(work: Callable[..., T], *args: Any, **knobs: Any) -> tuple[float, T]:
    started = time.perf_counter()
    result = work(*args, **knobs)
    return time.perf_counter() - started, result


def load_times() -> None:
    """Time the first load (decode and write the cache) and the second load, in a temporary cache."""
    root = data_folder(None)
    print(f"{'dataset':<16}{'images':>9}{'first load s':>14}{'second load s':>15}")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FEDNCV_CACHE"] = cache
        for name, entry in DATASETS.items():
            if entry.files and find(entry, root) is None:
                continue
            first, _ = timed(load, name, root, note=lambda _: None)
            second, data = timed(load, name, root, note=lambda _: None)
            print(f"{name:<16}{len(data.y):>9,}{first:>14.3f}{second:>15.4f}")


def partition_times() -> float:
    """Print the seconds of every partition at every size; return the longest."""
    longest = 0.0
    head = f"{'partition':<18}{'samples':>11}{'clients':>9}{'seconds':>9}{'smallest':>10}{'largest':>9}{'moved':>9}"
    print(f"\n{head}")
    for n, num_clients, knobs in CASES:
        labels = np.random.default_rng(0).integers(0, 10, n)
        owners = np.random.default_rng(1).permutation(np.arange(n) % num_clients)  # equally many each
        case = f"{n:>11,}{num_clients:>9,}"
        for name, partition in PARTITIONS.items():
            column = owners if name == "natural" else labels
            seconds, parts = timed(partition, column, num_clients, keys.generator(0, "bench"), **knobs)
            sizes = [len(part) for part in parts]
            print(f"{name:<18}{case}{seconds:>9.2f}{min(sizes):>10,}{max(sizes):>9,}{parts.moved:>9,}")
            longest = max(longest, seconds)
        parts = PARTITIONS["iid"](labels, num_clients, keys.generator(0, "bench"))
        seconds, clients = timed(split, parts, 0.25, 0)
        print(f"{'split':<18}{case}{seconds:>9.2f}")
        seconds, _ = timed(arrivals, clients.train, labels, 0, order="by_class")
        print(f"{'stream by class':<18}{case}{seconds:>9.2f}")
        seconds, _ = timed(statistics, labels, parts, 10)
        print(f"{'statistics':<18}{case}{seconds:>9.2f}")
    return longest


def figures(folder: Path) -> None:
    """Plot each partition of the digits over 50 clients."""
    digits = load("digits")
    for name, text in GALLERY.items():
        parts = divide(digits, text, num_clients=50, seed=0)
        stats = statistics(digits.labels.numpy(), parts, 10)
        draw(stats, f"digits, {text}, 50 clients, seed 0", folder / f"partition_{name}.png")
        print(folder / f"partition_{name}.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, help="only plot the gallery, into this folder")
    args = parser.parse_args()
    if args.figures:
        figures(args.figures)
        return 0
    load_times()
    longest = partition_times()
    print(f"\nslowest partition: {longest:.2f} s (limit {LIMIT_SECONDS:.0f} s)")
    return int(longest > LIMIT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
