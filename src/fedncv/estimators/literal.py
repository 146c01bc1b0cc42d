"""The paper's rules as printed. docs/theory.md, "Reading the paper", analyses them.

    client   g'_i = g_i − α c_{D_u∖i},     g_u = Σ_i π_i g'_i            eq. (weight_u), Algorithm 1
    server   g    = Σ_u p_u (g_u − c_{V∖u}),  p_u = n_u / n              eq. (server_cv), (Double)

Chen et al., Taming Gradient Variance in Federated Learning with Networked Control Variates.
Departure from the paper: for a single sample or client the control variate is 0.

Shapes: I = samples of a client, U = clients, P = parameters.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedncv.estimators.leave_one_out import leave_one_out_mean
from fedncv.estimators.units import check_same_shape, check_sizes, ratio, weighted_total


def reshaped_gradients(g_IP: Tensor, *, alpha: float | Tensor) -> Tensor:
    """g'_i = g_i − α c_{D_u∖i}, with c the plain mean of the other samples. Eq. (weight_u)."""
    return g_IP - alpha * leave_one_out_mean(g_IP)


def client_gradient(q_P: Tensor, mean_P: Tensor, *, size: int | Tensor, alpha: float | Tensor) -> Tensor:
    """g_u = q − α (n_u ḡ_u − q) / (n_u − 1): Algorithm 1 without per-sample gradients.

    q = Σ_i π_i g_i is the π-weighted gradient, ḡ_u the plain mean, ``size`` is n_u. It equals
    Σ_i π_i g'_i because Σ_i π_i c_{∖i} = (n_u ḡ_u − q) / (n_u − 1). Uniform π gives (1 − α) ḡ_u.
    One sample has no leave-one-out mean and gives q.

    Multi-step form: the same rule for a mini-batch B, with q_B, ḡ_B and |B|.
    """
    check_same_shape(q_P, mean_P)
    return q_P - alpha * _mean_control_variate(q_P, mean_P, size)


def sample_weights(pi_I: Tensor, *, size: int | Tensor, alpha: float | Tensor) -> Tensor:
    """κ_i = π_i − α (1 − π_i) / (n_u − 1), so that g_u = ∇ Σ_i κ_i ℓ_i takes one backward pass.

    ``size`` is n_u, which is less than the length of π if a batch is padded; the caller leaves the
    padding out of the sum. π_i is the model's own probability of sample i, normalised over the batch:
    ``torch.softmax(-loss_I, 0)``. One sample gives κ = π.
    """
    rest = torch.as_tensor(size, dtype=pi_I.dtype, device=pi_I.device) - 1
    return pi_I - alpha * ratio(1 - pi_I, rest)


def server_gradient(g_UP: Tensor, n_U: Tensor) -> Tensor:
    """g = Σ_u p_u (g_u − Σ_{v≠u} n_v/(n − n_u) g_v). Eq. (server_cv) put into (Double).

    For a round's clients S pass their replies and sizes: p is normalised over them. A single client
    gives g_u.
    """
    n_U = n_U.to(g_UP.dtype)
    return weighted_total(n_U / n_U.sum(), g_UP - leave_one_out_mean(g_UP, n_U))


def server_weights(n_U: Tensor) -> Tensor:
    """Return the coefficients of g_v in ``server_gradient``: p_v w_v, w_v = 1 − Σ_{u≠v} p_u / (1 − p_u).

    They sum to zero for any sizes of two clients or more, and all vanish when the sizes are equal.
    """
    check_sizes(n_U, n_U)
    p_U = n_U / n_U.sum()
    odds_U = ratio(n_U.to(p_U.dtype), n_U.sum() - n_U)  # p / (1 − p), exactly 0 for a single client
    return p_U * (1 - (odds_U.sum() - odds_U))


def networked_gradient(g_u_IP: Sequence[Tensor], *, alpha: float) -> Tensor:
    """1/n Σ_i (g_u^i − α c_{D_u∖i} − Σ_{j∉D_u} (g_v^j − α c_{D_v∖j}) / (n − n_u)). Eq. (NCV).

    Sample by sample as printed, over a list of clients' sample gradients: the slow version that
    ``server_gradient`` of the clients' means is tested against.
    """
    reshaped = [reshaped_gradients(g_IP, alpha=alpha) for g_IP in g_u_IP]
    num_samples = sum(len(g_IP) for g_IP in g_u_IP)
    terms: list[Tensor] = []
    for u, own_IP in enumerate(reshaped):
        others = [other_JP for v, other_JP in enumerate(reshaped) if v != u]
        others_JP = torch.cat(others) if others else torch.zeros_like(own_IP)
        terms.extend(g_P - others_JP.sum(dim=0) / max(num_samples - len(own_IP), 1) for g_P in own_IP)
    return torch.stack(terms).sum(dim=0) / num_samples


def alpha_step(alpha: Tensor, q_P: Tensor, mean_P: Tensor, *, size: int | Tensor, lr: float) -> Tensor:
    """α_u ← α_u − γ ∂‖g_u‖²/∂α_u = α_u + 2γ ⟨c, q − α_u c⟩,  c = (n_u ḡ_u − q) / (n_u − 1).

    Algorithm 1's last server line, with Δ read as the derivative in α_u. Uniform π gives
    1 − α_u ← (1 − α_u)(1 − 2γ‖ḡ_u‖²), which ends at α_u = 1 whenever 0 < γ‖ḡ_u‖² < 1.
    """
    check_same_shape(q_P, mean_P)
    c_P = _mean_control_variate(q_P, mean_P, size)
    return alpha + 2 * lr * (c_P * (q_P - alpha * c_P)).sum()


def _mean_control_variate(q_P: Tensor, mean_P: Tensor, size: int | Tensor) -> Tensor:
    """Σ_i π_i c_{∖i} = (n_u ḡ_u − q) / (n_u − 1); 0 for one sample."""
    n = torch.as_tensor(size, dtype=q_P.dtype, device=q_P.device)
    return ratio(n * mean_P - q_P, n - 1)
