"""Load datasets by name and divide them among clients.

dataset = load("digits")
parts   = divide(dataset, "dirichlet:alpha=0.1", num_clients=100, seed=0)
clients = split(parts, 0.25, seed=0)
"""

from collections.abc import Callable, Mapping

import numpy as np

from fedncv import keys, spec
from fedncv.data.dataset import Dataset
from fedncv.data.leaf import read_leaf
from fedncv.data.load import FORMS, absolute_name, check_name, load, load_folder
from fedncv.data.own import from_arrays, from_table, from_torch
from fedncv.data.owners import Parts
from fedncv.data.partition import (
    classes,
    dirichlet,
    dirichlet_equal,
    dirichlet_sizes,
    iid,
    lognormal_sizes,
    natural,
    shards,
)
from fedncv.data.registry import DATASETS, Entry
from fedncv.data.scale import standardised
from fedncv.data.sound import check_samples
from fedncv.data.split import Clients, split
from fedncv.data.statistics import Statistics, holdings, label_counts, prior_accuracy, statistics
from fedncv.data.stream import Stream, arrivals
from fedncv.data.tabular import read_table

__all__ = [
    "DATASETS",
    "FORMS",
    "PARTITIONS",
    "STREAMS",
    "Clients",
    "Dataset",
    "Entry",
    "Parts",
    "Statistics",
    "Stream",
    "absolute_name",
    "arrivals",
    "check_name",
    "check_samples",
    "divide",
    "from_arrays",
    "from_table",
    "from_torch",
    "holdings",
    "label_counts",
    "load",
    "load_folder",
    "owners_note",
    "prior_accuracy",
    "read_leaf",
    "read_table",
    "split",
    "standardised",
    "statistics",
]

PARTITIONS: Mapping[str, Callable[..., Parts]] = {
    "dirichlet": dirichlet,
    "dirichlet_equal": dirichlet_equal,
    "dirichlet_sizes": dirichlet_sizes,
    "lognormal_sizes": lognormal_sizes,
    "classes": classes,
    "shards": shards,
    "iid": iid,
    "natural": natural,
}

STREAMS: Mapping[str, Callable[..., Stream]] = {"arrivals": arrivals}


def owners_note(dataset: Dataset, partition: str, clients: int) -> str:
    """Return a line if the samples have owners that are not the clients one by one; otherwise an empty text."""
    if dataset.owners is None:
        return ""
    owners = len(np.unique(dataset.owners.cpu().numpy()))
    if partition.partition(":")[0] == "natural":
        merged = f"note: {owners:,} owners are merged into {clients:,} clients; --clients {owners} keeps each apart"
        return merged if owners > clients else ""
    return (
        f"note: {dataset.name} has {owners:,} owners, but the partition is {partition}; "
        "--partition natural makes the owners the clients"
    )


def divide(dataset: Dataset, text: str, *, num_clients: int, seed: int) -> Parts:
    """Divide ``dataset`` by the partition ``text`` ("dirichlet:alpha=0.1,min_samples=10") under ``seed``.

    Keyed by (seed, "partition"): the same for every method, engine and machine.
    """
    name, knobs = spec.parse(text, PARTITIONS, what="partition")
    column = dataset.labels
    if name == "natural":  # the only partition that uses another column
        if dataset.owners is None:
            raise ValueError(f"{dataset.name} does not say who owns its samples; use another partition")
        column = dataset.owners
    return PARTITIONS[name](column.cpu().numpy(), num_clients, keys.generator(seed, "partition"), **knobs)
