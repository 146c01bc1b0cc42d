"""The reference engine: one client after the other. Every other engine is tested against this one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedncv.engine.local import train
from fedncv.engine.problem import Problem, State, arrivals
from fedncv.engine.round import Draw, Outcome, draw, settle
from fedncv.tree import all_finite


def run_round(problem: Problem, state: State, drawn: Draw | None = None) -> tuple[State, dict[str, Any]]:
    """One round: (state, row of metrics). ``drawn`` replaces the keyed draw of clients."""
    problem = problem.at(state.round)
    drawn = drawn or draw(problem, state.round)
    return settle(problem, state, drawn, _outcomes(problem, state, drawn))


def _outcomes(problem: Problem, state: State, drawn: Draw) -> Iterator[Outcome]:
    for i, arrival in enumerate(arrivals(problem, state, drawn.ids)):
        trained = train(problem, state.round, arrival, share=drawn.shares[i]) if drawn.answers[i] else None
        finite = trained is None or all_finite((trained.y_P, trained.buffers_R, trained.up, trained.kept))
        yield Outcome(arrival.client, arrival.received_bytes, trained, finite)


@contextmanager
def one_thread() -> Iterator[None]:
    """One intra-op thread: the same bits on every machine with the same kernels, and no slower on small models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
