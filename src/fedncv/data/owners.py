"""Building blocks of partitions: assign an owner to each sample, in linear time.

An unfinished partition is one array, ``owner_n``: the client of each sample. ``gather`` turns it into the
samples of each client; ``serve`` and ``fill`` distribute samples by the classes that clients request.

The samples of all clients are one array, cut where each client begins (``Grouped``): a million arrays of a few numbers
would take a gigabyte, and every loop over them a second.

Shapes: n = samples, N = clients, K = classes, S = samples to distribute, M = requested samples.
"""

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]


class Grouped(Sequence[Indices]):
    """Arrays of whole numbers, one per client, stored one after the other. Each is a view: do not write to it.

    >>> [part.tolist() for part in Grouped(np.array([4, 7, 5]), np.array([2, 0, 1]))]
    [[4, 7], [], [5]]
    """

    def __init__(self, flat: Indices, sizes: Indices) -> None:
        self.flat, self.sizes = flat, sizes
        self._ends = np.cumsum(sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, u: int) -> Indices: ...
    @overload
    def __getitem__(self, u: slice) -> "Grouped": ...
    def __getitem__(self, u: Any) -> Any:
        if isinstance(u, slice):
            return self.only(np.arange(len(self))[u])
        end = int(self._ends[u])  # raises IndexError beyond the last client, which ends a loop
        return self.flat[end - int(self.sizes[u]) : end]

    def only(self, clients: Indices) -> "Grouped":
        """Return the arrays of some clients, copied."""
        sizes = self.sizes[clients]
        before = np.repeat(self._ends[clients] - np.cumsum(sizes), sizes)
        return Grouped(self.flat[before + np.arange(len(before))], sizes)


class Parts(Grouped):
    """The samples of each client, and how many of them were moved to reach the minimum."""

    def __init__(self, flat: Indices, sizes: Indices, moved: int = 0) -> None:
        super().__init__(flat, sizes)
        self.moved = moved


def grouped(parts: Sequence[Indices]) -> Grouped:
    """Return the arrays as one, or the same object if they are already."""
    if isinstance(parts, Grouped):
        return parts
    flat = np.concatenate([*parts, np.empty(0, dtype=np.int64)]).astype(np.int64)
    return Grouped(flat, np.array([len(part) for part in parts], dtype=np.int64))


def check(labels: Indices, num_clients: int, min_samples: int) -> int:
    """Return the number of samples; raise ValueError if no partition is possible."""
    n = len(labels)
    if num_clients < 1:
        raise ValueError(f"{num_clients} clients; there must be at least one")
    if num_clients > n:
        raise ValueError(f"{num_clients} clients for {n} samples; use at most {n} clients")
    if min_samples < 1:
        raise ValueError(f"min_samples is {min_samples}; every client needs at least one sample")
    if num_clients * min_samples > n:
        raise ValueError(
            f"{num_clients} clients with min_samples={min_samples} need {num_clients * min_samples} samples, "
            f"there are {n}; use at most {n // min_samples} clients or min_samples={n // num_clients}"
        )
    return n


