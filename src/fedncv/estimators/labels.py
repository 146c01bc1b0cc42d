"""Label shares as a control variate: what is known of a client before it is drawn, without a memory of its updates.

    π_u = n_{u,k} / n_u,    π̄ = Σ_v p_v π_v over all clients
    h_u = (π_u − π̄) B                                     Σ_u p_u h_u = 0 over all clients, for every B
    B   = (A + ρ I)⁻¹ D                                    ridge regression on earlier rounds
    A   ← λ A + Σ_S w_u (π_u − π̄_S)(π_u − π̄_S)ᵀ,   D ← λ D + Σ_S w_u (π_u − π̄_S) a_uᵀ,   π̄_S = Σ_S w_u π_u

    ω   = w + w ∘ X (Xᵀ W X + ρ I)⁻¹ (π̄ − π̄_S)            calibrated weights; rows of X: π_u − π̄_S

Slopes come from differences between the clients of one round, so a mean update that changes from round to round does
not enter them. B from earlier rounds is fixed before the draw. Calibrated weights sum to one and may be negative; they
need only this round. Derivations: docs/theory.md, section 5.

Shapes: U = units, S = clients drawn, C = classes, P = parameters.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedncv.estimators.units import check_same_shape, check_sizes, check_weights


class Slopes(NamedTuple):
    """Discounted sums of earlier rounds."""

    A_CC: Tensor  # float64
    D_CP: Tensor


def no_slopes(num_classes: int, x_P: Tensor) -> Slopes:
    """Return sums without any observation; their ``slopes`` are 0."""
    return Slopes(x_P.new_zeros(num_classes, num_classes, dtype=torch.float64), x_P.new_zeros(num_classes, len(x_P)))


def observe_labels(sums: Slopes, w_S: Tensor, pi_SC: Tensor, a_SP: Tensor, *, forget: float) -> Slopes:
    """Return the sums with one more round; the earlier ones weigh λ = ``forget``. One client adds nothing.

    Call it **after** the round's estimate was made.
    """
    check_weights(w_S, a_SP)
    wx_SC = w_S[:, None] * (pi_SC - w_S @ pi_SC)
    # Σ w x = 0, so it makes no difference whether a is centred
    return Slopes(forget * sums.A_CC + wx_SC.T @ pi_SC, forget * sums.D_CP + wx_SC.T.to(a_SP.dtype) @ a_SP)


def slopes(sums: Slopes, *, ridge: float) -> Tensor:
    """B = (A + ρ I)⁻¹ D, classes × parameters."""
    eye_CC = torch.eye(len(sums.A_CC), dtype=sums.A_CC.dtype, device=sums.A_CC.device)
    inverse_CC: Tensor = torch.linalg.inv(sums.A_CC + ridge * eye_CC)
    return inverse_CC.to(sums.D_CP.dtype) @ sums.D_CP


def predicted(pi_SC: Tensor, mean_pi_C: Tensor, slopes_CP: Tensor) -> Tensor:
    """h_u = (π_u − π̄) B. A client with π_u = π̄ gets 0."""
    return (pi_SC - mean_pi_C).to(slopes_CP.dtype) @ slopes_CP


def calibrated_weights(w_S: Tensor, pi_SC: Tensor, mean_pi_C: Tensor, *, ridge: float) -> Tensor:
    """ω = w + w ∘ X (Xᵀ W X + ρ I)⁻¹ (π̄ − π̄_S).

    Σ ω = 1 for every ρ > 0. As ρ → 0, Σ ω_u π_u comes as close to π̄ as weights of this form allow; then updates that
    are linear in π are averaged without error. A large ρ gives w. With a_u = b + π_u B + ε_u, entries of B of variance
    τ² and of ε_u of variance σ², and equal weights 1/m, the least expected error is at ρ = σ² / (m τ²).
    """
    check_sizes(w_S.abs(), pi_SC)
    check_same_shape(pi_SC[0], mean_pi_C)
    x_SC = pi_SC - w_S @ pi_SC
    eye_CC = torch.eye(x_SC.shape[1], dtype=x_SC.dtype, device=x_SC.device)
    gap_C = mean_pi_C - w_S @ pi_SC
    coefficients_C: Tensor = torch.linalg.solve(x_SC.T @ (w_S[:, None] * x_SC) + ridge * eye_CC, gap_C)
    return w_S + w_S * (x_SC @ coefficients_C)
