"""Compute the gradients of all clients' samples on the device, like ``gradients`` for one client at a time.

If all clients of a run start from one model, all samples go through it together. If clients have their own models (a
personal head, personal statistics), they are measured one after the other.
"""

from collections.abc import Iterator, Sequence

import torch

from fedncv.engine.asking import asking
from fedncv.engine.gradients import Gradients, Moments, Standing, collected, moments
from fedncv.engine.orders import Ints
from fedncv.engine.problem import State
from fedncv.engine.stacked import StackedEngine
from fedncv.engine.stacked_looking import surveyed

GROUP = 512  # clients whose models are in memory at a time


def gradients(engine: StackedEngine, states: Sequence[State]) -> Iterator[Gradients]:
    """Yield ``gradients.of_run`` of every run, one after the other, because each has N x P numbers."""
    return (_of_run(engine, states, j) for j in range(len(states)))


def _of_run(engine: StackedEngine, states: Sequence[State], j: int) -> Gradients:
    problem = engine.problems[j]
    holders = problem.holders
    groups = [holders[i : i + GROUP] for i in range(0, len(holders), GROUP)]
    return collected(problem, (each for ids in groups for each in of_clients(engine, states, j, ids)))


def of_clients(engine: StackedEngine, states: Sequence[State], j: int, ids: Ints) -> Iterator[Moments]:
    """Yield the moments of these clients of run ``j``, one or more clients at a time."""
    resident, problem, method = engine.resident, engine.problems[j], engine.method
    arrived = engine.arrive(states, [ids if k == j else ids[:0] for k in range(len(states))])

    def begin(ask_of, down, own, b_R):  # type: ignore[no-untyped-def]
        return method.begin(ask_of(b_R), down, own)[0]

    def offset_of(ask_of, y_P, down, own, b_R, survey):  # type: ignore[no-untyped-def]
        offset_C = method.predict(ask_of(b_R, None, survey), y_P, down, own).offset_C
        return () if offset_C is None else (offset_C,)

    asks = engine.asks(arrived.rows, states[j].round)
    y_KP = asking(begin, asks, arrived.down, arrived.own, arrived.buffers_KR)
    survey = surveyed(engine, arrived, y_KP, states[j].round)
    offset = asking(offset_of, asks, y_KP, arrived.down, arrived.own, arrived.buffers_KR, survey)
    y_KP = y_KP[:, : problem.model.layout.num_parameters]
    inputs = lambda index: (resident.inputs(index), resident.targets(index))  # noqa: E731
    parts = [torch.from_numpy(problem.clients.train[u]) for u in ids.tolist()]
    alike = bool((y_KP == y_KP[0]).all() & (arrived.buffers_KR == arrived.buffers_KR[0]).all())
    for rows in [slice(0, len(ids))] if alike else [slice(k, k + 1) for k in range(len(ids))]:
        at = Standing(y_KP[rows.start], arrived.buffers_KR[rows.start], offset[0][rows] if offset else None)
        yield moments(problem.model, problem.task, inputs, at, parts[rows])
