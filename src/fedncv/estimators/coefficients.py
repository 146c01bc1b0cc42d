"""The coefficient of a control variate: in closed form, from the draw itself, and from earlier rounds.

    β* = Cov(a, b) / Var(b),      Var(β*) = (1 − ρ²) Var(0)

a is the unit being estimated, b its control variate; inner products over P make one scalar. There are four ways to
choose β:

    closed form       all N units known: the exact optimum for a uniform draw (simulation, figures)
    running           scalars of earlier rounds: fixed before the draw, so the estimate stays unbiased
    leave-one-out     β_u from the other units drawn: unbiased for draws with replacement only
    in-sample         β from the same units it is applied to: biased, O(1/m)

For Horvitz–Thompson weights the units are a_u = p_u Δ_u, b_u = p_u h_u; for self-normalised weights
``linearised_units``. Shapes: U = units, P = parameters.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedncv.estimators.units import check_same_shape, check_sizes, column, ratio


class Moments(NamedTuple):
    """Discounted sums of earlier rounds' sample covariance and variance, in float64."""

    cov: Tensor
    var: Tensor


def optimal_beta(a_UP: Tensor, b_UP: Tensor) -> Tensor:
    """β* = Σ_u ⟨a_u − ā, b_u − b̄⟩ / Σ_u ‖b_u − b̄‖².

    On all N units: the minimiser of the variance of a uniform draw's mean, for every draw size m. On the
    m units of a draw: the in-sample estimate, which makes the estimator biased. A control variate that
    is constant (up to the rounding of its mean) has no information and gets 0; so does a single unit.

    >>> a_UP = torch.tensor([[1.0], [2.0], [3.0]])
    >>> optimal_beta(a_UP, 2 * a_UP)
    tensor(0.5000)
    """
    cov, var = _centred_products(a_UP, b_UP)
    return ratio(cov, var)


def squared_correlation(a_UP: Tensor, b_UP: Tensor) -> Tensor:
    """ρ² = Cov(a, b)² / (Var(a) Var(b)), the part of the variance β* removes; 0 if either is constant."""
    cov, var_b = _centred_products(a_UP, b_UP)
    _, var_a = _centred_products(b_UP, a_UP)
    return ratio(cov.square(), var_a * var_b)


def leave_one_out_betas(a_UP: Tensor, b_UP: Tensor) -> Tensor:
    """β_u: ``optimal_beta`` of all units except u. Zero for fewer than three units, which are too few to fit."""
    check_same_shape(a_UP, b_UP)
    others = [[v for v in range(len(a_UP)) if v != u] for u in range(len(a_UP))]
    return torch.stack([optimal_beta(a_UP[rest], b_UP[rest]) for rest in others])


def linearised_units(a_SP: Tensor, p_S: Tensor, centre_P: Tensor) -> Tensor:
    """p_u (a_u − centre): the units of a self-normalised mean, to first order in its deviation.

    Σ_S p_u a_u / Σ_S p_u − centre = Σ_S p_u (a_u − centre) / Σ_S p_u, and the last denominator varies
    only in second order. Centre Δ at its weighted mean over S and h at h̄.
    """
    check_sizes(p_S, a_SP)
    check_same_shape(a_SP[0], centre_P)
    return column(p_S, a_SP) * (a_SP - centre_P)


def no_moments(device: torch.device | str = "cpu") -> Moments:
    """Return moments without any observation; their ``running_beta`` is 0."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return Moments(cov=zero, var=zero)


def observe(moments: Moments, a_SP: Tensor, b_SP: Tensor, *, forget: float) -> Moments:
    """cov ← λ cov + 1/(m−1) Σ_S ⟨a_u − ā, b_u − b̄⟩, and likewise var.

    ``forget`` is λ in [0, 1]: 1 gives all rounds the same weight, 0 keeps only the last one. A round of one
    client has no sample covariance and adds nothing. Call it **after** the round's estimate was made.
    """
    cov, var = _centred_products(a_SP.double(), b_SP.double())
    degrees = max(len(a_SP) - 1, 1)  # both sums are 0 for a single unit
    return Moments(cov=forget * moments.cov + cov / degrees, var=forget * moments.var + var / degrees)


def running_beta(moments: Moments) -> Tensor:
    """β = cov / var over earlier rounds; 0 before the first observation."""
    return ratio(moments.cov, moments.var)


def _centred_products(a_UP: Tensor, b_UP: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_u ⟨a_u − ā, b_u − b̄⟩ and Σ_u ‖b_u − b̄‖², both exactly 0 where b is constant."""
    check_same_shape(a_UP, b_UP)
    da_UP, db_UP = a_UP - a_UP.mean(dim=0), b_UP - b_UP.mean(dim=0)
    var = db_UP.square().sum()
    # Rounding the mean of equal numbers gives a variance of this order without information.
    rounding = (len(b_UP) * torch.finfo(b_UP.dtype).eps) ** 2 * b_UP.square().sum()
    varies = var > rounding
    return torch.where(varies, (da_UP * db_UP).sum(), 0.0), torch.where(varies, var, 0.0)
