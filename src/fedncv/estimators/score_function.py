"""Score-function gradients of E_{p_θ}[f(x)], for which leave-one-out baselines are valid.

    REINFORCE   1/K Σ_k f(x_k) s_k,                            s_k = ∇_θ log p_θ(x_k)
    RLOO        1/K Σ_k (f(x_k) − α mean_{j≠k} f(x_j)) s_k                             eq. (RLOO)
    double CV   RLOO of f(x_k) + α b_k, less its mean, b_k = ⟨mean_{j≠k} ∇f(x_j), x_k − μ⟩

E[s] = 0 multiplies the baseline, so any baseline that does not depend on x_k is valid. The mean gradient of a
supervised loss has no such factor, so the same subtraction biases it.

The example: x in {0, 1}^D, independent Bernoulli(μ_d), θ = logit μ, hence s = x − μ; all 2^(K·D) outcomes of
K samples can be listed with their probabilities, so means and variances are exact.

Shapes: K = samples, D = dimensions, O = outcomes.
"""

import itertools

import torch
from torch import Tensor

from fedncv.estimators.leave_one_out import leave_one_out_mean
from fedncv.estimators.units import check_same_shape, check_sizes, column


def bernoulli_score(x_KD: Tensor, mu_D: Tensor) -> Tensor:
    """s = ∂ log p / ∂ logit μ = x − μ."""
    return x_KD - mu_D


def reinforce(f_K: Tensor, score_KD: Tensor) -> Tensor:
    """1/K Σ_k f(x_k) s_k."""
    _check_values(f_K, score_KD)
    return (column(f_K, score_KD) * score_KD).mean(dim=0)


def rloo(f_K: Tensor, score_KD: Tensor, *, alpha: float | Tensor = 1.0) -> Tensor:
    """1/K Σ_k (f(x_k) − α mean_{j≠k} f(x_j)) s_k; α = 0, or a single sample, is REINFORCE.

    Chen et al., eq. (RLOO); unbiased for every α.
    """
    return reinforce(f_K - alpha * leave_one_out_mean(f_K), score_KD)


def double_control_variate(f_K: Tensor, df_KD: Tensor, x_KD: Tensor, mu_D: Tensor, *, alpha: float | Tensor) -> Tensor:
    """RLOO of f(x_k) + α b_k, minus α/K Σ_k ḡ_{∖k} ⊙ μ(1 − μ), the mean that b adds.

    b_k = ⟨ḡ_{∖k}, x_k − μ⟩ with ḡ_{∖k} = mean_{j≠k} ∇f(x_j), ``df_KD``. Unbiased for every α; α = 0 is
    RLOO; α = −1 with f linear has no variance. Titsias and Shi, AISTATS 2022, arXiv 2111.05300, sec. 3,
    for Bernoulli variables.
    """
    check_same_shape(df_KD, x_KD)
    score_KD, others_KD = bernoulli_score(x_KD, mu_D), leave_one_out_mean(df_KD)
    b_K = (others_KD * score_KD).sum(dim=1)
    return rloo(f_K + alpha * b_K, score_KD) - alpha * others_KD.mean(dim=0) * mu_D * (1 - mu_D)


def bernoulli_outcomes(mu_D: Tensor, *, num_samples: int) -> tuple[Tensor, Tensor]:
    """Return x_OKD, probability_O: all 2^(K·D) outcomes of K independent samples."""
    check_sizes(mu_D, mu_D)
    bits = itertools.product((0.0, 1.0), repeat=num_samples * len(mu_D))
    x_OKD = torch.tensor(list(bits), dtype=mu_D.dtype, device=mu_D.device).reshape(-1, num_samples, len(mu_D))
    probability_OKD = x_OKD * mu_D + (1 - x_OKD) * (1 - mu_D)
    return x_OKD, probability_OKD.prod(dim=2).prod(dim=1)


def _check_values(f_K: Tensor, score_KD: Tensor) -> None:
    if f_K.ndim != 1 or len(f_K) != len(score_KD):
        raise ValueError(f"give one f for each of {len(score_KD)} samples, got shape {tuple(f_K.shape)}")
