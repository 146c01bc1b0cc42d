"""Verdicts are computed: true claims hold, false ones do not, and the smallest counterexample is named."""

from fractions import Fraction

import pytest
import torch

from fedncv.estimators import leave_one_out_mean, server_weights
from fedncv.theory import STATEMENTS, Finding, Statement, evaluate


def statement(cases, check):
    return Statement("a name", "a claim", "a source", lambda: cases, check)


def numbers(*values):
    return [(value,) for value in values]


def test_a_true_claim_holds_and_counts_its_cases():
    verdict = evaluate(statement(numbers(1, 2, 3), lambda k: Finding(0.0, f"k = {k}")))
    assert verdict == (True, 3, 0.0, "")


def test_a_false_claim_fails_with_its_first_violation():
    verdict = evaluate(statement(numbers(1, 2, 3, 4), lambda k: Finding(max(k - 2, 0), f"k = {k}")))
    assert verdict == (False, 4, 2.0, "k = 3")


def test_rationals_are_decided_exactly_above_the_tolerance():
    assert evaluate(statement(numbers(Fraction(1, 10**10)), lambda k: Finding(k, ""))).holds
    assert not evaluate(statement(numbers(Fraction(1, 10**8)), lambda k: Finding(k, ""))).holds


def test_nan_is_a_violation():
    assert not evaluate(statement(numbers(1), lambda k: Finding(float("nan"), "nan"))).holds


def test_nothing_tried_is_nothing_shown():
    assert not evaluate(statement([], lambda: Finding(0.0, ""))).holds


FALSE_CLAIMS = {
    "leave-one-out means average to the weighted mean": lambda n, a: (
        (n / n.sum()) @ leave_one_out_mean(a, n) - (n / n.sum()) @ a
    ),
    "the literal server weights sum to one": lambda n, a: server_weights(n).sum() - 1,
    "the literal server weights are the plain ones": lambda n, a: (server_weights(n) - n / n.sum()).abs().max(),
    "the leave-one-out mean is the mean": lambda n, a: (leave_one_out_mean(a, n) - a.mean()).abs().max(),
}


@pytest.mark.parametrize("claim", FALSE_CLAIMS)
def test_deliberately_false_statements_come_out_false(claim):
    cases = [
        (torch.tensor(n).double(), torch.tensor(a).double())
        for n in ((1, 2), (2, 3, 4))
        for a in ((0, 1, 5)[: len(n)], (3, 1, 1)[: len(n)])
    ]
    verdict = evaluate(statement(cases, lambda n, a: Finding(abs(FALSE_CLAIMS[claim](n, a).item()), f"{n}, {a}")))
    assert not verdict.holds
    assert verdict.counterexample


TO_BREAK = ("centred unit", "zero-sum weights", "optimal variance", "limit α = 1")


@pytest.mark.parametrize("original", [s for s in STATEMENTS if s.name in TO_BREAK], ids=lambda s: s.name)
def test_a_statement_with_a_broken_estimator_comes_out_false(original, monkeypatch):
    """The verdict is about the estimators that are shipped: change one and it changes."""
    from fedncv.theory import centred, drift, literal, rounds

    half = lambda f: lambda *args, **kwargs: f(*args, **kwargs) / 2 + 0.1  # noqa: E731
    monkeypatch.setattr(centred, "leave_one_out_mean", half(centred.leave_one_out_mean))
    monkeypatch.setattr(literal, "server_weights", half(literal.server_weights))
    monkeypatch.setattr(drift, "raw_gradient", half(drift.raw_gradient))
    real = rounds.server_estimate
    monkeypatch.setattr(
        rounds, "server_estimate", lambda delta, h, omega, mean_h, *, beta: real(delta, -h, omega, mean_h, beta=beta)
    )
    assert not evaluate(original).holds
