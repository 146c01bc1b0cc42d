"""Statements about the coefficient β: the variance over a draw, its minimum, and estimates of β*.

Derivations: docs/theory.md, section 5.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product

import torch
from torch import Tensor

from fedncv.estimators import (
    controlled,
    design_covariance,
    leave_one_out_betas,
    optimal_beta,
    squared_correlation,
    uniform_covariance,
)
from fedncv.theory.rounds import (
    Round,
    estimates,
    mean_squared_error,
    round_beta_cases,
    round_cases,
    self_normalised,
    variance,
)
from fedncv.theory.statement import Finding, Statement, tensor


def optimum_leaves_one_minus_rho_squared(r: Round) -> Finding:
    a_N1, b_N1 = r.units
    beta, rho2 = optimal_beta(a_N1, b_N1), squared_correlation(a_N1, b_N1).item()
    at_best, at_zero = variance(estimates(r, beta)), variance(estimates(r, 0.0))
    return Finding(
        abs(at_best - (1 - rho2) * at_zero), f"{r}: Var(β*) = {at_best:.4g}, Var(0) = {at_zero:.4g}, ρ² = {rho2:.4g}"
    )


def nothing_beats_the_optimum(r: Round, beta: float) -> Finding:
    at_best, at_beta = variance(estimates(r, optimal_beta(*r.units))), variance(estimates(r, beta))
    return Finding(max(at_best - at_beta, 0.0), f"{r}: Var(β*) = {at_best:.4g}, Var({beta:g}) = {at_beta:.4g}")


def memory_never_hurts(r: Round, beta: float) -> Finding:
    at_beta, at_zero = variance(estimates(r, beta)), variance(estimates(r, 0.0))
    return Finding(max(at_beta - at_zero, 0.0), f"{r}: Var({beta:g}) = {at_beta:.4g}, Var(0) = {at_zero:.4g}")


def closed_form_is_the_enumeration(r: Round, beta: float) -> Finding:
    """Check both closed forms: uniform draws, and any design with joint inclusion probabilities."""
    a_N1, b_N1 = r.units
    residual_N1 = a_N1 - beta * b_N1
    closed = uniform_covariance(residual_N1, residual_N1, num_drawn=r.num_drawn).item()
    member_DN = tensor([[float(u in S) for u in range(len(r.sizes))] for S in r.draws])
    share_N1 = residual_N1 / len(r.sizes)
    design = design_covariance(share_N1, share_N1, member_DN.T @ member_DN / len(member_DN)).item()
    listed = variance(estimates(r, beta))
    return Finding(max(abs(closed - listed), abs(design - listed)), f"{r}, β = {beta:g}: {closed:.4g}, {listed:.4g}")


def least_variance_is_least_error(r: Round) -> Finding:
    """Self-normalised ĝ = X − β Y with X = Σ ω Δ and Y = Σ ω h − h̄; the mean of Y is not zero."""
    at_zero, at_one = (estimates(r, beta, self_normalised) for beta in (0.0, 1.0))
    x, y = at_zero - r.full, at_zero - at_one
    for_variance, square = optimal_beta(x, y), y.square().sum().item()
    for_error = (x * y).sum().item() / square if square else 0.0
    got, least = (mean_squared_error(r, beta, self_normalised) for beta in (for_variance, for_error))
    words = f"{r}: β = {for_variance.item():.4g} has error {got:.4g}, β = {for_error:.4g} has {least:.4g}"
    return Finding(max(got - least, 0.0), words)


Draws = Callable[[int, int], Sequence[Sequence[int]]]


def fitted_on_the_draw(draws: Draws, betas: Callable[[Tensor, Tensor], Tensor]) -> Callable[[tuple[int, ...]], Finding]:
    """Return a check that mean_S(a_u − β_u (b_u − b̄)) with β fitted on the draw is unbiased; b = 0, 1, 2, …"""

    def check(a: tuple[int, ...]) -> Finding:
        a_N1, b_N1 = tensor(a).reshape(-1, 1), torch.arange(len(a)).double().reshape(-1, 1)
        values = []
        for S in map(list, draws(len(a), 3)):
            beta_S1 = betas(a_N1[S], b_N1[S]).expand(len(S)).reshape(-1, 1)
            values.append(controlled(a_N1[S], b_N1[S], b_N1.mean(dim=0).expand(len(S), 1), alpha=beta_S1).mean())
        got, true = torch.stack(values).mean().item(), a_N1.mean().item()
        return Finding(
            abs(got - true), f"a = {a}, b = {tuple(range(len(a)))}, m = 3: mean over draws {got:.4g}, true {true:.4g}"
        )

    return check


def without_replacement(num_units: int, num_drawn: int) -> list[tuple[int, ...]]:
    return list(combinations(range(num_units), num_drawn))


def with_replacement(num_units: int, num_drawn: int) -> list[tuple[int, ...]]:
    return list(product(range(num_units), repeat=num_drawn))


def population_cases() -> Iterator[tuple[tuple[int, ...]]]:
    yield from ((a,) for a in product((0, 1), (0, 1, 4), (0, 1), (0, 1, 4)))


COEFFICIENT = "docs, section 5"
STATEMENTS = (
    Statement(
        "variance over the draw",
        "closed forms of Var(β) equal the enumeration, without replacement",
        COEFFICIENT,
        round_beta_cases,
        closed_form_is_the_enumeration,
    ),
    Statement(
        "Prop. 2, centred",
        "no β has a smaller variance than β* = Cov/Var",
        COEFFICIENT,
        round_beta_cases,
        nothing_beats_the_optimum,
    ),
    Statement(
        "optimal variance",
        "Var(β*) = (1 − ρ²) Var(0), without replacement",
        COEFFICIENT,
        round_cases,
        optimum_leaves_one_minus_rho_squared,
    ),
    Statement("any β helps", "Var(β) ≤ Var(0) for every β", COEFFICIENT, round_beta_cases, memory_never_hurts),
    Statement(
        "β for self-normalised weights",
        "the β of least variance has the least mean squared error",
        COEFFICIENT,
        round_cases,
        least_variance_is_least_error,
    ),
    Statement(
        "in-sample β",
        "ĝ stays unbiased when β is fitted on the draw",
        COEFFICIENT,
        population_cases,
        fitted_on_the_draw(without_replacement, optimal_beta),
    ),
    Statement(
        "leave-one-out β",
        "ĝ stays unbiased when β_u is fitted on the other clients of the draw",
        COEFFICIENT,
        population_cases,
        fitted_on_the_draw(without_replacement, leave_one_out_betas),
    ),
    Statement(
        "leave-one-out β, with replacement",
        "ĝ stays unbiased when β_u is fitted on the other clients of a draw with replacement",
        COEFFICIENT,
        population_cases,
        fitted_on_the_draw(with_replacement, leave_one_out_betas),
    ),
)
