"""Compute keyed orders for all clients at once.

``keys.permutation`` orders the samples of one client; a hundred thousand such calls take minutes. Here one Philox
call gives the same numbers for all clients, and one sort the same orders.
"""

from collections.abc import Iterator

import numpy as np
import torch

from fedncv import keys
from fedncv.data.owners import Indices

BLOCK = 1 << 14  # numbers that stay in a processor's cache


def places(sizes_N: Indices) -> tuple[Indices, Indices]:
    """Return the client of each sample, and its place 0, 1, ... within that client.

    >>> [a.tolist() for a in places(np.array([2, 3]))]
    [[0, 0, 1, 1, 1], [0, 1, 0, 1, 2]]
    """
    client_n = np.repeat(np.arange(len(sizes_N)), sizes_N)
    return client_n, np.arange(len(client_n)) - (np.cumsum(sizes_N) - sizes_N)[client_n]


def by_size(sizes_N: Indices) -> Iterator[Indices]:
    """Yield for each size the places (K, size) of the samples of the K clients of that size, among those of all.

    Rows of one length can be sorted at once, several times as fast as one sort over all clients.

    >>> [places.tolist() for places in by_size(np.array([2, 1, 2]))]
    [[[2]], [[0, 1], [3, 4]]]
    """
    sizes, counts = np.unique(sizes_N, return_counts=True)
    first_N = np.cumsum(sizes_N) - sizes_N
    groups = np.split(np.argsort(sizes_N, kind="stable"), np.cumsum(counts)[:-1])
    for size, clients in zip(sizes.tolist(), groups, strict=True):
        yield first_N[clients][:, None] + np.arange(size)


def numbers(sizes_N: Indices, seed: int, purpose: str) -> Indices:
    """Return the numbers by which ``keys.permutation(keys.key_for(seed, purpose, 0, u), n_u)`` sorts, for all u."""
    client_n, place_n = places(sizes_N)
    key_N2 = keys.key_for(seed, purpose, 0, torch.arange(len(sizes_N))).numpy()
    number_n = np.empty(len(client_n), dtype=np.int64)
    for i in range(0, len(client_n), BLOCK):
        k0, k1 = key_N2[client_n[i : i + BLOCK]].T
        zero = np.zeros_like(k0)
        c0, c1, _, _ = keys.ten_rounds(k0, k1, place_n[i : i + BLOCK], zero, zero, zero)
        number_n[i : i + BLOCK] = (c0 << 31) | (c1 >> 1)
    return number_n
