"""Weighted sums over all clients, updated from the few clients that replied.

    total = Σ_v n_v h_v,   n = Σ_v n_v,      h̄ = total / n

Both are unnormalised and in float64. So replacing a client's row subtracts what was added, up to one rounding; sizes
may change (streams); and errors do not grow in long runs.

Shapes: N = all clients, S = clients of the round, P = parameters.
"""

from typing import NamedTuple

from torch import Tensor

from fedncv.estimators.units import check_same_shape, check_sizes, ratio, weighted_total


class WeightedSum(NamedTuple):
    """Σ_v n_v h_v and Σ_v n_v, in float64."""

    total_P: Tensor
    size: Tensor


def weighted_sum(h_NP: Tensor, n_N: Tensor) -> WeightedSum:
    """Compute Σ_v n_v h_v and Σ_v n_v over all clients."""
    check_sizes(n_N, h_NP)
    h_NP = h_NP.double()
    return WeightedSum(total_P=weighted_total(n_N, h_NP), size=n_N.double().sum())


def replace_rows(old: WeightedSum, h_old_SP: Tensor, n_old_S: Tensor, h_new_SP: Tensor, n_new_S: Tensor) -> WeightedSum:
    """Return the sums after clients S changed from (n_old, h_old) to (n_new, h_new)."""
    check_same_shape(h_old_SP, h_new_SP)
    gone, come = weighted_sum(h_old_SP, n_old_S), weighted_sum(h_new_SP, n_new_S)
    return WeightedSum(total_P=old.total_P + (come.total_P - gone.total_P), size=old.size + (come.size - gone.size))


def weighted_mean(sums: WeightedSum) -> Tensor:
    """h̄ = Σ_v n_v h_v / Σ_v n_v in float64; 0 if there are no samples."""
    return ratio(sums.total_P, sums.size)
