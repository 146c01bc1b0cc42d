"""Online clients: samples arrive while the federation trains.

Client u has n_u training samples in an order of its own. In round t = 0, 1, 2, ... it holds the first

    n_u(t) = min( n_u,  max( 1,  floor( (start + rate t) n_u ) ) )

of them: a share ``start`` from the beginning, a share ``rate`` more each round, never fewer than one. The order
is a pure function of (seed, client), so a client's samples in round t depend on nothing else, and their number only
grows. Weights p_u, label priors and sums of gradients use only the samples held; the test split does not change.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from fedncv.data.keyed import numbers, places
from fedncv.data.owners import Grouped, Indices, grouped

Order = Literal["shuffled", "by_class"]


class Stream(NamedTuple):
    order: Grouped  # the training samples of each client, in the order of arrival
    start: float
    rate: float

    def sizes(self, round: int) -> Indices:
        """(N,) n_u(t)."""
        return num_visible(self.order.sizes, round, start=self.start, rate=self.rate)

    def visible(self, round: int) -> Grouped:
        """Return the sorted samples each client holds in round t."""
        sizes_N = self.sizes(round)
        client_n, place_n = places(self.order.sizes)
        held_n = place_n < sizes_N[client_n]
        sample_m = self.order.flat[held_n]
        return Grouped(sample_m[np.lexsort((sample_m, client_n[held_n]))], sizes_N)


def num_visible(total_N: Indices, round: int, *, start: float, rate: float) -> Indices:
    """n_u(t) of the formula above.

    >>> [num_visible(np.array([10]), t, start=0.2, rate=0.3).item() for t in range(4)]
    [2, 5, 8, 10]
    """
    share = np.floor((start + rate * round) * total_N + 1e-9)  # 1e-9: floats round 0.1 + 0.2
    held_N: Indices = np.clip(share, 1, total_N).astype(np.int64)
    return held_N


def arrivals(
    train: Sequence[Indices],
    labels: Indices,
    seed: int,
    *,
    start: float = 0.1,
    rate: float = 0.01,
    order: Order = "shuffled",
) -> Stream:
    """Return the stream of every client's training samples.

    ``order`` is "shuffled" (the label distribution stays similar while a client grows) or "by_class": one class after
    another, in a random order of classes for each client, so that its label distribution changes over time.
    start = 1 is the ordinary, static federation.
    """
    if not 0 <= start <= 1:
        raise ValueError(f"start is {start}; it is a share of a client's samples, 0 to 1")
    if not 0 <= rate <= 1:
        raise ValueError(f"rate is {rate}; it is the share of a client's samples that arrives per round, 0 to 1")
    if order not in ("shuffled", "by_class"):
        raise ValueError(f"order is {order!r}; it must be shuffled or by_class")
    sizes_N = grouped(train).sizes
    if not len(sizes_N) or not sizes_N.all():
        raise ValueError("a client without training samples cannot have a stream; raise min_samples")
    sample_n = grouped(train).flat
    client_n, _ = places(sizes_N)
    sort_by = [numbers(sizes_N, seed, "stream"), client_n]
    if order == "by_class":
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise ValueError(f"order is by_class, but the targets are {labels.dtype}, not classes; use order=shuffled")
        num_classes = int(labels.max()) + 1
        every_N = np.full(len(sizes_N), num_classes, dtype=np.int64)
        turn_NK = numbers(every_N, seed, "stream classes").reshape(-1, num_classes)
        sort_by.insert(1, turn_NK[client_n, labels[sample_n]])
    ordered_n = sample_n[np.lexsort(sort_by)]
    return Stream(Grouped(ordered_n, sizes_N), start, rate)
