"""Datasets by name, and who holds which samples.

dataset = load("digits")
parts   = divide(dataset, "dirichlet:alpha=0.1", num_clients=100, seed=0)
clients = split(parts, 0.25, seed=0)
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from fedncv import keys, spec
from fedncv.data.dataset import Dataset
from fedncv.data.partition import Parts, dirichlet, iid
from fedncv.data.raw import check, moments
from fedncv.data.registry import DATASETS, Entry
from fedncv.data.split import Clients, split
from fedncv.data.statistics import Statistics, label_counts, prior_accuracy, statistics

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "Clients",
    "Dataset",
    "Entry",
    "Parts",
    "Statistics",
    "divide",
    "label_counts",
    "load",
    "prior_accuracy",
    "split",
    "statistics",
]

PARTITIONS: Mapping[str, Callable[..., Parts]] = {
    "dirichlet": dirichlet,
    "iid": iid,
}


def load(name: str, data_dir: str | Path | None = None) -> Dataset:
    """The dataset of that name; ValueError with the nearest name, or with what to put where."""
    if name not in DATASETS:
        raise ValueError(spec.nearest(name, DATASETS, what="dataset"))
    entry = DATASETS[name]
    images, labels = check(entry.read(), name=name, num_classes=entry.num_classes)
    mean, std = moments(images)
    return Dataset(name, torch.from_numpy(images), torch.from_numpy(labels), entry.num_classes, mean, std)


def divide(dataset: Dataset, text: str, *, num_clients: int, seed: int) -> Parts:
    """The partition that ``text`` names ("dirichlet:alpha=0.1,min_samples=10") of ``dataset`` under ``seed``.

    Keyed by (seed, "partition"): the same for every method, engine and machine.
    """
    name, knobs = spec.parse(text, PARTITIONS, what="partition")
    rng = keys.generator(seed, "partition")
    return PARTITIONS[name](dataset.labels.numpy(), num_clients, rng, **knobs)
