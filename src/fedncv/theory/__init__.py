"""The paper's propositions and ours as statements that a machine decides by enumeration."""

from fedncv.theory import centred, coefficients, drift, labels, levels, literal, propositions
from fedncv.theory.statement import TOLERANCE, Finding, Statement, Verdict, evaluate

STATEMENTS: tuple[Statement, ...] = (
    *literal.STATEMENTS,
    *propositions.STATEMENTS,
    *centred.STATEMENTS,
    *coefficients.STATEMENTS,
    *labels.STATEMENTS,
    *drift.STATEMENTS,
    *levels.STATEMENTS,
)

__all__ = ["STATEMENTS", "TOLERANCE", "Finding", "Statement", "Verdict", "evaluate"]
