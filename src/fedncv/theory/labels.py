"""Statements about label shares: regression on them, and weights calibrated to them, over every draw of m of N clients.

Derivations: docs/theory.md, section 5.
"""

from collections.abc import Iterator
from itertools import combinations, product
from typing import NamedTuple

import torch
from torch import Tensor

from fedncv.estimators import (
    calibrated_weights,
    horvitz_thompson_weights,
    no_slopes,
    observe_labels,
    predicted,
    self_normalised_weights,
    server_estimate,
    slopes,
)
from fedncv.theory.statement import Finding, Statement, distance, tensor

TINY = 1e-13  # a ridge that changes nothing but makes a singular matrix invertible
RIDGES = (0.01, 0.1, 1.0, 10.0)


class Labelled(NamedTuple):
    """Samples of each class at every client, updates, slopes B of the control variate, and how many are drawn."""

    counts: tuple[tuple[int, ...], ...]
    delta: tuple[int, ...]
    B: tuple[int, ...]
    num_drawn: int

    def __str__(self) -> str:
        return f"labels {self.counts}, Δ = {self.delta}, B = {self.B}, m = {self.num_drawn}"

    @property
    def n_N(self) -> Tensor:
        return tensor(self.counts).sum(dim=1)

    @property
    def p_N(self) -> Tensor:
        return self.n_N / self.n_N.sum()

    @property
    def pi_NC(self) -> Tensor:
        return tensor(self.counts) / self.n_N[:, None]

    @property
    def mean_C(self) -> Tensor:
        return self.p_N @ self.pi_NC

    @property
    def h_N1(self) -> Tensor:
        return predicted(self.pi_NC, self.mean_C, tensor(self.B).reshape(-1, 1))

    @property
    def delta_N1(self) -> Tensor:
        return tensor(self.delta).reshape(-1, 1)

    @property
    def linear_N1(self) -> Tensor:
        """Updates that the labels decide: 5 + π_u B."""
        return 5 + self.pi_NC @ tensor(self.B).reshape(-1, 1)

    @property
    def draws(self) -> list[list[int]]:
        return [list(S) for S in combinations(range(len(self.counts)), self.num_drawn)]


COUNTS = (
    ((1, 0), (0, 1)),
    ((1, 0), (1, 2)),
    ((2, 0), (0, 1), (1, 1)),
    ((3, 1), (1, 0), (2, 2)),
    ((1, 0, 0), (0, 1, 0), (0, 0, 2), (1, 1, 1)),
    ((3, 0, 1), (0, 2, 2), (1, 0, 0), (0, 4, 0)),
)


def cases() -> Iterator[tuple[Labelled]]:
    for counts in COUNTS:
        deltas, many = ((0, 1, 4, -2)[: len(counts)], (3, -1, 0, 2)[: len(counts)]), range(1, len(counts) + 1)
        for delta, B, m in product(deltas, ((0, 0, 0), (1, 0, -2), (4, -3, 1)), many):
            yield (Labelled(counts, delta, B[: len(counts[0])], m),)


def ridge_cases() -> Iterator[tuple[Labelled, float]]:
    yield from ((case, ridge) for (case,), ridge in product(cases(), RIDGES) if not any(case.B))


def slope_ridge_cases() -> Iterator[tuple[Labelled, float]]:
    yield from ((case, ridge) for (case,), ridge in product(cases(), RIDGES) if any(case.B) and case.num_drawn == 1)


def noise_cases() -> Iterator[tuple[Labelled, float, float]]:
    """Variances of B and of what labels do not explain; every client has the same number of samples."""
    equal = [case for (case,) in cases() if not any(case.B) and len(set(case.n_N.tolist())) == 1]
    yield from product(equal, (0.5, 2.0), (0.1, 1.0))


def own(case: Labelled, S: list[int]) -> Tensor:
    return self_normalised_weights(case.n_N[S])


def ht(case: Labelled, S: list[int]) -> Tensor:
    return horvitz_thompson_weights(case.p_N[S], torch.full((len(S),), len(S) / len(case.counts), dtype=torch.float64))


def predictions_cancel(case: Labelled) -> Finding:
    return Finding(distance(case.p_N @ case.h_N1, torch.zeros(1)), f"{case}")


def regression_is_unbiased(case: Labelled) -> Finding:
    zero = torch.zeros(1, dtype=torch.float64)
    steps = [server_estimate(case.delta_N1[S], case.h_N1[S], ht(case, S), zero, beta=1.0) for S in case.draws]
    mean, full = torch.stack(steps).mean(dim=0), case.p_N @ case.delta_N1
    return Finding(distance(mean, full), f"{case}: mean over draws {mean.item():.4g}, full {full.item():.4g}")


def regression_is_exact(case: Labelled) -> Finding:
    zero = torch.zeros(1, dtype=torch.float64)
    steps = [server_estimate(case.linear_N1[S], case.h_N1[S], own(case, S), zero, beta=1.0) for S in case.draws]
    return Finding(distance(torch.stack(steps), (case.p_N @ case.linear_N1).expand(len(steps), 1)), f"{case}")


def regression_shrinks(case: Labelled, ridge: float) -> Finding:
    """Everybody's updates once, then predict; the covariance of π is computed in another way."""
    nothing = no_slopes(len(case.B), torch.zeros(1).double())
    sums = observe_labels(nothing, case.p_N, case.pi_NC, case.linear_N1, forget=1)
    found_N1 = predicted(case.pi_NC, case.mean_C, slopes(sums, ridge=ridge))
    cov_CC = case.pi_NC.T @ torch.diag(case.p_N) @ case.pi_NC - torch.outer(case.mean_C, case.mean_C)
    shrunk_CC = torch.linalg.solve(cov_CC + ridge * torch.eye(len(cov_CC)).double(), cov_CC)
    expected_N1 = (case.pi_NC - case.mean_C) @ shrunk_CC @ tensor(case.B).reshape(-1, 1)
    return Finding(distance(found_N1, expected_N1), f"{case}, ρ = {ridge:g}")