def check_classes(labels: Indices) -> None:
    """Raise ValueError unless labels are class numbers, for the partitions that use them."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(
            f"labels are {labels.dtype} of shape {labels.shape}, not one class number per sample; "
            "use the partition iid (or natural, if samples have owners), or give the dataset groups"
        )
    if labels.min() < 0:
        raise ValueError(f"label {labels.min()} is negative; labels go from 0 to the number of classes - 1")


def order_by(key_n: Indices, num_keys: int) -> Indices:
    """Return the stable order of keys in 0..num_keys-1, by counting: linear time instead of n log n.

    Transposing a sparse matrix with a single entry in each column is a counting sort.

    >>> order_by(np.array([1, 0, 1, 0]), 2).tolist()
    [1, 3, 0, 2]
    """
    n = len(key_n)
    matrix = csc_array((np.ones(n, dtype=np.int8), key_n, np.arange(n + 1)), shape=(num_keys, n))
    order_n: Indices = matrix.tocsr().indices.astype(np.int64)
    return order_n


def rank(key_n: Indices, num_keys: int) -> Indices:
    """Return how many earlier entries have the same key.

    >>> rank(np.array([2, 0, 2, 2, 0]), 3).tolist()
    [0, 0, 1, 2, 1]
    """
    counts = np.bincount(key_n, minlength=num_keys)
    rank_n = np.empty(len(key_n), dtype=np.int64)
    rank_n[order_by(key_n, num_keys)] = np.arange(len(key_n)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank_n


def by_class(labels: Indices, rng: np.random.Generator) -> Indices:
    """Return sample numbers ordered by class, shuffled within each class."""
    shuffled_n = rng.permutation(len(labels))
    return shuffled_n[order_by(labels[shuffled_n], int(labels.max()) + 1)]


def cut(order_n: Indices, counts: Indices, num_clients: int) -> Indices:
    """Return the owners if clients 0, 1, ... take ``counts`` samples in turn along ``order_n``, class after class.

    ``counts`` is (N,) or, for an order by class, (K, N).
    """
    owner_n = np.empty(len(order_n), dtype=np.int64)
    owner_n[order_n] = np.repeat(np.arange(counts.size) % num_clients, counts.ravel())
    return owner_n


def gather(owner_n: Indices, num_clients: int, *, moved: int = 0) -> Parts:
    """Return the samples of each client, sorted, from the owner of each sample."""
    return Parts(order_by(owner_n, num_clients), np.bincount(owner_n, minlength=num_clients), moved)


def fill(
    owner_n: Indices,
    labels: Indices,
    num_clients: int,
    min_samples: int,
    rng: np.random.Generator,
    wish_NK: Floats,
) -> Parts:
    """Give every client below ``min_samples`` the missing samples, and move no other sample.

    They come from clients above the minimum, chosen at random, and are distributed by ``wish_NK``. ``Parts.moved``
    is Σ_u max(0, min_samples - size_u), the smallest possible number.
    """
    lack_N = (min_samples - np.bincount(owner_n, minlength=num_clients)).clip(min=0)
    if not lack_N.any():
        return gather(owner_n, num_clients)
    shuffled_n = rng.permutation(len(owner_n))
    spare_S = shuffled_n[rank(owner_n[shuffled_n], num_clients) >= min_samples]
    filled_n = owner_n.copy()
    serve(filled_n, lack_N, wish_NK, spare_S, labels, rng)
    return gather(filled_n, num_clients, moved=int(lack_N.sum()))


def serve(
    owner_n: Indices,
    need_N: Indices,
    wish_NK: Floats,
    supply_S: Indices,
    labels: Indices,
    rng: np.random.Generator,
) -> None:
    """Give client u ``need_N[u]`` of the samples ``supply_S``, by classes drawn with weights ``wish_NK[u]``.

    Owners are written into ``owner_n``. All clients request at once, in random order. A request for a class that ran
    out is repeated among the remaining classes, and takes any class if all wanted ones ran out. Every turn serves all
    requests or empties a class, so there are at most K turns.
    """
    num_classes = wish_NK.shape[1]
    need_N = need_N.copy()
    left_K = np.bincount(labels[supply_S], minlength=num_classes)
    next_K = np.cumsum(left_K) - left_K
    supply_S = supply_S[order_by(labels[supply_S], num_classes)]
    while need_N.any():
        asking_A = np.flatnonzero(need_N)
        weight_AK = np.where(left_K > 0, wish_NK[asking_A], 0.0)
        weight_AK[weight_AK.sum(axis=1) == 0] = left_K
        class_M = draw_classes(weight_AK, need_N[asking_A], rng)
        turn_M = rng.permutation(len(class_M))
        class_M, client_M = class_M[turn_M], np.repeat(asking_A, need_N[asking_A])[turn_M]
        rank_M = rank(class_M, num_classes)
        served_M = rank_M < left_K[class_M]
        class_M, client_M, rank_M = class_M[served_M], client_M[served_M], rank_M[served_M]
        owner_n[supply_S[next_K[class_M] + rank_M]] = client_M
        given_K = np.bincount(class_M, minlength=num_classes)
        next_K, left_K = next_K + given_K, left_K - given_K
        need_N -= np.bincount(client_M, minlength=len(need_N))


def draw_classes(weight_AK: Floats, count_A: Indices, rng: np.random.Generator) -> Indices:
    """Draw count_a classes for row a with the row's weights; the rows one after another."""
    num_rows, num_classes = weight_AK.shape
    below_AK = np.cumsum(weight_AK, axis=1)
    below_AK /= below_AK[:, -1:]
    # Row a occupies [a, a + 1), so that one search in one sorted array serves all rows.
    edges = (below_AK + np.arange(num_rows)[:, None]).ravel()
    row_M = np.repeat(np.arange(num_rows), count_A)
    found_M = np.searchsorted(edges, row_M + rng.random(len(row_M)), side="right")
    # A point may be rounded up to a + 1; use the last class that row a can draw then.
    last_A = num_classes - 1 - (weight_AK[:, ::-1] > 0).argmax(axis=1)
    class_M: Indices = np.minimum(found_M - row_M * num_classes, last_A[row_M])
    return class_M
