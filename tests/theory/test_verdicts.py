"""What every statement's verdict must be, from the algebra of docs/theory.md, and its parts by hand."""

from fractions import Fraction

import pytest
import torch
from torch.testing import assert_close

from fedncv.theory import STATEMENTS, drift, samples
from fedncv.theory.samples import World

FALSE = {
    "client rule keeps the mean",
    "Prop. 1, literal",
    "Prop. 1, single level",
    "Appendix A's last step",
    "Prop. 2, literal",
    "Prop. 2 has a unit",
    "Prop. 3, literal",
    "Prop. 3, single level",
    "Prop. 3, printed difference",
    "Prop. 3, aggregated",
    "unscaled leave-one-out difference",
    "self-normalised weights",
    "unbiased errs less",
    "self-normalised errs less",
    "any β helps",
    "β for self-normalised weights",
    "in-sample β",
    "leave-one-out β",
    "calibrated, unbiased",
    "calibrated errs less",
    "one step, Horvitz–Thompson",
    "FedAvg drifts",
    "corrected memory",
    "not recentred, one step",
    "α below one, many steps",
    "no server memory at rest",
    "batch table, each visited once",
    "RLOO always helps",
}


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda s: s.name)
def test_every_verdict_is_the_one_algebra_gives(statement, decide):
    verdict = decide(statement)
    assert verdict.holds == (statement.name not in FALSE)
    assert bool(verdict.counterexample) == (statement.name in FALSE)


def test_statements_are_many_and_named_once():
    names = [s.name for s in STATEMENTS]
    assert len(names) >= 15
    assert len(set(names)) == len(names)
    assert set(names) >= FALSE


TWO_AND_TWO = World((2, 2), ((-1, 1), (-1, 1)))


def test_variances_of_a_small_world_by_hand():
    """Two clients of two samples ±1: Var g = 1, Var c = 1, Var of the others' mean 1/2 (1 − α)²."""
    half = Fraction(1, 2)
    assert samples.variance(TWO_AND_TWO, samples.single(Fraction(0))) == 1
    assert samples.variance(TWO_AND_TWO, samples.single(half)) == Fraction(5, 4)
    assert samples.variance(TWO_AND_TWO, samples.subtracted(Fraction(0))) == half
    assert samples.variance(TWO_AND_TWO, samples.networked(half)) == Fraction(5, 4) + Fraction(1, 8)
    assert samples.minimiser(TWO_AND_TWO, samples.networked) == Fraction(1, 3)
    assert samples.minimiser(TWO_AND_TWO, samples.single) == 0


def test_the_printed_formulas_by_hand():
    """Means 0 and 1, n_v = 2, a = 2: E[g_u c] = 0, E[g_u] − E[g_v] = −1, Σ E[g_v c_v] = 2, E[c²] = 1 and 2.
    α = (2·4·(0 − 1) + 2) / (2·4·1 + 2·2) = −6/12."""
    world = World((2, 2), ((-1, 1), (0, 2)))
    assert samples.printed_alpha(TWO_AND_TWO) == 0
    assert samples.printed_alpha(world) == Fraction(-1, 2)
    # α = 1/2: E[(mean of g − c/2)²] = 1/4 (1 + 1/2) = 3/8, cross term 0, less 1
    assert samples.printed_difference(world, Fraction(1, 2)) == Fraction(3, 8) - 1


def test_outcomes_are_all_there():
    outcomes = list(samples.outcomes(World((2, 1), ((0, 1), (5, 7)))))
    assert len(outcomes) == len(set(outcomes)) == 8
    assert {len(client) for sample in outcomes for client in sample} == {1, 2}


QUADRATICS = drift.Quadratics((1.0, 4.0), (0.0, 1.0), (1, 1), (1.0, 1.0), 5)


@pytest.mark.parametrize("alpha", [(0.0, 0.0), (0.5, 0.5), (0.2, 0.8), (1.0, 1.0)])
def test_rounds_really_come_to_rest_where_the_linear_system_says(alpha):
    q = QUADRATICS._replace(alpha=alpha)
    state = torch.tensor([5.0, 0.0, 0.0], dtype=torch.float64)
    for _ in range(300):
        state = drift.one_round(q, state, recentred=True, raw=True)
    assert_close(state, drift.rest(q))


def test_the_optimum_and_fedavgs_rest_by_hand():
    """Optimum (1·0 + 4·1)/5. One step: the same. Two steps: A = 1 − 0.9² = 0.19 and 1 − 0.6² = 0.64."""
    assert QUADRATICS.optimum == pytest.approx(0.8)
    assert QUADRATICS._replace(num_steps=1).fedavg_rest == pytest.approx(0.8)
    assert QUADRATICS._replace(num_steps=2).fedavg_rest == pytest.approx(0.64 / 0.83)
