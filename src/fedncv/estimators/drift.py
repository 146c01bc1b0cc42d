"""Client drift: a centred control variate inside local training, with a learned coefficient per client.

    step      y ← y − η (g(y; B) − e_u)
    memory    c_u⁺ = Δ_u / (η K_u) + e_u                             mean raw local gradient
    e_u       = α_u (c_u − c̄) − Σ_v p_v α_v (c_v − c̄)              Σ_u p_u e_u = 0

α = 1 with equal sizes is SCAFFOLD option II (Karimireddy et al., ICML 2020), α = 0 is FedAvg. The second
term of e_u recentres unequal α_v. Derivations and fixed points: docs/theory.md.

Shapes: S = clients of the round, P = parameters.
"""

import torch
from torch import Tensor

from fedncv.estimators.memory import WeightedSum, weighted_mean
from fedncv.estimators.units import check_same_shape, check_sizes, column, ratio


def recentring(c: WeightedSum, alpha_c: WeightedSum) -> Tensor:
    """r = Σ_v p_v α_v (c_v − c̄) = (Σ_v n_v α_v c_v − (Σ_v n_v α_v) c̄) / n, in float64.

    ``c`` holds Σ n_v c_v and n; ``alpha_c`` holds the same with n_v α_v in place of n_v. Equal α give 0.
    """
    return ratio(alpha_c.total_P - alpha_c.size * weighted_mean(c), c.size)


def drift_corrections(c_SP: Tensor, alpha_S: Tensor, mean_c_P: Tensor, recentring_P: Tensor) -> Tensor:
    """e_u = α_u (c_u − c̄) − r, for the clients of the round, in c's dtype."""
    check_sizes(alpha_S, c_SP)
    check_same_shape(c_SP[0], mean_c_P)
    check_same_shape(c_SP[0], recentring_P)
    deviation_SP = c_SP - mean_c_P.to(c_SP.dtype)
    return column(alpha_S, c_SP) * deviation_SP - recentring_P.to(c_SP.dtype)


def raw_gradient(delta_P: Tensor, e_P: Tensor, *, lr: float | Tensor, steps: int | Tensor) -> Tensor:
    """c_u⁺ = Δ_u / (η K_u) + e_u, with Δ_u = x − y the pseudo-gradient of K_u corrected steps.

    Δ_u already contains the correction; adding e_u back gives the mean gradient of the client's own loss
    along its path. A client without any step has no gradient (this gives e_u): keep its c_u.
    """
    check_same_shape(delta_P, e_P)
    path_length = torch.as_tensor(lr * steps, dtype=delta_P.dtype, device=delta_P.device)
    return ratio(delta_P, path_length) + e_P


def learned_alpha(c_new_SP: Tensor, c_old_SP: Tensor, mean_c_P: Tensor, seen_S: Tensor) -> Tensor:
    """α_u* = ⟨c_u⁺ − c̄, c_u − c̄⟩ / ‖c_u − c̄‖², clipped to [0, 1].

    The α_u that minimises ‖(c_u⁺ − c̄) − α_u (c_u − c̄)‖²: the centred form of Algorithm 1's descent on
    ‖g_u‖². c̄ is the updated mean, in place of the full gradient. A client that was never seen before
    (``seen_S`` false) has no memory and gets 0, as does a client with c_u = c̄.
    """
    check_same_shape(c_new_SP, c_old_SP)
    check_same_shape(c_new_SP[0], mean_c_P)
    mean_P = mean_c_P.to(c_new_SP.dtype)
    new_SP, old_SP = (c_new_SP - mean_P).flatten(1), (c_old_SP - mean_P).flatten(1)
    alpha_S = ratio((new_SP * old_SP).sum(dim=1), old_SP.square().sum(dim=1)).clamp(0, 1)
    check_same_shape(seen_S, alpha_S)
    return torch.where(seen_S, alpha_S, 0.0)


def smoothed(alpha_S: Tensor, target_S: Tensor, *, rate: float) -> Tensor:
    """α_u ← α_u + rate (α_u* − α_u); rate 1 forgets the past, 0 never learns."""
    check_same_shape(alpha_S, target_S)
    return alpha_S + rate * (target_S - alpha_S)
