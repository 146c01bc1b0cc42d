"""Statements about mini-batches, about two levels at once, and about score functions.

Two levels: clients are drawn, and each client draws one of its batches. Every pair of draws is listed.
Derivations: docs/theory.md, sections 7 and 8.
"""

from collections.abc import Callable, Iterator
from itertools import combinations, product

import torch
from torch import Tensor
from torch.func import vmap

from fedncv.estimators import (
    bernoulli_outcomes,
    bernoulli_score,
    double_control_variate,
    horvitz_thompson_weights,
    new_table,
    optimal_beta,
    reinforce,
    rloo,
    server_estimate,
    svrg_direction,
)
from fedncv.theory.statement import Finding, Statement, distance, tensor


def batch_cases() -> Iterator[tuple[tuple[int, ...], tuple[int, ...], float]]:
    """Yield sizes and stored gradients of two or three batches, and α."""
    for num in (2, 3):
        yield from product(product((1, 2), repeat=num), product((0, 1, 3), repeat=num), (0.5, 1.0))


def visited_mean(sizes: tuple[int, ...], memory: tuple[int, ...], alpha: float, visits_B: Tensor) -> Finding:
    """Use new gradients 1, 4, 9, …; ā weighs batches by size, and visits are as given."""
    w_B, a_BP = tensor(sizes) / sum(sizes), tensor(memory).reshape(-1, 1)
    g_BP = torch.arange(1, len(sizes) + 1).double().square().reshape(-1, 1)
    table = new_table(a_BP, w_B)
    z_BP = torch.stack([svrg_direction(table, torch.tensor(b), g_BP[b], alpha=alpha) for b in range(len(sizes))])
    got, true = visits_B @ z_BP, visits_B @ g_BP
    words = f"|B| = {sizes}, a = {memory}, α = {alpha:g}: mean {got.item():.4g}, without table {true.item():.4g}"
    return Finding(distance(got, true), words)


def visits_in_proportion(sizes: tuple[int, ...], memory: tuple[int, ...], alpha: float) -> Finding:
    return visited_mean(sizes, memory, alpha, tensor(sizes) / sum(sizes))


def visits_each_once(sizes: tuple[int, ...], memory: tuple[int, ...], alpha: float) -> Finding:
    return visited_mean(sizes, memory, alpha, torch.full((len(sizes),), 1 / len(sizes), dtype=torch.float64))


NUM_DRAWN, SIZES = 2, (1, 2, 4)
FRESH = tensor([[1.0, 5.0], [-2.0, 4.0], [6.0, 0.0]])  # gradients of each client's two equal batches
AnyBatch = tensor([0.5, 0.5])


def two_level_cases() -> Iterator[tuple[Tensor, Tensor, float, float]]:
    """Batch tables, server memory, α, β."""
    tables = (FRESH.flip(0), FRESH + tensor([[0.5, -0.5], [1.0, 0.0], [0.0, 1.0]]))
    memories = (tensor([3.0, 0.0, 2.0]), tensor([4.0, 1.0, 2.0]))
    yield from product(tables, memories, (0.0, 0.5, 1.0), (0.0, 0.5, 1.0))


def two_level_estimates(table_NB: Tensor, h_N: Tensor, alpha: float, beta: float) -> Tensor:
    """ĝ of every draw of two of three clients and of a batch by each."""
    p_N = tensor(SIZES) / sum(SIZES)
    tables = [new_table(row_B[:, None], AnyBatch) for row_B in table_NB]
    values = []
    for S in map(list, combinations(range(3), NUM_DRAWN)):
        omega_S = horvitz_thompson_weights(p_N[S], torch.full((NUM_DRAWN,), NUM_DRAWN / 3, dtype=torch.float64))
        for batches in product((0, 1), repeat=NUM_DRAWN):
            z_S1 = torch.stack(
                [
                    svrg_direction(tables[u], torch.tensor(b), FRESH[u, b].reshape(1), alpha=alpha)
                    for u, b in zip(S, batches, strict=True)
                ]
            )
            values.append(server_estimate(z_S1, h_N[S, None], omega_S, (p_N @ h_N).reshape(1), beta=beta))
    return torch.stack(values)


