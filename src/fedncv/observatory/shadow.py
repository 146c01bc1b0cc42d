"""Many estimators at the same models: each keeps its memory along a path that is not its own.

A path is what a reference run leaves: the shared model x_t and the running statistics b_t after each of its rounds.
A method follows it in shadow. In every round

    1. its server's model and running statistics are replaced by x_t and b_t; all else in its state stays its own
    2. the clients of the round's keyed draw (the same for every method) train from x_t by the method's own rules
    3. the method's own server makes the next state: what it remembers of clients is renewed, and so is what
       clients keep; the model that comes out is dropped, because the next round begins with x_{t+1}

so SCAFFOLD's c_u, FedVARP's h_u and FedNCV's h_u, c_u, alpha_u and beta are what they would be if somebody else
moved the model. A method in the shadow of itself is the run itself, bit for bit. A server's velocity is carried
along, too; it is known before the draw, so it has no part in any error over the draw.

The method itself puts the model into its server's state (`Method.with_model`).
"""

from collections.abc import Iterator, Sequence

from fedncv.engine.problem import DivergedError, Problem, State, start
from fedncv.methods.base import BufferRule
from fedncv.observatory.everyone import Engine, Point, common_point

Path = list[Point]  # of one run, from the initial model on


def follow(problem: Problem, state: State, point: Point) -> State:
    """Return the state at the point of another run: model and running statistics replaced, all else the very same."""
    common_point(problem, state)  # raises where clients share no model
    method, rule = problem.method, problem.buffer_rule
    if method.with_model is None:
        raise ValueError(f"{problem.config.method} has no model that all clients train from: it cannot follow a run")
    server = method.with_model(state.server, point.x_P)
    buffers = rule.with_statistics(state.buffers, point.buffers_R) if isinstance(rule, BufferRule) else point.buffers_R
    return state._replace(server=server, buffers=buffers)


def states_along(engine: Engine, rounds: int, paths: Sequence[Path] | None = None) -> Iterator[list[State]]:
    """The states of all runs after 0, 1, …, ``rounds`` rounds: on their own path, or each in the shadow of one."""
    states = [start(problem, runs=len(engine.problems)) for problem in engine.problems]
    for t in range(rounds + 1):
        if paths is not None:
            each = zip(engine.problems, states, paths, strict=True)
            states = [follow(problem, state, path[t]) for problem, state, path in each]
        yield states
        if t < rounds:
            settled = engine.run_rounds(states)
            for outcome in settled:
                if isinstance(outcome, DivergedError):
                    raise outcome
            states = [outcome[0] for outcome in settled if not isinstance(outcome, DivergedError)]
