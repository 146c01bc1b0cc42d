"""The reference engine: one client after the other. Every other engine is tested against this one."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fedncv.engine import evaluate
from fedncv.engine.gradients import Gradients, of_run
from fedncv.engine.local import train
from fedncv.engine.problem import DivergedError, Problem, Settled, State, arrivals
from fedncv.engine.round import Draw, Outcome, draw, outcome, settle


def run_round(problem: Problem, state: State, drawn: Draw | None = None) -> tuple[State, dict[str, Any]]:
    """Run one round and return (state, row of metrics). ``drawn`` replaces the keyed draw of clients."""
    problem = problem.at(state.round)
    drawn = drawn or draw(problem, state.round)
    return settle(problem, state, drawn, outcomes(problem, state, drawn))


def outcomes(problem: Problem, state: State, drawn: Draw) -> Iterator[Outcome]:
    """Train the drawn clients, one after the other, and yield their results."""
    for i, arrival in enumerate(arrivals(problem, state, drawn.ids)):
        trained = train(problem, state.round, arrival, share=drawn.shares[i]) if drawn.answers[i] else None
        yield outcome(problem, arrival, trained)


class SequentialEngine:
    """Run several runs, one after the other."""

    name = "sequential"
    why = ""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)

    @property
    def layers(self) -> list[str]:
        return [problem.layers for problem in self.problems]

    def run_rounds(self, states: Sequence[State]) -> list[Settled]:
        settled: list[Settled] = []
        for problem, state in zip(self.problems, states, strict=True):
            try:
                settled.append(run_round(problem, state))
            except DivergedError as error:
                settled.append(error)
        return settled

    def before(self, states: Sequence[State]) -> list[dict[str, Any]]:
        return [evaluate.before(problem, state) for problem, state in zip(self.problems, states, strict=True)]

    def after(self, states: Sequence[State]) -> list[dict[str, Any]]:
        return [evaluate.after(problem, state) for problem, state in zip(self.problems, states, strict=True)]

    def gradients(self, states: Sequence[State]) -> Iterable[Gradients]:
        return map(of_run, self.problems, states)

    def only(self, runs: Sequence[int]) -> "SequentialEngine":
        return SequentialEngine([self.problems[j] for j in runs])

    def close(self) -> None:
        pass


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one intra-op thread: the same bits on every machine with the same kernels, and not slower on small models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
