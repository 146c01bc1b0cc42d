"""Measure how unequal the clients are.

Shapes: n = samples, N = clients, K = classes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedncv.data.dataset import Dataset
from fedncv.data.owners import Floats, Indices, grouped
from fedncv.data.split import Clients

RECORDED = 100_000  # numbers of a partition that every run may store


class Statistics(NamedTuple):
    counts: Indices  # (N, K) samples of each class at each client
    sizes: Indices  # (N,) samples of each client
    entropy: Floats  # (N,) of the client's labels, in bits: 0 is one class, log2(K) is all classes alike
    distance: Floats  # (N,) earth mover's distance between the client's labels and the pool's, 0..1
    moved: int  # samples moved to reach the partition's minimum


def label_counts(labels: Indices, parts: Sequence[Indices], num_classes: int) -> Indices:
    """Return (N, K) counts of the samples of class k at client u."""
    parts = grouped(parts)
    client = np.repeat(np.arange(len(parts)), parts.sizes)
    flat = np.bincount(client * num_classes + labels[parts.flat], minlength=len(parts) * num_classes)
    return flat.reshape(len(parts), num_classes).astype(np.int64)


def holdings(dataset: Dataset, *parts: Sequence[Indices]) -> dict[str, Any]:
    """Return what a run records of its partition: samples of each class at each client, as JSON.

    Several parts of a client, such as training and test samples, are added up.

    Only the clients' sizes if targets are not classes, or if the table would be large. Of more clients than
    ``RECORDED``, only how many clients have each size.
    """
    sizes = np.sum([grouped(each).sizes for each in parts], axis=0)
    if len(sizes) > RECORDED:
        found, clients = np.unique(sizes, return_counts=True)
        return {"clients_of_size": [found.tolist(), clients.tolist()]}
    labels = dataset.labels.cpu().numpy()
    are_classes = labels.ndim == 1 and labels.dtype.kind in "iu" and labels.min(initial=0) >= 0
    num_classes = max(dataset.num_classes, 1 + int(labels.max(initial=0)))  # groups may be more than the outputs
    if not are_classes or len(sizes) * num_classes > RECORDED:
        return {"sizes": sizes.tolist()}
    counts = {"counts": np.sum([label_counts(labels, each, num_classes) for each in parts], axis=0).tolist()}
    return counts | ({"classes": list(dataset.classes)} if len(dataset.classes) == num_classes else {})


def entropy(counts_NK: Indices) -> Floats:
    """H_u = -Σ_k q_uk log2 q_uk with q_uk = counts_uk / n_u and 0 log 0 = 0.

    >>> entropy(np.array([[4, 0], [2, 2]])).tolist()
    [0.0, 1.0]
    """
    q_NK = counts_NK / counts_NK.sum(axis=1, keepdims=True)
    logs_NK = np.log2(q_NK, out=np.zeros_like(q_NK), where=q_NK > 0)
    result: Floats = np.abs(-(q_NK * logs_NK).sum(axis=1))
    return result


def distance(counts_NK: Indices) -> Floats:
    """Return the earth mover's distance of client u's labels to the pool's, with distance one between any two classes.

        EMD_u = 1/2 Σ_k | q_uk - q_k |     in [0, 1)

    Zhao et al., "Federated learning with non-IID data", 2018, leave out the 1/2.

    >>> distance(np.array([[4, 0], [0, 4]])).tolist()
    [0.5, 0.5]
    """
    q_NK = counts_NK / counts_NK.sum(axis=1, keepdims=True)
    pool_K = counts_NK.sum(axis=0) / counts_NK.sum()
    result: Floats = np.abs(q_NK - pool_K).sum(axis=1) / 2
    return result


def prior_accuracy(labels: Indices, clients: Clients, num_classes: int) -> float:
    """Return the accuracy of the label prior alone: every client predicts the majority class of its training samples.

        Σ_u (test samples of u in that class) / Σ_u (test samples of u)

    Ties go to the smaller class. A method below this number has learned nothing useful. NaN without test samples.
    """
    train_NK = label_counts(labels, clients.train, num_classes)
    test_NK = label_counts(labels, clients.test, num_classes)
    if not test_NK.sum():
        return float("nan")
    hits = test_NK[np.arange(len(test_NK)), train_NK.argmax(axis=1)]
    return float(hits.sum() / test_NK.sum())


def statistics(labels: Indices, parts: Sequence[Indices], num_classes: int) -> Statistics:
    """Return all statistics of one partition."""
    counts_NK = label_counts(labels, parts, num_classes)
    moved = getattr(parts, "moved", 0)
    return Statistics(counts_NK, counts_NK.sum(axis=1), entropy(counts_NK), distance(counts_NK), moved)
