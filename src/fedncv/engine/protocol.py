"""The interface of every engine."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, Self

from fedncv.engine.gradients import Gradients
from fedncv.engine.problem import Problem, Settled, State


class Engine(Protocol):
    """Run rounds and measurements of several runs with equal ``choose.common``.

    ``states`` holds one state for each of ``problems``, in the same order, and so does every list that is returned.
    """

    problems: list[Problem]
    why: str
    """How engine=auto chose it on a GPU; empty if there was no trial."""

    @property
    def name(self) -> str:
        """sequential, stacked, streams, processes or ray."""

    @property
    def layers(self) -> list[str]:
        """Layers that each run trains in. They decide the last digits of its numbers."""

    def run_rounds(self, states: Sequence[State]) -> list[Settled]:
        """Run one round of every run; return the error of a run that diverged, and continue the others."""

    def before(self, states: Sequence[State]) -> list[dict[str, Any]]:
        """Score all clients before local training."""

    def after(self, states: Sequence[State]) -> list[dict[str, Any]]:
        """Score all clients after a local training that is then discarded."""

    def gradients(self, states: Sequence[State]) -> Iterable[Gradients]:
        """Return the gradients of every client's samples, run by run."""

    def only(self, runs: Sequence[int]) -> Self:
        """Return an engine for some of the runs, when the others have stopped; ``close`` one of the two."""

    def close(self) -> None:
        """Free what the engine holds outside of Python's memory."""
