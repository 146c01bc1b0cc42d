"""Covariances over a draw of clients, in closed form, without making or enumerating draws.

    uniform m of N    Cov(mean_S a, mean_S b) = (1 − m/N)/m · Σ_u ⟨a_u − ā, b_u − b̄⟩ / (N − 1)
    any design        Cov(Σ_S a_u/π_u, Σ_S b_u/π_u) = Σ_{u,v} (π_uv / (π_u π_v) − 1) ⟨a_u, b_v⟩

π_u = P(u ∈ S), π_uv = P(u ∈ S and v ∈ S), π_uu = π_u. Because β enters the server's estimate linearly,

    Var(β) = V_a − 2β C + β² V_b,    least at β* = C / V_b, where it is (1 − ρ²) V_a

for every design, without replacement too. Horvitz and Thompson, JASA 47, 1952.

Shapes: N = clients, P = parameters.
"""

import torch
from torch import Tensor

from fedncv.estimators.units import check_same_shape


def uniform_covariance(a_NP: Tensor, b_NP: Tensor, *, num_drawn: int) -> Tensor:
    """Return the covariance of the means of a and b over ``num_drawn`` of the N units, drawn uniformly.

    For Horvitz–Thompson sums of p_u Δ_u pass a_u = N p_u Δ_u. All N drawn (or N = 1) gives 0.
    """
    check_same_shape(a_NP, b_NP)
    num_units = len(a_NP)
    if not 1 <= num_drawn <= num_units:
        raise ValueError(f"num_drawn must be in 1..{num_units}, got {num_drawn}")
    products = ((a_NP - a_NP.mean(dim=0)) * (b_NP - b_NP.mean(dim=0))).sum()
    return products * (1 - num_drawn / num_units) / (num_drawn * max(num_units - 1, 1))


def design_covariance(a_NP: Tensor, b_NP: Tensor, joint_NN: Tensor) -> Tensor:
    """Return the covariance of the Horvitz–Thompson totals Σ_S a_u/π_u and Σ_S b_u/π_u under any design.

    ``joint_NN`` holds π_uv, with π_u on the diagonal.
    """
    check_same_shape(a_NP, b_NP)
    if joint_NN.shape != (len(a_NP), len(a_NP)):
        raise ValueError(f"{len(a_NP)} units need a square matrix of π_uv, got shape {tuple(joint_NN.shape)}")
    inclusion_N = joint_NN.diagonal()
    excess_NN = joint_NN / torch.outer(inclusion_N, inclusion_N) - 1
    return (excess_NN * (a_NP.flatten(1) @ b_NP.flatten(1).T)).sum()


def uniform_joint_inclusion(num_units: int, num_drawn: int) -> Tensor:
    """π_uv of a uniform draw without replacement: m/N on the diagonal, m(m−1)/(N(N−1)) off it."""
    pair = num_drawn * (num_drawn - 1) / (num_units * max(num_units - 1, 1))
    joint_NN = torch.full((num_units, num_units), pair, dtype=torch.float64)
    return joint_NN.fill_diagonal_(num_drawn / num_units)
