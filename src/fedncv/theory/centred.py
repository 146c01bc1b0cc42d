"""Statements about the centred unit and the server's estimate, over every draw of m of N clients.

The estimators are those of fedncv.estimators, in float64. Derivations: docs/theory.md, sections 3 and 4.
"""

from collections.abc import Iterator
from itertools import product

import torch

from fedncv.estimators import (
    centred,
    horvitz_thompson_weights,
    leave_one_out_mean,
    replace_rows,
    weighted_mean,
    weighted_sum,
)
from fedncv.theory.rounds import (
    Round,
    Weights,
    equal_size_cases,
    estimates,
    mean_squared_error,
    round_beta_cases,
    round_cases,
    self_normalised,
    uniform_ht,
)
from fedncv.theory.statement import Finding, Statement, distance, tensor


def unbiased(r: Round, beta: float, weights: Weights) -> Finding:
    mean, full = estimates(r, beta, weights).mean(dim=0), r.full
    return Finding(
        distance(mean, full), f"{r}, β = {beta:g}: mean over draws {mean.item():.4g}, full {full.item():.4g}"
    )


def ht_is_unbiased(r: Round, beta: float) -> Finding:
    return unbiased(r, beta, uniform_ht)


def self_normalised_is_unbiased(r: Round, beta: float) -> Finding:
    return unbiased(r, beta, self_normalised)


def ht_errs_less(r: Round, beta: float) -> Finding:
    ht, own = (mean_squared_error(r, beta, w) for w in (uniform_ht, self_normalised))
    return Finding(max(ht - own, 0.0), f"{r}, β = {beta:g}: {ht:.4g} against {own:.4g}")


def self_normalised_errs_less(r: Round, beta: float) -> Finding:
    ht, own = (mean_squared_error(r, beta, w) for w in (uniform_ht, self_normalised))
    return Finding(max(own - ht, 0.0), f"{r}, β = {beta:g}: {own:.4g} against {ht:.4g}")


def unequal_inclusion_is_unbiased(r: Round, beta: float) -> Finding:
    """Draw S with probability proportional to 1 + its first client; π_u comes from the enumeration."""
    chance = [1 + S[0] for S in r.draws]
    probability_D = tensor(chance) / sum(chance)
    member_DN = tensor([[float(u in S) for u in range(len(r.sizes))] for S in r.draws])
    inclusion_N = probability_D @ member_DN
    got = probability_D @ estimates(r, beta, lambda r, S: horvitz_thompson_weights(r.p_N[S], inclusion_N[S]))
    return Finding(distance(got, r.full), f"{r}, β = {beta:g}, π = {inclusion_N.tolist()}: {got.item():.4g}")


def unit_cases() -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for num in (1, 2, 3):
        yield from product(product((1, 2), repeat=num), product((0, 1, 3), repeat=num))


def unit_is_centred(sizes: tuple[int, ...], values: tuple[int, ...]) -> Finding:
    w_U, a_U = tensor(sizes) / sum(sizes), tensor(values)
    d_U = centred(a_U, w_U)
    scaled_U = (1 - w_U) * (a_U - leave_one_out_mean(a_U, w_U))
    return Finding(max(distance(d_U, scaled_U), abs((w_U @ d_U).item())), f"n = {sizes}, a = {values}")


def leave_one_out_difference_is_centred(sizes: tuple[int, ...], values: tuple[int, ...]) -> Finding:
    w_U, a_U = tensor(sizes) / sum(sizes), tensor(values)
    mean = w_U @ (a_U - leave_one_out_mean(a_U, w_U))
    return Finding(abs(mean.item()), f"n = {sizes}, a = {values}: Σ w_u (a_u − a_∖u) = {mean.item():.4g}")


def several_unit_cases() -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    yield from (case for case in unit_cases() if len(case[0]) > 1)


def perfect_memory_has_no_variance(r: Round) -> Finding:
    remembered = r._replace(memory=r.delta)
    worst = max(distance(estimates(remembered, 1.0, w), r.full) for w in (uniform_ht, self_normalised))
    return Finding(worst, f"{remembered}")


