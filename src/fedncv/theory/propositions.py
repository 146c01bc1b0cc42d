"""Propositions 1 to 3 of the paper for its own estimator, and for the client rule alone.

Every outcome of random samples is enumerated, in rationals (samples.py). Derivations: docs/theory.md,
section 2; the centred estimator's counterparts are in centred.py.
"""

from collections.abc import Iterator
from fractions import Fraction
from itertools import product

import torch

from fedncv.estimators import networked_gradient, reshaped_gradients, server_weights
from fedncv.theory import samples
from fedncv.theory.literal import ALPHAS, size_cases
from fedncv.theory.samples import World, worlds
from fedncv.theory.statement import Finding, Statement, tensor

HALVES = tuple(Fraction(k, 2) for k in range(3))


def agreeing_worlds() -> Iterator[tuple[World, float]]:
    """Yield worlds whose samples all have the same two values, mean 1, so the true gradient is 1 for every client."""
    sizes = [s for num in (2, 3) for s in product((1, 2, 3), repeat=num) if sum(s) <= 5]
    for s in sorted(sizes, key=lambda s: (sum(s), s)):
        for alpha in ALPHAS:
            yield World(s, ((0, 2),) * len(s)), alpha


def expected_gradient(world: World, alpha: float) -> float:
    """E of eq. (NCV) over every outcome of the samples."""
    drawn = [[tensor([float(g) for g in client]) for client in sample] for sample in samples.outcomes(world)]
    return torch.stack([networked_gradient(clients, alpha=alpha) for clients in drawn]).mean().item()


def literal_is_unbiased(world: World, alpha: float) -> Finding:
    got = expected_gradient(world, alpha)
    return Finding(abs(got - 1), f"{world}, α = {alpha:g}: E[g] = {got:g}, true gradient 1")


def single_level_is_unbiased(world: World, alpha: float) -> Finding:
    """Average the clients' reshaped means with p_u, without the server rule; linear, so the mean outcome is enough."""
    means = [reshaped_gradients(torch.ones(n).double(), alpha=alpha).mean() for n in world.sizes]
    got = sum(n * mean.item() for n, mean in zip(world.sizes, means, strict=True)) / sum(world.sizes)
    return Finding(abs(got - 1), f"{world}, α = {alpha:g}: E[g] = {got:g}, true gradient 1")


def world_cases() -> Iterator[tuple[World]]:
    yield from ((world,) for world in worlds())


def world_alpha_cases() -> Iterator[tuple[World, Fraction]]:
    yield from ((world, alpha) for world in worlds() for alpha in HALVES)


def printed_alpha_is_optimal(world: World) -> Finding:
    best, printed = samples.minimiser(world, samples.networked), samples.printed_alpha(world)
    least, got = (samples.variance(world, samples.networked(a)) for a in (best, printed))
    words = f"{world}: printed α = {printed}, Var {got}; least at α = {best}, Var {least}"
    return Finding(got - least, words)


def printed_alpha_has_no_unit(world: World) -> Finding:
    twice = World(world.sizes, tuple((2 * low, 2 * high) for low, high in world.values))
    one, two = samples.printed_alpha(world), samples.printed_alpha(twice)
    return Finding(abs(one - two), f"{world}: α = {one}; all gradients doubled: α = {two}")


def aggregate_is_least_where_it_vanishes(world: World) -> Finding:
    """g = (1 − α) Σ_v p_v w_v ḡ_v, so its variance is a multiple of (1 − α)²."""
    drawn = [[tensor([float(g) for g in client]) for client in sample] for sample in samples.outcomes(world)]
    at_one = torch.stack([networked_gradient(clients, alpha=1.0) for clients in drawn])
    return Finding(at_one.abs().max().item(), f"{world}: g at α = 1 is not zero")


def independent_others_do_not_help(world: World) -> Finding:
    best = samples.minimiser(world, samples.single)
    return Finding(abs(best), f"{world}: best α = {best}")


def networked_beats_single(world: World, alpha: Fraction) -> Finding:
    double, single = (samples.variance(world, h(alpha)) for h in (samples.networked, samples.single))
    return Finding(max(double - single, Fraction(0)), f"{world}, α = {alpha}: Var h = {double}, Var h_s = {single}")


def single_beats_none(world: World, alpha: Fraction) -> Finding:
    single, none = samples.variance(world, samples.single(alpha)), samples.variance(world, samples.single(Fraction(0)))
    return Finding(max(single - none, Fraction(0)), f"{world}, α = {alpha}: Var h_s = {single}, Var g = {none}")


def difference_is_the_others_variance(world: World, alpha: Fraction) -> Finding:
    true = samples.variance(world, samples.networked(alpha)) - samples.variance(world, samples.single(alpha))
    added = samples.variance(world, samples.subtracted(alpha))
    return Finding(abs(true - added), f"{world}, α = {alpha}: {true} against {added}")