def spread(values: Tensor) -> float:
    return (values - values.mean(dim=0)).square().mean().item()


def two_levels_are_unbiased(table_NB: Tensor, h_N: Tensor, alpha: float, beta: float) -> Finding:
    p_N = tensor(SIZES) / sum(SIZES)
    got, true = two_level_estimates(table_NB, h_N, alpha, beta).mean().item(), (p_N @ FRESH.mean(dim=1)).item()
    return Finding(abs(got - true), f"α = {alpha:g}, β = {beta:g}: mean over all draws {got:.4g}, full {true:.4g}")


def levels_add_up(table_NB: Tensor, h_N: Tensor, alpha: float, beta: float) -> Finding:
    """Var(α, β) − Var(α, 0) − Var(0, β) + Var(0, 0) = 0: neither coefficient depends on the other."""
    at = {(a, b): spread(two_level_estimates(table_NB, h_N, a, b)) for a in (alpha, 0.0) for b in (beta, 0.0)}
    mixed = at[alpha, beta] - at[alpha, 0.0] - at[0.0, beta] + at[0.0, 0.0]
    return Finding(abs(mixed), f"α = {alpha:g}, β = {beta:g}: mixed difference {mixed:.4g}")


def two_optima_beat_one(table_NB: Tensor, h_N: Tensor, _alpha: float, _beta: float) -> Finding:
    """α* and β* each minimise their own level's variance; together they give the smallest variance."""
    p_N1 = (tensor(SIZES) / sum(SIZES))[:, None]
    centred_NB, memory_NB = FRESH - FRESH.mean(1, keepdim=True), table_NB - table_NB.mean(1, keepdim=True)
    alpha = ((p_N1.square() * centred_NB * memory_NB).sum() / (p_N1 * memory_NB).square().sum()).item()
    beta = optimal_beta(p_N1 * FRESH.mean(1, keepdim=True), p_N1 * h_N[:, None]).item()
    both = spread(two_level_estimates(table_NB, h_N, alpha, beta))
    one = min(spread(two_level_estimates(table_NB, h_N, *pair)) for pair in ((alpha, 0.0), (0.0, beta)))
    return Finding(max(both - one, 0.0), f"Var(α*, β*) = {both:.4g}, best single level {one:.4g}")


Table = tuple[float, ...]


def score_cases() -> Iterator[tuple[Table, tuple[float, ...], int, float]]:
    """f as the table of its values on {0, 1}^D, the probabilities μ, K samples, α."""
    for values, mu, num, alpha in product(product((-1.0, 1.0, 3.0), repeat=2), (0.5, 0.25), (2, 3), (0.5, 1.0)):
        yield values, (mu,), num, alpha
    for values in ((0.0, 1.0, 2.0, 5.0), (3.0, -1.0, -1.0, 3.0)):
        yield values, (0.5, 0.25), 2, 1.0


def table_function(values: Table) -> Callable[[Tensor], Tensor]:
    """Return the multilinear function of D bits with these values at the corners, so that it has a gradient."""

    def f(x_D: Tensor) -> Tensor:
        corners = product((0.0, 1.0), repeat=len(x_D))
        terms = [
            v * (x_D * tensor(c) + (1 - x_D) * (1 - tensor(c))).prod() for v, c in zip(values, corners, strict=True)
        ]
        return torch.stack(terms).sum()

    return f


def score_moments(
    estimator: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], values: Table, mu: tuple[float, ...], num: int
) -> tuple[Tensor, float]:
    """Mean and total variance of estimator(f_K, df_KD, x_KD, μ_D) over all outcomes."""
    mu_D, f = tensor(mu), table_function(values)
    x_OKD, probability_O = bernoulli_outcomes(mu_D, num_samples=num)
    f_OK, df_OKD = vmap(vmap(f))(x_OKD), vmap(vmap(torch.func.grad(f)))(x_OKD)
    g_OD = vmap(lambda f_K, df_KD, x_KD: estimator(f_K, df_KD, x_KD, mu_D))(f_OK, df_OKD, x_OKD)
    mean_D = probability_O @ g_OD
    return mean_D, (probability_O @ (g_OD - mean_D).square()).sum().item()