def calibrated(case: Labelled, S: list[int], ridge: float) -> Tensor:
    return calibrated_weights(own(case, S), case.pi_NC[S], case.mean_C, ridge=ridge)


def calibrated_sums_to_one(case: Labelled, ridge: float) -> Finding:
    worst = max(abs(calibrated(case, S, ridge).sum().item() - 1) for S in case.draws)
    return Finding(worst, f"{case}, ρ = {ridge:g}")


def calibrated_is_unbiased(case: Labelled, ridge: float) -> Finding:
    mean = torch.stack([calibrated(case, S, ridge) @ case.delta_N1[S] for S in case.draws]).mean(dim=0)
    full = case.p_N @ case.delta_N1
    return Finding(
        distance(mean, full), f"{case}, ρ = {ridge:g}: mean over draws {mean.item():.4g}, full {full.item():.4g}"
    )


def calibrated_errs_less(case: Labelled, ridge: float) -> Finding:
    full = case.p_N @ case.delta_N1
    weighed = [(calibrated(case, S, ridge), own(case, S), case.delta_N1[S]) for S in case.draws]
    ours = sum((w @ d - full).square().item() for w, _, d in weighed) / len(weighed)
    plain = sum((w @ d - full).square().item() for _, w, d in weighed) / len(weighed)
    return Finding(max(ours - plain, 0.0), f"{case}, ρ = {ridge:g}: error {ours:.4g}, plain {plain:.4g}")


def calibrated_is_exact(case: Labelled) -> Finding:
    """In the draws whose clients' shares span π̄: there Σ ω π = π̄, and updates that are linear in π have no error."""
    gaps = [0.0]
    for S in case.draws:
        pi_SC, w_S = case.pi_NC[S], own(case, S)
        x_SC, gap_C = pi_SC - w_S @ pi_SC, case.mean_C - w_S @ pi_SC
        reached = torch.linalg.lstsq(x_SC.T, gap_C[:, None], driver="gelsd").solution
        if distance(x_SC.T @ reached, gap_C[:, None]) < 1e-12:
            gaps.append(distance(calibrated(case, S, TINY) @ case.linear_N1[S], case.p_N @ case.linear_N1))
    return Finding(max(gaps), f"{case}")


def expected_error(case: Labelled, S: list[int], ridge: float, tau2: float, sigma2: float) -> float:
    """E‖Σ_S ω Δ − mean of all Δ‖² over B and ε, per parameter; Δ_u = b + π_u B + ε_u."""
    omega_S, num = calibrated(case, S, ridge), len(case.counts)
    labels = (omega_S @ case.pi_NC[S] - case.mean_C).square().sum()
    rest = omega_S.square().sum() - 2 * omega_S.sum() / num + 1 / num
    return (tau2 * labels + sigma2 * rest).item()


def best_ridge(case: Labelled, tau2: float, sigma2: float) -> Finding:
    best = sigma2 / (case.num_drawn * tau2)
    worst, at = 0.0, best
    for S, factor in product(case.draws, (0.2, 0.7, 0.95, 1.05, 1.5, 5.0)):
        gain = expected_error(case, S, best, tau2, sigma2) - expected_error(case, S, factor * best, tau2, sigma2)
        if gain > worst:
            worst, at = gain, factor * best
    return Finding(worst, f"{case}, τ² = {tau2:g}, σ² = {sigma2:g}: ρ = {at:g} has an error smaller by {worst:.2g}")


LABELS = "docs, section 5"
STATEMENTS = (
    Statement(
        "label predictions cancel", "Σ_u p_u h_u = 0 for every B and any sizes", LABELS, cases, predictions_cancel
    ),
    Statement(
        "label regression, unbiased",
        "with Horvitz–Thompson weights Σ_S ω_u (Δ_u − h_u) is unbiased for every B fixed before the draw",
        LABELS,
        cases,
        regression_is_unbiased,
    ),
    Statement(
        "label regression, exact",
        "if Δ_u = b + π_u B, every draw gives the full update, with self-normalised weights",
        LABELS,
        cases,
        regression_is_exact,
    ),
    Statement(
        "label regression shrinks",
        "updates b + π_u B of all clients give the predictions (π_u − π̄) (V + ρ I)⁻¹ V B, V = Cov π: h_u as ρ → 0",
        LABELS,
        slope_ridge_cases,
        regression_shrinks,
    ),
    Statement(
        "calibrated weights sum to one", "Σ_S ω_u = 1 for every ρ > 0", LABELS, ridge_cases, calibrated_sums_to_one
    ),
    Statement(
        "calibrated, exact",
        "if Δ_u = b + π_u B, a draw whose label shares span π̄ gives the full update as ρ → 0",
        LABELS,
        cases,
        calibrated_is_exact,
    ),
    Statement(
        "calibrated, unbiased",
        "the mean over draws with calibrated weights is the full update",
        LABELS,
        ridge_cases,
        calibrated_is_unbiased,
    ),
    Statement(
        "calibrated errs less",
        "the mean squared error with calibrated weights ≤ self-normalised's for any updates",
        LABELS,
        ridge_cases,
        calibrated_errs_less,
    ),
    Statement(
        "best ridge",
        "for Var B = τ², Var ε = σ² and equal sizes the expected error is least at ρ = σ²/(m τ²), in every draw",
        LABELS,
        noise_cases,
        best_ridge,
    ),
)