def printed_difference_is_right(world: World, alpha: Fraction) -> Finding:
    true = samples.variance(world, samples.networked(alpha)) - samples.variance(world, samples.single(alpha))
    printed = samples.printed_difference(world, alpha)
    return Finding(abs(true - printed), f"{world}, α = {alpha}: printed {printed}, true {true}")


def zero_mean_cases() -> Iterator[tuple[World, Fraction]]:
    yield from ((w, alpha) for w, alpha in world_alpha_cases() if all(sum(pair) == 0 for pair in w.values))


def printed_difference_is_right_and_not_negative(world: World, alpha: Fraction) -> Finding:
    gap, words = printed_difference_is_right(world, alpha)
    return Finding(max(gap, -samples.printed_difference(world, alpha)), words)


def aggregate_beats_single_level(sizes: tuple[int, ...]) -> Finding:
    """Independent samples of variance 1: Var = Σ_v (p_v w_v)² / n_v against Σ_v p_v² / n_v = 1/n; α = 0."""
    n_U = tensor(sizes)
    double, single = (server_weights(n_U).square() / n_U).sum().item(), 1 / sum(sizes)
    return Finding(max(double - single, 0.0), f"n = {sizes}: Var = {double:.4g}, single level {single:.4g}")


def appendix_a_cancels(sizes: tuple[int, ...]) -> Finding:
    """Compare the two terms that Appendix A cancels, each divided by its own sample's n − n_u,
    for g' = 1: 1/n Σ_i n g*/(n − n_u) and 1/n Σ_i Σ_{j∈D_u} g'_j/(n − n_u)."""
    n = sum(sizes)
    taken_off = sum((Fraction(s, n) * Fraction(n, n - s) for s in sizes), Fraction(0))
    put_back = sum((Fraction(s, n) * Fraction(s, n - s) for s in sizes), Fraction(0))
    return Finding(abs(taken_off - put_back), f"n = {sizes}, all g' = 1: the terms are {taken_off} and {put_back}")


STATEMENTS = (
    Statement(
        "Prop. 1, literal", "E[g] of eq. (NCV) is the true gradient", "Prop. 1", agreeing_worlds, literal_is_unbiased
    ),
    Statement(
        "Prop. 1, single level",
        "E[g] of the client rule alone is the true gradient for every α",
        "Prop. 1",
        agreeing_worlds,
        single_level_is_unbiased,
    ),
    Statement(
        "Appendix A's last step",
        "the last two terms of the expansion of g cancel",
        "Appendix A",
        size_cases,
        appendix_a_cancels,
    ),
    Statement("Prop. 2, literal", "the printed α minimises Var h(α)", "Prop. 2", world_cases, printed_alpha_is_optimal),
    Statement(
        "Prop. 2 has a unit",
        "the printed α does not change when all gradients are doubled",
        "Prop. 2",
        world_cases,
        printed_alpha_has_no_unit,
    ),
    Statement(
        "Prop. 2, aggregated",
        "Var g of eq. (NCV) is least at α = 1, where g = 0",
        "Prop. 2",
        world_cases,
        aggregate_is_least_where_it_vanishes,
    ),
    Statement(
        "Prop. 2, single level",
        "for independent samples Var h_s(α) is least at α = 0",
        "Prop. 2",
        world_cases,
        independent_others_do_not_help,
    ),
    Statement("Prop. 3, literal", "Var h(α) ≤ Var h_s(α)", "Prop. 3", world_alpha_cases, networked_beats_single),
    Statement("Prop. 3, single level", "Var h_s(α) ≤ Var g_u^i", "Prop. 3", world_alpha_cases, single_beats_none),
    Statement(
        "Prop. 3, true difference",
        "Var h − Var h_s is the variance of the term that h subtracts, so ≥ 0",
        "Appendix C",
        world_alpha_cases,
        difference_is_the_others_variance,
    ),
    Statement(
        "Prop. 3, printed difference",
        "Var h − Var h_s equals Appendix C's formula",
        "Appendix C",
        world_alpha_cases,
        printed_difference_is_right,
    ),
    Statement(
        "Prop. 3, printed difference, mean zero",
        "if E[c] = 0, as the appendix assumes, its formula is right and ≥ 0",
        "Appendix C",
        zero_mean_cases,
        printed_difference_is_right_and_not_negative,
    ),
    Statement(
        "Prop. 3, aggregated",
        "Var g of eq. (NCV) ≤ Var of the single-level estimate, α = 0",
        "Prop. 3",
        size_cases,
        aggregate_beats_single_level,
    ),
)