def reinforce_of(f_K: Tensor, _df_KD: Tensor, x_KD: Tensor, mu_D: Tensor) -> Tensor:
    return reinforce(f_K, bernoulli_score(x_KD, mu_D))


def rloo_of(alpha: float) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    return lambda f_K, _df_KD, x_KD, mu_D: rloo(f_K, bernoulli_score(x_KD, mu_D), alpha=alpha)


def double_of(alpha: float) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    return lambda f_K, df_KD, x_KD, mu_D: double_control_variate(f_K, df_KD, x_KD, mu_D, alpha=alpha)


def score_functions_are_unbiased(values: Table, mu: tuple[float, ...], num: int, alpha: float) -> Finding:
    """Against ∂/∂θ_d E f = μ_d (1 − μ_d) E[f | x_d = 1] − …, which for a multilinear f is μ(1 − μ) ∂f(μ)/∂x."""
    mu_D = tensor(mu)
    exact_D = mu_D * (1 - mu_D) * torch.func.grad(table_function(values))(mu_D)
    estimators = (reinforce_of, rloo_of(alpha), double_of(alpha), double_of(-alpha))
    gap = max(distance(score_moments(e, values, mu, num)[0], exact_D) for e in estimators)
    return Finding(gap, f"f = {values}, μ = {mu}, K = {num}, α = {alpha:g}")


def rloo_beats_reinforce(values: Table, mu: tuple[float, ...], num: int, alpha: float) -> Finding:
    with_baseline, without = (score_moments(e, values, mu, num)[1] for e in (rloo_of(alpha), reinforce_of))
    words = f"f = {values}, μ = {mu}, K = {num}, α = {alpha:g}: Var {with_baseline:.4g}, REINFORCE {without:.4g}"
    return Finding(max(with_baseline - without, 0.0), words)


def linear_score_cases() -> Iterator[tuple[Table, tuple[float, ...], int, float]]:
    for values in ((0.0, 1.0), (2.0, -1.0)):
        yield values, (0.25,), 2, -1.0
    yield (1.0, 4.0, -1.0, 2.0), (0.25, 0.5), 2, -1.0  # 1 − 2 x_1 + 3 x_2


def linear_functions_leave_no_variance(values: Table, mu: tuple[float, ...], num: int, alpha: float) -> Finding:
    variance = score_moments(double_of(alpha), values, mu, num)[1]
    return Finding(variance, f"f = {values}, μ = {mu}: Var {variance:.4g}")


BATCH, SCORE = "docs, section 7", "docs, section 8"
STATEMENTS = (
    Statement(
        "batch table, visits in proportion",
        "mean z_B = mean g_B when batches are drawn in proportion to |B| and ā weighs them the same way",
        BATCH,
        batch_cases,
        visits_in_proportion,
    ),
    Statement(
        "batch table, each visited once",
        "mean z_B = mean g_B when a loop visits every batch once and ā weighs them by |B|",
        BATCH,
        batch_cases,
        visits_each_once,
    ),
    Statement(
        "two levels, unbiased",
        "batch table and server memory together are unbiased for every α, β",
        BATCH,
        two_level_cases,
        two_levels_are_unbiased,
    ),
    Statement(
        "two levels add up", "Var(α, β) is a function of α plus a function of β", BATCH, two_level_cases, levels_add_up
    ),
    Statement(
        "Prop. 3, centred",
        "Var(α*, β*) ≤ the variance of either level alone at its optimum",
        BATCH,
        two_level_cases,
        two_optima_beat_one,
    ),
    Statement(
        "score functions",
        "REINFORCE, RLOO and the double control variate are unbiased for every α",
        SCORE,
        score_cases,
        score_functions_are_unbiased,
    ),
    Statement(
        "RLOO always helps", "Var of RLOO ≤ Var of REINFORCE for every f", SCORE, score_cases, rloo_beats_reinforce
    ),
    Statement(
        "double control variate, linear f",
        "with α = −1 and f linear its variance is 0",
        SCORE,
        linear_score_cases,
        linear_functions_leave_no_variance,
    ),
)
