"""Many estimators at the same models: each keeps its memory along a path that is not its own.

A path is what a reference run leaves: the shared model x_t and the running statistics b_t after each of its rounds.
A method follows it in shadow. In every round

    1. its server's model and running statistics are replaced by x_t and b_t; all else in its state stays its own
    2. the clients of the round's keyed draw (the same for every method) train from x_t by the method's own rules
    3. the method's own `aggregate` makes the next state: what it remembers of clients is renewed, and so is what
       clients keep; the model that comes out is dropped, because the next round begins with x_{t+1}

so SCAFFOLD's c_u, FedVARP's h_u and FedNCV's h_u, c_u, alpha_u and beta are what they would be if somebody else
moved the model. A method in the shadow of itself is the run itself, bit for bit. A server's velocity is carried
along, too; it is known before the draw, so it has no part in any error over the draw.

Which tensor of a server's state is the model is asked of the method: the one that `shared` returns.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fedncv.engine.problem import DivergedError, State, start
from fedncv.methods.base import Method
from fedncv.observatory.everyone import Engine, shared_model
from fedncv.tree import leaves, tree_map


class Point(NamedTuple):
    """Where a run stood after a round."""

    x_P: Tensor
    buffers_R: Tensor


Path = list[Point]  # of one run, from the initial model on


def with_model(method: Method, server: Any, x_P: Tensor) -> Any:
    """The server's state with its model replaced; all else is the very same tensors."""
    model_P = method.shared(server)
    if model_P is None or not any(leaf is model_P for _, leaf in leaves(server)):
        raise ValueError("this server keeps no model that all clients share; it cannot follow another run")
    return tree_map(lambda leaf: x_P if leaf is model_P else leaf, server)


def follow(method: Method, state: State, point: Point) -> State:
    """The state as it is at the point of another run."""
    return state._replace(server=with_model(method, state.server, point.x_P), buffers=point.buffers_R)


def states_along(engine: Engine, rounds: int, paths: Sequence[Path] | None = None) -> Iterator[list[State]]:
    """The states of all runs after 0, 1, …, ``rounds`` rounds: on their own path, or each in the shadow of one."""
    states = [start(problem) for problem in engine.problems]
    for t in range(rounds + 1):
        if paths is not None:
            method = engine.problems[0].method
            states = [follow(method, state, path[t]) for state, path in zip(states, paths, strict=True)]
        yield states
        if t < rounds:
            settled = engine.run_rounds(states)
            for each in settled:
                if isinstance(each, DivergedError):
                    raise each
            states = [each[0] for each in settled if not isinstance(each, DivergedError)]


def paths_of(engine: Engine, rounds: int) -> Iterator[list[Point]]:
    """The points of all runs after 0, 1, …, ``rounds`` rounds."""
    for states in states_along(engine, rounds):
        yield [
            Point(shared_model(problem, state), state.buffers)
            for problem, state in zip(engine.problems, states, strict=True)
        ]
