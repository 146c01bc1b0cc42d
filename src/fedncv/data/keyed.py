"""Compute keyed orders for all clients at once.

``keys.permutation`` orders the samples of one client; a hundred thousand such calls take minutes. Here one Philox
call gives the same numbers for all clients, and one sort the same orders.
"""

import numpy as np
import torch

from fedncv import keys
from fedncv.data.owners import Indices


def places(sizes_N: Indices) -> tuple[Indices, Indices]:
    """Return the client of each sample, and its place 0, 1, ... within that client.

    >>> [a.tolist() for a in places(np.array([2, 3]))]
    [[0, 0, 1, 1, 1], [0, 1, 0, 1, 2]]
    """
    client_n = np.repeat(np.arange(len(sizes_N)), sizes_N)
    return client_n, np.arange(len(client_n)) - (np.cumsum(sizes_N) - sizes_N)[client_n]


def numbers(sizes_N: Indices, seed: int, purpose: str) -> Indices:
    """Return the numbers by which ``keys.permutation(keys.key_for(seed, purpose, 0, u), n_u)`` sorts, for all u."""
    client_n, place_n = places(sizes_N)
    key_N2 = keys.key_for(seed, purpose, 0, torch.arange(len(sizes_N)))
    counter = torch.from_numpy(place_n)
    zero = torch.zeros_like(counter)
    c0, c1, _, _ = keys.philox(key_N2[torch.from_numpy(client_n)], counter, zero, zero, zero)
    number_n: Indices = ((c0 << 31) | (c1 >> 1)).numpy()
    return number_n
