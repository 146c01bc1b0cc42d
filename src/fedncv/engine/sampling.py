"""Sample the clients of a round, with the inclusion probabilities that the estimators divide by.

Every scheme draws without replacement and has exact first-order inclusion probabilities:

    uniform     pi_u = m / N
    poisson     pi_u = m / N, each client independently of the others: m on average, sometimes nobody
    weighted    pi_u = min(1, t n_u), t such that they sum to m          (systematic sampling)
    available   u is reachable with probability a_u; m of the reachable, or all of them if fewer:
                pi_u = a_u E[min(1, m / (1 + K_u))],  K_u = how many others are reachable
"""

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Probabilities = NDArray[np.float64]
FEW = 20_000  # clients; with more, a sum over all pairs takes minutes
NODES = 64
NEVER = 745  # exp(-745) is 0 in double precision


def uniform_inclusion(num_clients: int, m: int) -> Probabilities:
    return np.full(num_clients, m / num_clients)


def draw_uniform(rng: np.random.Generator, num_clients: int, m: int) -> Ids:
    """Draw m clients. From very many they are drawn one by one, because a permutation of all would take longer."""
    if num_clients > FEW:
        return np.sort(rng.choice(num_clients, m, replace=False, shuffle=False))
    return np.sort(rng.permutation(num_clients)[:m])


def draw_poisson(rng: np.random.Generator, num_clients: int, m: int) -> Ids:
    """Draw each client with probability m / N, independently of the others."""
    return np.flatnonzero(rng.random(num_clients) < m / num_clients)


def weighted_inclusion(sizes: NDArray[np.float64], m: int) -> Probabilities:
    """Return min(1, t n_u): the largest clients are always drawn, and the others share the remaining probability."""
    certain = np.zeros(len(sizes), dtype=bool)
    while True:
        rest = sizes * ~certain
        pi = np.where(certain, 1.0, (m - certain.sum()) * rest / max(rest.sum(), np.finfo(float).tiny))
        over = (pi >= 1) & ~certain
        if not over.any():
            return pi
        certain |= over


def draw_systematic(rng: np.random.Generator, inclusion: Probabilities) -> Ids:
    """Return a fixed-size draw with exactly these inclusion probabilities (which sum to a whole number).

    Clients in random order are put on a line, each as long as its probability; marks at v, v + 1, v + 2, … draw them.
    """
    order = rng.permutation(len(inclusion))
    return np.sort(order[systematic(inclusion[order], rng.random())])


def systematic(inclusion: Probabilities, v: float) -> Ids:
    """Return the places on the line that the marks v, v + 1, … hit."""
    ends = np.cumsum(inclusion)
    ends[-1] = round(ends[-1])  # the lengths sum to m; rounding must not lose the last mark
    hits = np.ceil(ends - v) - np.ceil(np.concatenate([[0.0], ends[:-1]]) - v)
    return np.flatnonzero(hits > 0)


def available_inclusion(rates: Probabilities, m: int) -> Probabilities:
    """Return a_u E[min(1, m / (1 + K_u))], K_u = how many others are reachable.

    By a sum in time N². For more than ``FEW`` clients by an integral in time N, if at least m of them are always
    reachable: P(K_u < m - 1) <= exp(-(mu - m)² / 2 mu), mu = sum_v a_v (Chernoff), is 0 in double precision.
    """
    mu = float(rates.sum())
    enough = mu > m and (mu - m) ** 2 / (2 * mu) > NEVER
    return _by_integral(rates, m) if len(rates) > FEW and enough else _by_fourier(rates, m)


def _by_integral(rates: Probabilities, m: int) -> Probabilities:
    """Return a_u m E[1 / (1 + K_u)], which is the same if at least m clients are always reachable.

        E[1 / (1 + K_u)] = ∫_0^1 E[s^K_u] ds,   E[s^K_u] = prod_{v != u} (1 - a_v (1 - s))

    With s = 1 - t / mu the product is close to exp(-t), and Gauss-Laguerre's nodes integrate it to rounding.
    """
    mu = float(rates.sum())
    expected = np.zeros(len(rates))
    for t, weight in zip(*np.polynomial.laguerre.laggauss(NODES), strict=True):
        if t >= mu:
            continue
        logs = np.log1p(-rates * (t / mu))
        expected += weight / mu * np.exp(t + logs.sum() - logs)
    return rates * np.clip(m * expected, 0.0, 1.0)


def _by_fourier(rates: Probabilities, m: int) -> Probabilities:
    """Return a_u E[min(1, m / (1 + K_u))], with the exact distribution of K_u (a Poisson binomial, by a Fourier sum).

    The characteristic function of all clients except u is a product over the others. It is computed from the products
    before and after u, because a division would fail if a factor is zero.
    """
    n = len(rates)
    share = np.minimum(1.0, m / np.arange(1, n + 1))  # by the number of others reachable, 0..n-1
    transform = np.fft.fft(share) / n
    expected = np.zeros(n)
    chunk = max(1, 4_000_000 // n)  # frequencies at a time: bounded memory
    for first in range(0, n, chunk):
        frequency = np.arange(first, min(first + chunk, n))
        root = np.exp(2j * np.pi * frequency / n)
        factor = 1 - rates[:, None] + rates[:, None] * root
        ones = np.ones((1, len(frequency)))
        before = np.concatenate([ones, np.cumprod(factor[:-1], axis=0)])
        after = np.concatenate([np.cumprod(factor[:0:-1], axis=0)[::-1], ones])
        expected += (before * after * transform[frequency]).sum(axis=1).real
    return rates * np.clip(expected, 0.0, 1.0)


def draw_available(rng: np.random.Generator, rates: Probabilities, m: int) -> Ids:
    reachable = np.flatnonzero(rng.random(len(rates)) < rates)
    return np.sort(rng.permutation(reachable)[:m])
