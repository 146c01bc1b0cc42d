"""Partitions: who holds which samples.

A partition is a pure function of the labels and a generator,

    f(labels_n, num_clients, rng, *, knobs) -> Parts

and gives every client a sorted array of sample numbers. The arrays are disjoint, cover all samples, and
none is shorter than ``min_samples``. Every function takes time linear in samples + clients x classes.

Shapes: n = samples, N = clients, K = classes.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array

Indices = NDArray[np.int64]
Counts = NDArray[np.int64]
Floats = NDArray[np.float64]

MAX_DRAWN = 10_000_000  # random numbers spent on retries; a draw of N x K larger than this is never repeated


class Parts(list[Indices]):
    """The samples of each client, and how many of them were moved to reach the minimum."""

    def __init__(self, parts: list[Indices], moved: int = 0) -> None:
        super().__init__(parts)
        self.moved = moved


def iid(labels: Indices, num_clients: int, rng: np.random.Generator, *, min_samples: int = 1) -> Parts:
    """All samples shuffled and dealt out: sizes differ by at most one, labels only by chance."""
    n = check(labels, num_clients, min_samples)
    owner_n = np.empty(n, dtype=np.int64)
    owner_n[rng.permutation(n)] = np.arange(n) % num_clients
    return gather(owner_n, num_clients)


def dirichlet(
    labels: Indices,
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: float = 0.1,
    min_samples: int = 10,
    retries: int = 100,
) -> Parts:
    """Label skew: per class k, shuffle, draw p_k ~ Dirichlet(alpha 1_N), cut at floor(cumsum(p_k) n_k).

    Small ``alpha`` gives clients of few classes, large ``alpha`` equal clients; sizes vary too.
    The draw is repeated until every client has ``min_samples``, at most ``retries`` times. With many clients
    that never happens (1,000 clients, alpha 0.1: a few clients are empty in every draw), so then the best
    draw is kept and samples are moved: a client below the minimum gets what it lacks, class by class in its
    own proportions p_ku n_k where other clients can spare such samples, of any class otherwise.
    ``Parts.moved`` says how many; the function never fails to end.

    Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution", 2019, and the retry of
    Li et al., "Federated learning on non-IID data silos", ICDE 2022.
    """
    n = check(labels, num_clients, min_samples)
    check_alpha(alpha)
    if retries < 1:
        raise ValueError(f"retries is {retries}; it must be at least 1")
    n_K = np.bincount(labels)
    tries = max(1, min(retries, MAX_DRAWN // (num_clients * len(n_K))))
    best_KN, best_p_KN, best_lack = None, None, n + 1
    for _ in range(tries):
        p_KN = rng.dirichlet(np.full(num_clients, alpha), size=len(n_K))
        cuts_KN = np.floor(np.cumsum(p_KN, axis=1) * n_K[:, None]).astype(np.int64).clip(max=n_K[:, None])
        cuts_KN[:, -1] = n_K  # rounding may leave the last sum just below 1
        counts_KN = np.diff(cuts_KN, axis=1, prepend=0)
        lack = int((min_samples - counts_KN.sum(axis=0)).clip(min=0).sum())
        if lack < best_lack:
            best_KN, best_p_KN, best_lack = counts_KN, p_KN, lack
        if lack == 0:
            break
    assert best_KN is not None
    assert best_p_KN is not None
    owner_n = np.empty(n, dtype=np.int64)
    order_n = by_class(labels, rng)
    owner_n[order_n] = np.repeat(np.tile(np.arange(num_clients), len(n_K)), best_KN.ravel())
    if best_lack:
        owner_n = fill(owner_n, labels, num_clients, min_samples, rng, (best_p_KN * n_K[:, None]).T)
    return gather(owner_n, num_clients, moved=best_lack)


# The pieces that partitions are made of.


def check(labels: Indices, num_clients: int, min_samples: int) -> int:
    """The number of samples, or a ValueError for what no partition can do."""
    n = len(labels)
    if num_clients < 1:
        raise ValueError(f"{num_clients} clients; there must be at least one")
    if num_clients > n:
        raise ValueError(f"{num_clients} clients for {n} samples; take at most {n} clients")
    if min_samples < 1:
        raise ValueError(f"min_samples is {min_samples}; every client needs at least one sample")
    if num_clients * min_samples > n:
        raise ValueError(
            f"{num_clients} clients with min_samples={min_samples} need {num_clients * min_samples} samples, "
            f"there are {n}; take at most {n // min_samples} clients or min_samples={n // num_clients}"
        )
    if labels.min() < 0:
        raise ValueError(
            f"label {labels.min()} is negative; labels go from 0 to the number of classes less one"
        )
    return n


def check_alpha(alpha: float) -> None:
    if not 0 < alpha <= 1e6:
        raise ValueError(f"alpha is {alpha}; it must be above 0 and at most 1e6 (the larger, the more alike)")


def by_class(labels: Indices, rng: np.random.Generator) -> Indices:
    """Sample numbers class after class, shuffled within each class."""
    shuffled_n = rng.permutation(len(labels))
    return shuffled_n[order_by(labels[shuffled_n], int(labels.max()) + 1)]


def order_by(key_n: Indices, num_keys: int) -> Indices:
    """The stable order of keys in 0..num_keys-1, by counting: linear time, where a sort takes n log n.

    Transposing a sparse matrix with a single entry in each column is a counting sort.

    >>> order_by(np.array([1, 0, 1, 0]), 2).tolist()
    [1, 3, 0, 2]
    """
    n = len(key_n)
    matrix = csc_array((np.ones(n, dtype=np.int8), key_n, np.arange(n + 1)), shape=(num_keys, n))
    order_n: Indices = matrix.tocsr().indices.astype(np.int64)
    return order_n


def gather(owner_n: Indices, num_clients: int, *, moved: int = 0) -> Parts:
    """The samples of each client, sorted, from the owner of each sample."""
    order_n = order_by(owner_n, num_clients)
    ends_N = np.cumsum(np.bincount(owner_n, minlength=num_clients))
    return Parts([part.copy() for part in np.split(order_n, ends_N[:-1])], moved)


def rank(key_n: Indices, num_keys: int) -> Indices:
    """How many earlier entries have the same key.

    >>> rank(np.array([2, 0, 2, 2, 0]), 3).tolist()
    [0, 0, 1, 2, 1]
    """
    counts = np.bincount(key_n, minlength=num_keys)
    rank_n = np.empty(len(key_n), dtype=np.int64)
    rank_n[order_by(key_n, num_keys)] = np.arange(len(key_n)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank_n


def fill(
    owner_n: Indices,
    labels: Indices,
    num_clients: int,
    min_samples: int,
    rng: np.random.Generator,
    wish_NK: Floats,
) -> Indices:
    """New owners in which every client has ``min_samples``, with as few samples moved as possible.

    A client with more than the minimum can spare the rest, chosen at random. One with less asks for
    ``min_samples - size`` classes drawn with weights ``wish_NK[u]`` and gets spare samples of those classes
    while there are some, any other spare sample after that. Clients ask in random order.
    """
    owner_n, n = owner_n.copy(), len(owner_n)
    shuffled_n = rng.permutation(n)
    spare_S = shuffled_n[rank(owner_n[shuffled_n], num_clients) >= min_samples]  # in random order already
    lack_N = (min_samples - np.bincount(owner_n, minlength=num_clients)).clip(min=0)
    asking_A = rng.permutation(np.flatnonzero(lack_N))
    slot_M = np.repeat(asking_A, lack_N[asking_A])  # the client behind each missing sample
    class_M = draw_classes(wish_NK[asking_A], lack_N[asking_A], rng)

    # The j-th wish for class k gets the j-th spare sample of class k.
    num_classes = wish_NK.shape[1]
    spare_class_S, wish_rank_M = labels[spare_S], rank(class_M, num_classes)
    have_K = np.bincount(spare_class_S, minlength=num_classes)
    first_K = np.cumsum(have_K) - have_K
    sorted_S = spare_S[order_by(spare_class_S, num_classes)]
    granted_M = wish_rank_M < have_K[class_M]
    given = sorted_S[(first_K[class_M] + wish_rank_M)[granted_M]]
    owner_n[given] = slot_M[granted_M]
    left = spare_S[~np.isin(spare_S, given)]
    owner_n[left[: int((~granted_M).sum())]] = slot_M[~granted_M]
    return owner_n


def draw_classes(weight_AK: Floats, count_A: Indices, rng: np.random.Generator) -> Indices:
    """count_a classes for each row a, drawn with the row's weights (equal ones where all are zero)."""
    total_A1 = weight_AK.sum(axis=1, keepdims=True)
    weight_AK = np.where(total_A1 > 0, weight_AK, 1.0)
    below_AK = np.cumsum(weight_AK, axis=1)
    below_AK /= below_AK[:, -1:]
    # Row a occupies [a, a + 1), so that one sorted search serves all rows.
    row_M = np.repeat(np.arange(len(count_A)), count_A)
    edges = (below_AK + np.arange(len(count_A))[:, None]).ravel()
    found_M = np.searchsorted(edges, row_M + rng.random(len(row_M)), side="right")
    class_M: Indices = (found_M - row_M * weight_AK.shape[1]).clip(0, weight_AK.shape[1] - 1)
    return class_M