def sums_survive_changing_sizes(sizes: tuple[int, ...], values: tuple[int, ...]) -> Finding:
    """Change every client in turn to (n_u + 1, h_u − 2), one row at a time."""
    n_N, h_NP = tensor(sizes), tensor(values).reshape(-1, 1)
    sums = weighted_sum(h_NP, n_N)
    for u in range(len(sizes)):
        sums = replace_rows(sums, h_NP[u : u + 1], n_N[u : u + 1], h_NP[u : u + 1] - 2, n_N[u : u + 1] + 1)
    scratch = weighted_mean(weighted_sum(h_NP - 2, n_N + 1))
    return Finding(distance(weighted_mean(sums), scratch), f"n = {sizes}, h = {values}")


def beta_zero_is_fedavg(r: Round) -> Finding:
    """Compare bit for bit with FedAvg's own reduction: the gap is 1 unless every number is equal."""
    n_N = tensor(r.sizes)
    fedavg = [n_N[S] / n_N[S].sum().clamp(min=1) @ r.delta_N1[S] for S in r.draws]  # no samples: no step
    return Finding(float(not torch.equal(torch.stack(fedavg), estimates(r, 0.0, self_normalised))), f"{r}")


def beta_one_is_fedvarp(r: Round, _beta: float) -> Finding:
    fedvarp = torch.stack([(r.delta_N1[S] - r.h_N1[S]).mean(dim=0) + r.h_N1.mean(dim=0) for S in r.draws])
    return Finding(distance(estimates(r, 1.0), fedvarp), f"{r}")


UNIT, DRAW = "docs, section 3", "docs, section 4"
STATEMENTS = (
    Statement(
        "centred unit", "(1 − w_u)(a_u − a_∖u) = a_u − ā, and Σ_u w_u d_u = 0", UNIT, unit_cases, unit_is_centred
    ),
    Statement(
        "unscaled leave-one-out difference",
        "Σ_u w_u (a_u − a_∖u) = 0 for any weights",
        UNIT,
        several_unit_cases,
        leave_one_out_difference_is_centred,
    ),
    Statement(
        "Prop. 1, centred",
        "Horvitz–Thompson ĝ is unbiased at every β, over all draws, for any sizes, also with unseen clients",
        DRAW,
        round_beta_cases,
        ht_is_unbiased,
    ),
    Statement(
        "Prop. 1, centred, unequal inclusion",
        "Horvitz–Thompson ĝ is unbiased also when some clients are drawn more often",
        DRAW,
        round_beta_cases,
        unequal_inclusion_is_unbiased,
    ),
    Statement(
        "self-normalised weights",
        "self-normalised ĝ is unbiased for any sizes",
        DRAW,
        round_beta_cases,
        self_normalised_is_unbiased,
    ),
    Statement(
        "self-normalised, equal sizes",
        "self-normalised ĝ is unbiased when all sizes are equal",
        DRAW,
        equal_size_cases,
        self_normalised_is_unbiased,
    ),
    Statement(
        "unbiased errs less",
        "Horvitz–Thompson's mean squared error ≤ self-normalised's",
        DRAW,
        round_beta_cases,
        ht_errs_less,
    ),
    Statement(
        "self-normalised errs less",
        "self-normalised mean squared error ≤ Horvitz–Thompson's",
        DRAW,
        round_beta_cases,
        self_normalised_errs_less,
    ),
    Statement(
        "perfect memory",
        "h = Δ with β = 1 gives Σ_u p_u Δ_u in every draw, with both kinds of weights",
        DRAW,
        round_cases,
        perfect_memory_has_no_variance,
    ),
    Statement(
        "limit β = 0", "self-normalised ĝ at β = 0 is FedAvg to the last bit", DRAW, round_cases, beta_zero_is_fedavg
    ),
    Statement("limit β = 1", "with equal sizes ĝ at β = 1 is FedVARP", DRAW, equal_size_cases, beta_one_is_fedvarp),
    Statement(
        "incremental sums",
        "h̄ updated row by row equals h̄ recomputed, also if sizes change",
        DRAW,
        unit_cases,
        sums_survive_changing_sizes,
    ),
)
