"""A statement is a claim over a list of cases; its verdict comes from trying them all.

    holds  ⇔  gap(case) ≤ TOLERANCE for every case

Cases come smallest first, so the first one that violates the claim is the smallest counterexample of
the enumeration.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

TOLERANCE = 1e-9
"""Above the rounding of a few hundred float64 operations on numbers of order one, far below any violation."""


class Finding(NamedTuple):
    """How much one case violates the claim (0 if it holds), and a description of the case."""

    gap: float | Fraction
    words: str


@dataclass(frozen=True)
class Statement:
    name: str
    claim: str
    source: str
    """Source of the claim: an equation of the paper, or the section of docs/theory.md that derives it."""
    cases: Callable[[], Iterable[Any]]
    """The cases to try, smallest first."""
    check: Callable[..., Finding]
    """Called with one case's parts."""


class Verdict(NamedTuple):
    holds: bool
    num_cases: int
    largest_gap: float
    counterexample: str
    """The smallest case that violates the claim; empty if none does."""


def evaluate(statement: Statement) -> Verdict:
    """Try every case of a statement. A statement without cases decides nothing, so it does not hold."""
    findings = [statement.check(*case) for case in statement.cases()]
    violations = [finding for finding in findings if not finding.gap <= TOLERANCE]  # NaN is a violation
    return Verdict(
        holds=bool(findings) and not violations,
        num_cases=len(findings),
        largest_gap=float(max((finding.gap for finding in findings), default=0)),
        counterexample=violations[0].words if violations else "",
    )


def tensor(values: object) -> Tensor:
    """Return a float64 tensor, the dtype of all enumerations."""
    return torch.tensor(values, dtype=torch.float64)


def distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()
