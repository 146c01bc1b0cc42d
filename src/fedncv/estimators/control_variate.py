"""Control variates that are centred under the draw they are averaged over.

    z    = g − α (c − E[c])                                            eq. (CV)
    d_u  = (1 − w_u)(a_u − a_{∖u}) = a_u − ā,      Σ_u w_u d_u = 0      the centred unit
    ĝ    = β h̄ + Σ_{u∈S} ω_u (Δ_u − β h_u)                             the server's estimate

E[z] = E[g] for every α that does not depend on the draw, if E[c] is the mean under the same draw and c was
known before it. Derivations: docs/theory.md.

Shapes: U = units, N = all clients, S = clients drawn, P = parameters.
"""

from torch import Tensor

from fedncv.estimators.units import check_same_shape, check_sizes, check_weights, ratio, readable, weighted_total


def controlled(g_P: Tensor, c_P: Tensor, mean_c_P: Tensor, *, alpha: float | Tensor) -> Tensor:
    """z = g − α (c − E[c]); α = 0 gives g. Chen et al., eq. (CV).

    ``mean_c_P`` is E[c] under the draw that picked c. Nothing is estimated here.
    """
    check_same_shape(g_P, c_P)
    check_same_shape(c_P, mean_c_P)
    return g_P - alpha * (c_P - mean_c_P)


def centred(a_UP: Tensor, w_U: Tensor) -> Tensor:
    """d_u = a_u − ā = (1 − w_u)(a_u − a_{∖u}), with ā = Σ_u w_u a_u and Σ_u w_u = 1.

    The paper's leave-one-out difference, scaled so that Σ_u w_u d_u = 0 for any weights. w must be the
    weights of the draw that averages the units. One unit gives 0.
    """
    check_weights(w_U, a_UP)
    return a_UP - weighted_total(w_U, a_UP)


def horvitz_thompson_weights(p_S: Tensor, inclusion_S: Tensor) -> Tensor:
    """ω_u = p_u / P(u ∈ S); uniform draws of m from N have inclusion m/N for every client.

    Σ_S ω_u a_u then has mean Σ_u p_u a_u exactly, for any sizes; the weights of one draw need not sum to
    one. p is normalised over **all** clients. p_u = 0 gives 0.
    """
    check_same_shape(p_S, inclusion_S)
    check_sizes(p_S, p_S)
    if readable(inclusion_S) and bool(((inclusion_S <= 0) | (inclusion_S > 1)).any()):
        raise ValueError(f"inclusion probabilities must be in (0, 1], got {inclusion_S.tolist()}")
    return p_S / inclusion_S


def self_normalised_weights(p_S: Tensor) -> Tensor:
    """ω_u = p_u / Σ_{v∈S} p_v: FedAvg's weights.

    A ratio estimator: biased if sizes differ (with equal sizes it is Horvitz–Thompson's), usually with a smaller
    mean squared error. Sizes instead of p give the same result. All zero gives zero.
    """
    check_sizes(p_S, p_S)
    return ratio(p_S, p_S.sum())


def server_estimate(
    delta_SP: Tensor, h_SP: Tensor, omega_S: Tensor, mean_h_P: Tensor, *, beta: float | Tensor
) -> Tensor:
    """ĝ = β h̄ + Σ_{u∈S} ω_u (Δ_u − β h_u).

    h_u: the server's memory of client u **before** this round (0 if never seen); ``mean_h_P`` is
    h̄ = Σ_v p_v h_v over all clients, drawn or not. With Horvitz–Thompson ω it is unbiased for
    Σ_u p_u Δ_u at every β fixed before the draw. β = 0 is FedAvg; β = 1 with equal sizes is FedVARP;
    h = Δ with β = 1 has zero variance. The result has Δ's dtype, whatever the precision of h̄.
    """
    check_same_shape(delta_SP, h_SP)
    check_same_shape(delta_SP[0], mean_h_P)
    check_sizes(omega_S.abs(), delta_SP)  # calibrated weights may be negative
    return beta * mean_h_P.to(delta_SP.dtype) + weighted_total(omega_S, delta_SP - beta * h_SP)
