"""Train all clients from a frozen state and return their replies. No state is changed.

A state after t rounds is probed with the batches of round t, which the next sampled clients would train on. A
replicate uses other batches, and everything else is equal.

N = clients with at least one step, J = runs, K = rows of the stack, P = parameters.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedncv.engine.choose import decide, on_gpu
from fedncv.engine.local import train
from fedncv.engine.problem import DivergedError, Problem, State, arrivals
from fedncv.engine.round import finite_rows
from fedncv.engine.sequential import SequentialEngine
from fedncv.engine.stacked import StackedEngine
from fedncv.methods.base import BufferRule
from fedncv.tree import stack, tree_map

Engine = SequentialEngine | StackedEngine
GOLDEN = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: replicates' seeds are far apart


class Everyone(NamedTuple):
    """Replies in the order of ids; in float64, so that differences are exact enough to square."""

    ids_N: Tensor
    delta_NP: Tensor  # x - y_u, with the bits that were sent if it was sent
    ups: Any  # what `finish` sent, with a leading axis N


def engine_for(problems: Sequence[Problem]) -> Engine:
    """Return the engine for a GPU, there or if the config asks for it, else the sequential one in torch's layers."""
    if decide(problems).engine in ("stacked", "streams"):
        return on_gpu(problems) or SequentialEngine(problems)
    return SequentialEngine(problems)


def everyone(engine: Engine, states: Sequence[State], *, replicate: int = 0) -> list[Everyone]:
    """Return all clients' replies in every run."""
    if isinstance(engine, StackedEngine):
        return _stacked(engine, states, replicate)
    return [_one_by_one(p, s, replicate) for p, s in zip(engine.problems, states, strict=True)]


class Point(NamedTuple):
    """The model and running statistics at the start of a client's round."""

    x_P: Tensor
    buffers_R: Tensor


def common_point(problem: Problem, state: State) -> Point:
    """Return the model and running statistics sent to all clients; raise ValueError if clients have personal parts.

    This is the model that they train from, as in `begin`. A method may use another one for inference.
    """
    if problem.topology is not None:
        raise ValueError(
            f"with topology {problem.config.topology} every client has a model of its own, so there is no common "
            "update to measure; use topology=server"
        )
    rule = problem.buffer_rule
    of_each = rule == "personal" or (isinstance(rule, BufferRule) and not rule.shared)
    if of_each or problem.method.shared(state.server) is None:
        raise ValueError(
            f"{problem.config.method} has no model that all clients share, so there is no common update to measure"
        )
    (arrival,) = arrivals(problem, state, np.array([0]))
    ask = problem.ask(0, arrival.buffers_R, state.round)
    own = tree_map(lambda leaf: leaf.to(arrival.buffers_R.device), arrival.kept.own)  # maybe on another device
    y_P, _ = problem.method.begin(ask, arrival.down, own)
    return Point(y_P[: problem.model.layout.num_parameters], arrival.buffers_R)


def doubled(tree: Any) -> Any:
    """Return the tree with its floating-point numbers in float64."""
    return tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, tree)


def _another_seed(seed: int, replicate: int) -> int:
    return (seed + replicate * GOLDEN) % 2**64


def _one_by_one(problem: Problem, state: State, replicate: int) -> Everyone:
    problem = problem.at(state.round)
    x_P = common_point(problem, state).x_P
    keyed = problem._replace(config=replace(problem.config, seed=_another_seed(problem.config.seed, replicate)))
    ids, ys, ups = [], [], []
    for arrival in arrivals(problem, state, np.arange(problem.federation.num_clients)):
        trained = train(keyed, state.round, arrival)
        if trained is not None:
            ids.append(arrival.client)
            ys.append(trained.y_P[: len(x_P)])
            ups.append(trained.up)
    if not ids:
        raise ValueError("no client has enough samples for a step; there is no update to measure")
    return _answers(torch.tensor(ids).to(x_P.device), x_P, torch.stack(ys), stack(ups))


def _stacked(engine: StackedEngine, states: Sequence[State], replicate: int) -> list[Everyone]:
    num_clients, round = engine.resident.num_clients, states[0].round
    x_JP = [common_point(problem, state).x_P for problem, state in zip(engine.problems, states, strict=True)]
    arrived = engine.arrive(states, [np.arange(num_clients)] * len(states))
    with _seeds(engine, replicate):
        plan = engine.plan(arrived.rows, [1.0] * len(arrived.rows), round)
        replied = engine.train(arrived, plan)
    answers = []
    for j, x_P in enumerate(x_JP):
        mine = np.flatnonzero(arrived.rows[replied.who] // num_clients == j)
        if not len(mine):
            raise ValueError("no client has enough samples for a step; there is no update to measure")
        mine_K = torch.from_numpy(mine).to(engine.device)
        ids_N = torch.from_numpy(arrived.rows[replied.who][mine] % num_clients).to(engine.device)
        y_NP, ups = tree_map(lambda leaf, rows=mine_K: leaf.index_select(0, rows), (replied.y_KP, replied.up))
        answers.append(_answers(ids_N, x_P, y_NP[:, : len(x_P)], ups))
    return answers


@contextmanager
def _seeds(engine: StackedEngine, replicate: int) -> Iterator[None]:
    """Give the engine another seed for its batches; measuring is not counted as work."""
    seeds, work = engine._seeds, (engine.used, engine.computed)
    engine._seeds = [_another_seed(seed, replicate) for seed in seeds]
    try:
        yield
    finally:
        engine._seeds, (engine.used, engine.computed) = seeds, work


def _answers(ids_N: Tensor, x_P: Tensor, y_NP: Tensor, ups: Any) -> Everyone:
    """Return the replies; raise DivergedError with the first client whose reply is not finite."""
    delta_NP = x_P - y_NP  # rounded like a client's own difference, so that it equals what the server receives
    finite_N = finite_rows((delta_NP, ups))
    if not bool(finite_N.all()):
        client = int(ids_N[~finite_N][0])
        raise DivergedError(f"client {client} diverged when all clients were trained for the probe; try a lower lr")
    return Everyone(ids_N, delta_NP.double(), doubled(ups))
