"""Score a sample of the clients instead of all of them: which ones, and how far the score may be from that of all.

M clients have test samples. Client u has n_u of them, and its scores sum to t_u. A simple random sample s of m clients,
drawn without replacement, estimates the score of all by a ratio:

    R = Σ_M t_u / Σ_M n_u        r = Σ_s t_u / Σ_s n_u

To first order r - R = mean_s(e_u) / n_bar with e_u = t_u - R n_u, which have mean zero over all clients. The mean of m
of M numbers without replacement has the variance (1 - m/M) S²/m, S² = Σ_M e_u² / (M - 1). So, with r for R and the
sample's mean of n_u for n_bar,

    standard error of r = sqrt( (1 - m/M) / m · Σ_s (t_u - r n_u)² / (m - 1) ) / mean_s(n_u)

It is 0 if all clients are scored, and unknown (None) for a sample of one. With equal n_u, r is a mean and the squared
standard error is unbiased. Cochran, Sampling Techniques, 3rd ed., 1977, eq. 6.13; section 2.6 has the factor 1 - m/M.
"""

import math

import numpy as np
from numpy.typing import NDArray

from fedncv.engine.sampling import Ids, draw_uniform
from fedncv.keys import generator


def sample(seed: int, test_sizes: NDArray[np.int64], size: int, *, purpose: str = "scored clients") -> Ids | None:
    """Return the clients to score, in order; None if they are all: ``size`` is 0, or not below those with test samples.

    Keyed by the seed alone, so that the sample is the same in every round, for every method, in every engine and after
    a resume: curves and paired differences of methods compare the same clients.
    """
    tested = np.flatnonzero(test_sizes)
    if not 0 < size < len(tested):
        return None
    return tested[draw_uniform(generator(seed, purpose), len(tested), size)]


def standard_error(totals: NDArray[np.float64], sizes: NDArray[np.int64], num_clients: int) -> float | None:
    """Return the standard error of Σ totals / Σ sizes of these m of ``num_clients`` clients; None for a single one.

    >>> standard_error(np.array([1.0, 3.0]), np.array([2, 2]), 4)  # mean 1 of 0.5 and 1.5; sqrt(1/2 / 2 * 2) / 2
    0.3535533905932738
    """
    m = len(totals)
    if m < 2:
        return None
    residuals = totals - totals.sum() / sizes.sum() * sizes
    variance = (1 - m / num_clients) / m * float(residuals @ residuals) / (m - 1)
    return math.sqrt(variance) / float(sizes.mean())
