"""Differential privacy in numbers: the epsilon that noised rounds spend, and the noise that a budget needs.

A round releases sum_S a_u + N(0, (z * C)^2), |a_u| <= C; z is the noise. T rounds at a delta are accounted for as

    poisson, each client with probability q      neighbours: one client more or fewer; the sum changes by at most C.
                                                 Privacy loss distributions (PLD), or Renyi differential privacy (RDP)
    m of N clients without replacement           neighbours: one client's data replaced; the sum changes by at most 2C,
                                                 so the noise counts as z / 2. RDP
    no amplification by sampling (share = 1)     the Gaussian mechanism with noise z / sqrt(T), exactly

All are upper bounds of the true epsilon. They come from Google's dp-accounting, the extra ``dp``. PLD: Koskela et al.,
2020, https://arxiv.org/abs/1906.03049; RDP of Poisson sampling: Mironov et al., 2019, https://arxiv.org/abs/1908.10530;
without replacement: Wang et al., 2019, https://arxiv.org/abs/1808.00087; the Gaussian mechanism: Balle and Wang, 2018,
https://arxiv.org/abs/1805.06530, theorem 8.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

Accountant = Literal["pld", "rdp"]

INTERVAL = 1e-3  # between the losses of a discretised distribution at noise 1; a larger one raises epsilon
CLOSE = 1.001  # ratio of the noise that is found to the least one
LARGEST = 1e4  # noise; with more, a round says nothing
ORDERS = (1.25, 1.5, 1.75, *range(2, 33), *range(36, 64, 4), 64, 80, 96, 128, 192, 256, 384, 512, 1024)
"""Of the Renyi divergences: each gives an upper bound, and the least is taken."""


class Release(NamedTuple):
    """What a round releases about the clients."""

    noise: float  # z: deviation of the noise / clip
    drawn: int  # m
    clients: int  # N; m = N: no amplification by sampling
    replace: bool  # neighbours differ in one client's data; False: in whether a client is there

    @property
    def relation(self) -> str:
        return "replace one" if self.replace else "add or remove one"

    @property
    def is_amplified(self) -> bool:
        return self.drawn < self.clients


def epsilon(release: Release, rounds: int, delta: float, accountant: Accountant = "pld") -> float:
    """Return the epsilon that so many rounds spend at ``delta``; inf without noise.

    >>> epsilon(Release(5.0, 10, 10, False), 0, 1e-5)
    0.0
    """
    if rounds == 0:
        return 0.0
    if release.noise == 0:
        return math.inf
    return _epsilon(release, rounds, delta, "rdp" if release.replace else accountant)


@functools.lru_cache(maxsize=100_000)
def _epsilon(release: Release, rounds: int, delta: float, accountant: Accountant) -> float:
    dp = library()
    if not release.is_amplified:
        noise = release.noise / (2 if release.replace else 1)
        return float(dp.get_epsilon_gaussian(noise / math.sqrt(rounds), delta))
    with _quietly():
        if accountant == "pld":
            return float(_distribution(release).self_compose(rounds).get_epsilon_for_delta(delta))
        orders, rdp = _divergences(release)
        return float(dp.rdp.rdp_privacy_accountant.compute_epsilon(orders, rounds * rdp, delta)[0])


@functools.lru_cache(maxsize=64)
def _distribution(release: Release) -> Any:
    """Return the privacy loss distribution of a round."""
    make = library().pld.privacy_loss_distribution.from_gaussian_mechanism
    z = release.noise
    interval = INTERVAL * (z**-2 if z < 1 else 1 / z)  # losses lie far apart with little noise, close with much
    return make(
        release.noise, sampling_prob=release.drawn / release.clients, value_discretization_interval=interval
    )  # an upper bound ("pessimistic"), for one client more and one fewer


@functools.lru_cache(maxsize=64)
def _divergences(release: Release) -> tuple[Any, Any]:
    """Return the orders and the Renyi divergences of a round."""
    dp = library()
    if release.replace:
        relation = dp.NeighboringRelation.REPLACE_ONE
        gaussian = dp.GaussianDpEvent(release.noise / 2)
        event = dp.SampledWithoutReplacementDpEvent(release.clients, release.drawn, gaussian)
    else:
        relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
        event = dp.PoissonSampledDpEvent(release.drawn / release.clients, dp.GaussianDpEvent(release.noise))
    accountant = dp.rdp.RdpAccountant(ORDERS, relation)
    accountant.compose(event)
    return accountant.orders, accountant.rdp


def least_noise(release: Release, rounds: int, *, budget: float, delta: float, accountant: Accountant = "pld") -> float:
    """Return the least noise with which the rounds spend at most ``budget``, to a thousandth; 0 for no rounds.

    The noise of ``release`` is ignored. Raise ValueError if no sensible noise is enough.
    """
    if rounds == 0 or budget == math.inf:
        return 0.0

    def spent(noise: float) -> float:
        return epsilon(release._replace(noise=noise), rounds, delta, accountant)

    high = _rounded_up((2 if release.replace else 1) * math.sqrt(rounds) * _sigma(budget, delta))  # without sampling
    while high <= LARGEST and spent(high) > budget:  # the bound of an accountant may need more
        high *= 2
    if high > LARGEST:
        raise ValueError(
            f"epsilon {budget:g} at delta {delta:g} would need noise of more than {LARGEST:g} times the clip in "
            f"{rounds} rounds; choose a larger epsilon, or fewer rounds"
        )
    if not release.is_amplified:
        return high
    low = high / 2
    while spent(low) <= budget:
        low, high = low / 2, low
    while high / low > CLOSE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle) <= budget else (middle, high)
    return _rounded_up(high)


def rounds_within(spent: Callable[[int], float], budget: float, most: int) -> int:
    """Return how many rounds, at most ``most``, spend no more than ``budget``.

    >>> rounds_within(lambda rounds: 0.5 * rounds, 3.2, 100)
    6
    """
    low, high = 0, most + 1  # `low` rounds are within the budget, `high` are not, or are too many
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if spent(middle) <= budget else (low, middle)
    return low


def _sigma(budget: float, delta: float) -> float:
    return float(library().get_sigma_gaussian(budget, delta))


def _rounded_up(noise: float) -> float:
    """Return the next number of five digits, so that another version's last digits give the same noise."""
    unit = 10.0 ** (math.floor(math.log10(noise)) - 4)
    return float(f"{math.ceil(noise / unit * (1 - 1e-12)) * unit:.6g}")


def library() -> Any:
    """Return dp-accounting. Raise ValueError if it is not installed."""
    try:
        import dp_accounting
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "dp_accounting":
            raise
        raise ValueError("+dp needs dp-accounting, which is not installed; pip install 'fedncv[dp]'") from None
    return dp_accounting


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Leave out the library's warnings about orders that it skips: the others still give an upper bound."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
