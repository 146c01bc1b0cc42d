"""The per-client split into training and test samples.

Client u with n_u samples tests on round(test_share n_u) of them and trains on the rest. It always trains on
at least one, and tests on at least one if it has two and ``test_share`` is above zero. The test samples are the
first ones in the order ``keys.permutation(keys.key_for(seed, "split", 0, u), n_u)``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedncv.data.keyed import by_size, numbers
from fedncv.data.owners import Grouped, Indices, grouped


class Clients(NamedTuple):
    """Sorted sample numbers, one array per client. Many clients are stored as ``Grouped``; a list does as well."""

    train: Sequence[Indices]
    test: Sequence[Indices]

    @property
    def sizes(self) -> Indices:
        """(N,) training samples of each client."""
        return grouped(self.train).sizes

    @property
    def test_sizes(self) -> Indices:
        """(N,) test samples of each client."""
        return grouped(self.test).sizes

    def only(self, ids: Indices) -> "Clients":
        """Return some of the clients."""
        return Clients(grouped(self.train).only(ids), grouped(self.test).only(ids))


def num_test(sizes: Indices, test_share: float) -> Indices:
    """Return how many of each client's samples are for testing.

    >>> num_test(np.array([1, 2, 3, 4, 10, 100]), 0.25).tolist()
    [0, 1, 1, 1, 3, 25]
    """
    if not 0 <= test_share < 1:
        raise ValueError(f"test_share is {test_share}; it must be at least 0 and below 1, for example 0.25")
    wanted = np.floor(sizes * test_share + 0.5).astype(np.int64)
    share: Indices = np.minimum(np.maximum(wanted, int(test_share > 0)), sizes - 1)
    return share


def split(parts: Sequence[Indices], test_share: float, seed: int) -> Clients:
    """Split every client's samples by its own key, so that no client's split depends on another's.

    One sort splits all clients of a size, instead of one permutation per client.
    """
    parts = grouped(parts)
    sizes = parts.sizes
    if not len(sizes):
        raise ValueError("no clients to split; give at least one array of sample numbers")
    if not sizes.all():
        raise ValueError(f"client {int(np.argmin(sizes))} has no samples; merge it or raise min_samples")
    share = num_test(sizes, test_share)
    number = numbers(sizes, seed, "split")
    in_test = np.zeros(len(number), dtype=bool)
    sample = np.empty(len(number), dtype=np.int64)
    for place in by_size(sizes):
        order = np.argsort(number[place], axis=1, kind="stable")
        held = int(num_test(np.array(place.shape[1]), test_share))
        in_test[np.take_along_axis(place, order[:, :held], axis=1)] = True
        sample[place] = np.sort(parts.flat[place], axis=1)
    return Clients(Grouped(sample[~in_test], sizes - share), Grouped(sample[in_test], share))
