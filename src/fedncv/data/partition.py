"""Partitions: divide samples among clients.

A partition is a pure function of the labels and a generator,

    f(labels_n, num_clients, rng, *, knobs) -> Parts

and gives every client a sorted array of sample numbers. The arrays are disjoint, cover all samples, and
none is shorter than ``min_samples``: if the rule alone gives fewer, samples are moved (``owners.fill``), and
``Parts.moved`` counts them. Every function takes time linear in samples + clients x classes.

Shapes: n = samples, N = clients, K = classes.
"""

import heapq

import numpy as np

from fedncv.data.owners import Floats, Indices, Parts, by_class, check, check_classes, cut, fill, gather, serve

MAX_DRAWN = 10_000_000  # random numbers used for retries; a draw of N x K larger than this is never repeated


def iid(labels: Indices, num_clients: int, rng: np.random.Generator, *, min_samples: int = 1) -> Parts:
    """Shuffle and distribute all samples: sizes differ by at most one, labels only by chance."""
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
    The draw is repeated until every client has ``min_samples``, at most ``retries`` times. With many clients that
    never happens (1,000 clients, alpha 0.1: a few are empty in every draw). Then the draw with the fewest missing
    samples is kept, and samples are moved to clients below the minimum: in the client's own class proportions
    p_ku n_k if other clients have more than the minimum of such samples, of any class otherwise.

    Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution", 2019; the retry is that of
    Li et al., "Federated learning on non-IID data silos", ICDE 2022, which does not always end.
    """
    check(labels, num_clients, min_samples)
    check_classes(labels)
    check_alpha(alpha)
    if retries < 1:
        raise ValueError(f"retries is {retries}; it must be at least 1")
    n_K1 = np.bincount(labels)[:, None]
    tries = max(1, min(retries, MAX_DRAWN // (num_clients * len(n_K1))))
    best: tuple[int, Indices, Floats] | None = None
    for _ in range(tries):
        p_KN = rng.dirichlet(np.full(num_clients, alpha), size=len(n_K1))
        cuts_KN = np.floor(np.cumsum(p_KN, axis=1) * n_K1).astype(np.int64).clip(max=n_K1)
        cuts_KN[:, -1:] = n_K1  # rounding may leave the last sum just below 1
        counts_KN = np.diff(cuts_KN, axis=1, prepend=0)
        lack = int((min_samples - counts_KN.sum(axis=0)).clip(min=0).sum())
        if best is None or lack < best[0]:
            best = lack, counts_KN, p_KN
        if lack == 0:
            break
    assert best is not None
    owner_n = cut(by_class(labels, rng), best[1], num_clients)
    return fill(owner_n, labels, num_clients, min_samples, rng, (best[2] * n_K1).T)


def dirichlet_equal(
    labels: Indices,
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: float = 0.1,
    min_samples: int = 1,
) -> Parts:
    """Label skew at equal sizes: client u draws q_u ~ Dirichlet(alpha K p) and its samples' classes from q_u.

    p are the pool's class shares, so E[q_u] = p and large ``alpha`` is IID; with equal classes it is
    Dirichlet(alpha 1_K). Sizes differ by at most one. A client that requests a class that ran out requests another
    one (Hsu et al. 2019 go client by client, so the last clients get the remaining classes).
    """
    n = check(labels, num_clients, min_samples)
    check_classes(labels)
    check_alpha(alpha)
    n_K = np.bincount(labels)
    held = np.flatnonzero(n_K)
    wish_NK = np.zeros((num_clients, len(n_K)))
    wish_NK[:, held] = rng.dirichlet(alpha * len(held) * n_K[held] / n, size=num_clients)
    owner_n = np.empty(n, dtype=np.int64)
    serve(owner_n, equal_sizes(n, num_clients, rng), wish_NK, rng.permutation(n), labels, rng)
    return gather(owner_n, num_clients)


def dirichlet_sizes(
    labels: Indices,
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: float = 1.0,
    min_samples: int = 10,
) -> Parts:
    """Quantity skew: sizes ~ n Dirichlet(alpha 1_N), labels as in the pool. Small ``alpha``: a few large clients."""
    check(labels, num_clients, min_samples)
    check_alpha(alpha)
    return of_sizes(labels, rng.dirichlet(np.full(num_clients, alpha)), min_samples, rng)


def lognormal_sizes(
    labels: Indices,
    num_clients: int,
    rng: np.random.Generator,
    *,
    sigma: float = 1.0,
    min_samples: int = 10,
) -> Parts:
    """Quantity skew: sizes ~ exp(sigma z), z normal, scaled to n; labels as in the pool. sigma = 0 is IID."""
    check(labels, num_clients, min_samples)
    if not 0 <= sigma <= 20:
        raise ValueError(f"sigma is {sigma}; it must be at least 0 (equal sizes) and at most 20")
    return of_sizes(labels, np.exp(sigma * rng.standard_normal(num_clients)), min_samples, rng)


def classes(
    labels: Indices,
    num_clients: int,
    rng: np.random.Generator,
    *,
    k: int = 2,
    min_samples: int = 1,
) -> Parts:
    """Give every client ``k`` classes, and divide every class equally among its clients.

    First the classes are assigned in random order, one per client in turns, so that each has a client. A client's
    other classes are drawn at random. Only moved samples can be of other classes, and only if no client has more
    than the minimum of the client's own classes.
    """
    check(labels, num_clients, min_samples)
    check_classes(labels)
    n_K = np.bincount(labels)
    held = np.flatnonzero(n_K)
    if not 1 <= k <= len(held):
        raise ValueError(f"k is {k}; the data has {len(held)} classes, so use 1 to {len(held)}")
    if num_clients * k < len(held):
        raise ValueError(
            f"{num_clients} clients of {k} classes hold at most {num_clients * k} of {len(held)} classes; "
            f"use k={-(-len(held) // num_clients)} or more"
        )
    score_NK = np.full((num_clients, len(n_K)), np.inf)
    score_NK[:, held] = rng.random((num_clients, len(held)))
    turn = np.arange(max(num_clients, len(held)))
    score_NK[turn % num_clients, rng.permutation(held)[turn % len(held)]] = -1.0
    holds_NK = np.zeros(score_NK.shape, dtype=bool)
    np.put_along_axis(holds_NK, np.argpartition(score_NK, k - 1, axis=1)[:, :k], True, axis=1)
    return fill(
        cut(by_class(labels, rng), shares(holds_NK.T.astype(np.float64), n_K), num_clients),
        labels,
        num_clients,
        min_samples,
        rng,
        holds_NK.astype(np.float64),
    )


def shards(
    labels: Indices,
    num_clients: int,
    rng: np.random.Generator,
    *,
    per_client: int = 2,
    min_samples: int = 1,
) -> Parts:
    """Sort samples by label, cut them into N ``per_client`` equal shards, and distribute these at random.

    McMahan et al., "Communication-efficient learning of deep networks from decentralized data", 2017.
    """
    n = check(labels, num_clients, min_samples)
    check_classes(labels)
    num_shards = num_clients * per_client
    if not 1 <= per_client <= n // num_clients:
        raise ValueError(
            f"per_client is {per_client}; {n} samples over {num_clients} clients give "
            f"1 to {n // num_clients} shards per client"
        )
    dealt = rng.permutation(num_shards) % num_clients
    order_n = by_class(labels, rng)
    owner_n = np.empty(n, dtype=np.int64)
    owner_n[order_n] = dealt[np.arange(n) * num_shards // n]
    num_classes = int(labels.max()) + 1
    held = np.bincount(owner_n * num_classes + labels, minlength=num_clients * num_classes)
    wish_NK = held.reshape(num_clients, num_classes).astype(np.float64)
    return fill(owner_n, labels, num_clients, min_samples, rng, wish_NK)


def natural(column: Indices, num_clients: int, rng: np.random.Generator, *, min_samples: int = 1) -> Parts:
    """Natural clients: samples with the same value of ``column`` (a writer, a device) stay together.

    With as many clients as values, each client gets one value. With fewer clients, values are merged, the largest
    first, each to the client with the fewest samples so far, ties at random. No value is ever split, so the function
    raises ValueError if a client stays below ``min_samples``.
    """
    values, value_n, sizes = np.unique(column, return_inverse=True, return_counts=True)
    if num_clients > len(values):
        raise ValueError(f"{num_clients} clients, but the data has {len(values)} natural ones; use at most as many")
    check(value_n, num_clients, min_samples)
    if num_clients == len(values):
        client_V = np.arange(num_clients)
    else:
        client_V = np.empty(len(values), dtype=np.int64)
        heap = [(0, turn, client) for client, turn in enumerate(rng.permutation(num_clients).tolist())]
        heapq.heapify(heap)
        for value in np.argsort(-sizes, kind="stable"):
            held, turn, client = heap[0]
            client_V[value] = client
            heapq.heapreplace(heap, (held + int(sizes[value]), turn, client))
    parts = gather(client_V[value_n], num_clients)
    least = int(parts.sizes.argmin())
    if parts.sizes[least] < min_samples:
        raise ValueError(
            f"natural client {least} has {len(parts[least])} samples, min_samples is {min_samples}; "
            "use fewer clients, so that small ones are merged, or a smaller min_samples"
        )
    return parts


def check_alpha(alpha: float) -> None:
    if not 0 < alpha <= 1e6:
        raise ValueError(f"alpha is {alpha}; it must be above 0 and at most 1e6 (larger: clients more alike)")


def equal_sizes(n: int, num_clients: int, rng: np.random.Generator) -> Indices:
    """Return n / N for each client; the n mod N remaining samples go to random clients."""
    sizes_N: Indices = n // num_clients + (rng.permutation(num_clients) < n % num_clients).astype(np.int64)
    return sizes_N


def shares(weight_KN: Floats, n_K: Indices) -> Indices:
    """Return counts (K, N) of class k's n_k samples in proportion to the weights: floor of the running sums."""
    total_KN = np.cumsum(weight_KN, axis=1)
    with np.errstate(invalid="ignore"):
        cuts_KN = np.nan_to_num(total_KN / total_KN[:, -1:]) * n_K[:, None]
    # 1e-9: 3 * (1 / 3) may be just below 1
    floors_KN: Indices = np.floor(cuts_KN + 1e-9).astype(np.int64)
    return np.diff(floors_KN, axis=1, prepend=np.int64(0))


def of_sizes(labels: Indices, weight_N: Floats, min_samples: int, rng: np.random.Generator) -> Parts:
    """Assign random samples in sizes proportional to the weights, raised to the minimum if below it.

        s_u = n w_u / Σw,   size_u = min + (s_u - min)+ (n - N min) / Σ_v (s_v - min)+

    so large clients give up samples in proportion to their size above the minimum.
    """
    n, num_clients = len(labels), len(weight_N)
    surplus_N = (n * weight_N / weight_N.sum() - min_samples).clip(min=0)
    rest = n - num_clients * min_samples
    if not surplus_N.any():
        surplus_N = np.ones(num_clients)
    sizes_N = min_samples + shares(surplus_N[None], np.array([rest]))[0]
    return gather(cut(rng.permutation(n), sizes_N, num_clients), num_clients)
