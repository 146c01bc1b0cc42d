"""Statements about the paper's client and server rules as printed.

Small enumerations over clients' sizes and sample gradients. Derivations: docs/theory.md, section 1.
"""

from collections.abc import Iterator
from itertools import product

import torch

from fedncv.estimators import (
    alpha_step,
    client_gradient,
    networked_gradient,
    reshaped_gradients,
    sample_weights,
    server_gradient,
    server_weights,
)
from fedncv.theory.statement import Finding, Statement, distance, tensor

ALPHAS = (0.0, 0.5, 1.0)
CLIENT, SERVER = "eq. (weight_u)", "eq. (server_cv)"


def sample_cases() -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield two or three sample gradients of one client, and α."""
    for num in (2, 3):
        yield from product(product((0, 1, 3), repeat=num), ALPHAS)


def size_cases() -> Iterator[tuple[tuple[int, ...]]]:
    """Sizes of two to four clients, by their total."""
    sizes = [s for num, largest in ((2, 5), (3, 4), (4, 2)) for s in product(range(1, largest + 1), repeat=num)]
    yield from ((s,) for s in sorted(sizes, key=lambda s: (sum(s), s)))


def equal_size_cases() -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for num, n in product((2, 3), (1, 3)):
        for gradients in product((0, 1, 3), repeat=num):
            yield (n,) * num, gradients


def client_rescales(gradients: tuple[int, ...], alpha: float) -> Finding:
    g_I = tensor(gradients)
    got, mean = reshaped_gradients(g_I, alpha=alpha).mean(), g_I.mean()
    return Finding(distance(got, (1 - alpha) * mean), f"g = {gradients}, α = {alpha:g}: {got:g}, ḡ = {mean:g}")


def client_is_the_mean(gradients: tuple[int, ...], alpha: float) -> Finding:
    g_I = tensor(gradients)
    got, mean = reshaped_gradients(g_I, alpha=alpha).mean(), g_I.mean()
    return Finding(distance(got, mean), f"g = {gradients}, α = {alpha:g}: {got:g}, not ḡ = {mean:g}")


def no_sample_gradients_needed(gradients: tuple[int, ...], alpha: float) -> Finding:
    """With π_i in proportion to 1, 2, 3, …: sample by sample, from q and ḡ, and as one weighted sum."""
    g_I, pi_I = tensor(gradients), torch.arange(1, len(gradients) + 1).double()
    pi_I = pi_I / pi_I.sum()
    by_sample = (pi_I * reshaped_gradients(g_I, alpha=alpha)).sum()
    from_means = client_gradient((pi_I * g_I).sum(), g_I.mean(), size=len(g_I), alpha=alpha)
    from_weights = (sample_weights(pi_I, size=len(g_I), alpha=alpha) * g_I).sum()
    gap = max(distance(by_sample, from_means), distance(by_sample, from_weights))
    return Finding(gap, f"g = {gradients}, α = {alpha:g}")


def weights_sum_to_zero(sizes: tuple[int, ...]) -> Finding:
    total = server_weights(tensor(sizes)).sum()
    return Finding(abs(total.item()), f"n = {sizes}: Σ_v p_v w_v = {total:g}")


def smallest_client_counts_negatively(sizes: tuple[int, ...]) -> Finding:
    """w_v grows with n_v and the weights sum to zero, so the smallest is negative unless all are equal."""
    w_U = server_weights(tensor(sizes))
    least = w_U[sizes.index(min(sizes))].item()
    violated = least >= 0 and len(set(sizes)) > 1
    return Finding(float(violated), f"n = {sizes}: {least:g}")


def equal_sizes_never_move(sizes: tuple[int, ...], gradients: tuple[int, ...]) -> Finding:
    g = server_gradient(tensor(gradients), tensor(sizes))
    return Finding(abs(g.item()), f"n = {sizes}, g = {gradients}: {g:g}")


def double_is_ncv(sizes: tuple[int, ...]) -> Finding:
    clients = [torch.arange(1, n + 1).double().square() + u for u, n in enumerate(sizes)]
    means = torch.stack([reshaped_gradients(g_I, alpha=0.5).mean() for g_I in clients])
    double, ncv = server_gradient(means, tensor(sizes)), networked_gradient(clients, alpha=0.5)
    return Finding(distance(double, ncv), f"n = {sizes}: {double:g} and {ncv:g}")


def alpha_goes_to_one(gradients: tuple[int, ...], alpha: float) -> Finding:
    """1 − α ← (1 − α)(1 − 2γ‖ḡ‖²)."""
    mean, lr = tensor(gradients).mean().reshape(1), 0.1
    after = alpha_step(tensor(alpha), mean, mean, size=len(gradients), lr=lr)
    expected = 1 - (1 - alpha) * (1 - 2 * lr * mean.square().sum())
    return Finding(distance(after, expected), f"ḡ = {mean.item():g}, α = {alpha:g}: {after:g}")


STATEMENTS = (
    Statement(
        "client rule rescales", "mean_i (g_i − α c_{D_u∖i}) = (1 − α) ḡ_u", CLIENT, sample_cases, client_rescales
    ),
    Statement(
        "client rule keeps the mean",
        "mean_i (g_i − α c_{D_u∖i}) = ḡ_u for every α",
        CLIENT,
        sample_cases,
        client_is_the_mean,
    ),
    Statement(
        "Algorithm 1 without sample gradients",
        "Σ_i π_i g'_i = q − α (n_u ḡ_u − q)/(n_u − 1) = Σ_i κ_i g_i",
        "Algorithm 1",
        sample_cases,
        no_sample_gradients_needed,
    ),
    Statement(
        "α goes to 1",
        "Algorithm 1's step is 1 − α_u ← (1 − α_u)(1 − 2γ‖ḡ_u‖²)",
        "Algorithm 1",
        sample_cases,
        alpha_goes_to_one,
    ),
    Statement(
        "Double is NCV",
        "client means in the server rule equal the sum over samples",
        "eq. (Double), (NCV)",
        size_cases,
        double_is_ncv,
    ),
    Statement(
        "zero-sum weights",
        "the server rule's weights sum to zero for any sizes",
        SERVER,
        size_cases,
        weights_sum_to_zero,
    ),
    Statement(
        "smallest client counts negatively",
        "with unequal sizes the smallest client's weight is negative",
        SERVER,
        size_cases,
        smallest_client_counts_negatively,
    ),
    Statement(
        "equal sizes never move",
        "with equal sizes the server rule gives 0 for any gradients",
        SERVER,
        equal_size_cases,
        equal_sizes_never_move,
    ),
)
