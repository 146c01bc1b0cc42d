"""Clients that never train: a random share of all clients, drawn by the seed alone.

Of N clients, round(share N) never train. The clients that train keep their order and become clients 0 to n - 1; those
that never train, in their order, become clients n to N - 1. So the server's tables, sums and draws are those of a
federation of n clients, and the others have numbers that no table holds.
"""

import numpy as np

from fedncv.data.owners import Indices
from fedncv.keys import generator


def num_unseen(share: float, num_clients: int) -> int:
    """Return how many clients never train.

    >>> num_unseen(0.2, 100), num_unseen(0.0, 100), num_unseen(0.25, 10)
    (20, 0, 2)
    """
    return round(share * num_clients)


def order(seed: int, share: float, num_clients: int) -> Indices:
    """Return the clients in their new order: first those that train, then the others."""
    unseen = num_unseen(share, num_clients)
    drawn = generator(seed, "unseen clients").permutation(num_clients)
    return np.concatenate([np.sort(drawn[unseen:]), np.sort(drawn[:unseen])]).astype(np.int64)
