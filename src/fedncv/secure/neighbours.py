"""Who shares masks and secrets with whom: all others, or k neighbours each if there are many clients.

    graph     a ring in random order; neighbours are the k/2 clients on each side (Bell et al. 2020, section 3)
    order     by SHA-256 of a seed and the client. The seed is a hash of all fresh keys of the round

With k neighbours the cost per client grows with k, not with the number of clients. ``failure`` bounds the probability
that some client's neighbours are too many colluding ones, or too few that stay.
"""

import hashlib
import math
from functools import cache

FAILURE = 2.0**-30  # probability that a round's random graph may fail, of colluding or of dropped neighbours
COMPLETE = 64  # up to so many clients everybody is everybody's neighbour
COLLUDING, DROPPED = 0.2, 0.2  # shares of the cohort for which ``FAILURE`` holds


def graph(members: list[int], neighbours: int, seed: bytes) -> dict[int, list[int]]:
    """Return member -> its neighbours, in order; ``neighbours`` 0: all others."""
    n = len(members)
    if not neighbours or neighbours >= n - 1:
        return {u: [v for v in members if v != u] for u in members}
    ring = sorted(members, key=lambda u: hashlib.sha256(seed + u.to_bytes(8, "big")).digest())
    half = neighbours // 2
    offsets = [*range(-half, 0), *range(1, half + 1)]
    found = {u: sorted({ring[(i + d) % n] for d in offsets} - {u}) for i, u in enumerate(ring)}
    return dict(sorted(found.items()))


def local_threshold(threshold: int, cohort: int, holders: int, *, complete: bool) -> int:
    """Return how many of a client's share holders must stay: the round's threshold, or the same part of them."""
    if complete:
        return threshold
    return max(math.ceil(threshold * holders / cohort), holders // 2 + 1)


def is_complete(cohort: int, neighbours: int) -> bool:
    return not neighbours or neighbours >= cohort - 1


@cache
def choose(cohort: int, threshold: int) -> int:
    """Return the number of neighbours for a cohort: 0 (all others), or the least with a failure below ``FAILURE``."""
    if cohort <= COMPLETE:
        return 0
    for k in range(16, cohort - 1, 2):
        if failure(cohort, threshold, k) <= FAILURE:
            return k
    return 0


def failure(cohort: int, threshold: int, neighbours: int) -> float:
    """Return a bound on the probability that the graph fails for some client.

    A client's holders are itself and k random others. It fails if at least the local threshold of the others collude,
    where ``COLLUDING`` of the cohort do, or if fewer than the local threshold of all stay, where ``DROPPED`` drop out.
    Both are tails of the hypergeometric distribution; the sum over the clients bounds the probability of any. That the
    honest neighbours stay connected (Bell et al., Lemma 3.3) asks less of k when this holds.
    """
    from scipy.stats import hypergeom

    others, k = cohort - 1, neighbours
    t = local_threshold(threshold, cohort, k + 1, complete=False)
    colluding = hypergeom.sf(t - 1, others, math.ceil(COLLUDING * cohort), k)
    leaving = hypergeom.sf(k + 1 - t, others, math.ceil(DROPPED * cohort), k)
    return float(cohort * (colluding + leaving))
