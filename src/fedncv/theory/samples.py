"""Random sample gradients for which all outcomes can be listed, in exact rationals.

A world is a few clients; each sample of client u takes one of two values with probability 1/2,
independently of all others. Its h(α) and h_s(α) are the paper's (Appendices B and C):

    h_s(α) = g_u^i − α c_{D_u∖i},      h(α) = h_s(α) − 1/(n − n_u) Σ_{j∉D_u} (g_v^j − α c_{D_v∖j})
"""

from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import product
from typing import NamedTuple

Sample = tuple[tuple[Fraction, ...], ...]
"""One outcome: the gradients of every client's samples."""


class World(NamedTuple):
    """Client u holds n_u samples that are low_u or high_u."""

    sizes: tuple[int, ...]
    values: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        rows = zip(self.sizes, self.values, strict=True)
        return "clients with " + " and ".join(f"{n} from {{{low}, {high}}}" for n, (low, high) in rows)


def outcomes(world: World) -> Iterator[Sample]:
    """Yield all equally likely outcomes."""
    clients = [product(map(Fraction, pair), repeat=n) for n, pair in zip(world.sizes, world.values, strict=True)]
    yield from product(*clients)


def worlds(smallest: int = 2) -> Iterator[World]:
    """Yield worlds of two, then three clients with at least ``smallest`` samples; mean zero, then unequal means."""
    pairs = ((-1, 1), (0, 2), (-3, -1))
    for num_clients, largest in ((2, 3), (3, 2)):
        for sizes in product(range(smallest, largest + 1), repeat=num_clients):
            for first, others in product(pairs, repeat=2):
                yield World(sizes, (first, *(others for _ in sizes[1:])))


def mean(values: list[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def covariance(world: World, x: Callable[[Sample], Fraction], y: Callable[[Sample], Fraction]) -> Fraction:
    pairs = [(x(sample), y(sample)) for sample in outcomes(world)]
    return mean([a * b for a, b in pairs]) - mean([a for a, _ in pairs]) * mean([b for _, b in pairs])


def variance(world: World, x: Callable[[Sample], Fraction]) -> Fraction:
    return covariance(world, x, x)


def others_mean(values: tuple[Fraction, ...], i: int) -> Fraction:
    """c_{D∖i}; 0 if i is the only sample."""
    rest = [value for j, value in enumerate(values) if j != i]
    return mean(rest) if rest else Fraction(0)


def single(alpha: Fraction) -> Callable[[Sample], Fraction]:
    """h_s(α) of the first client's first sample."""
    return lambda sample: sample[0][0] - alpha * others_mean(sample[0], 0)


def subtracted(alpha: Fraction) -> Callable[[Sample], Fraction]:
    """1/(n − n_u) Σ_{j∉D_u} (g_v^j − α c_{D_v∖j}): the term that h subtracts from h_s."""

    def of(sample: Sample) -> Fraction:
        return mean([g - alpha * c for g, c in _others(sample)])

    return of


def networked(alpha: Fraction) -> Callable[[Sample], Fraction]:
    """h(α)."""
    own, others = single(alpha), subtracted(alpha)
    return lambda sample: own(sample) - others(sample)


def minimiser(world: World, statistic: Callable[[Fraction], Callable[[Sample], Fraction]]) -> Fraction:
    """Return the α of least variance of statistic(α), which is linear in α, from three values of the variance."""
    at = {k: variance(world, statistic(Fraction(k))) for k in (-1, 0, 1)}
    curvature = at[1] + at[-1] - 2 * at[0]
    return (at[-1] - at[1]) / (2 * curvature)


def printed_alpha(world: World) -> Fraction:
    """Return Proposition 2's α for one-dimensional gradients, for which E[g] can be added to E[g·c]."""
    a = Fraction(sum(world.sizes[1:]))
    gain = _mean(world, lambda s: s[0][0] * others_mean(s[0], 0))
    norm = _mean(world, lambda s: others_mean(s[0], 0) ** 2)
    gains = _mean(world, lambda s: sum((g * c for g, c in _others(s)), Fraction(0)))
    norms = _mean(world, lambda s: sum((c**2 for _, c in _others(s)), Fraction(0)))
    drift = _mean(world, lambda s: s[0][0] - sum((g for g, _ in _others(s)), Fraction(0)) / a)
    return (2 * a**2 * (gain + drift) + gains) / (2 * a**2 * norm + norms)


def printed_difference(world: World, alpha: Fraction) -> Fraction:
    """Appendix C's Var[h] − Var[h_s], term by term as printed."""
    own = _mean(world, lambda s: s[0][0])
    others = _mean(world, subtracted(Fraction(0)))  # Σ_{j∉D_u} E[g_v^j] / (n − n_u)
    return _mean(world, lambda s: subtracted(alpha)(s) ** 2) + 2 * own * others - others**2


def _others(sample: Sample) -> Iterator[tuple[Fraction, Fraction]]:
    """(g_v^j, c_{D_v∖j}) for every sample of the other clients."""
    for client in sample[1:]:
        yield from ((g, others_mean(client, j)) for j, g in enumerate(client))


def _mean(world: World, x: Callable[[Sample], Fraction]) -> Fraction:
    return mean([x(sample) for sample in outcomes(world)])
