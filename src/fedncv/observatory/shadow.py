"""Compare estimators at the same models: each updates its memory along the path of another run.

A path is the shared model x_t and the running statistics b_t after each round of a reference run. A method follows
it in shadow. In every round

    1. its server's model and running statistics are replaced by x_t and b_t; the rest of its state stays its own
    2. the clients of the round's keyed draw (the same for every method) train from x_t by the method's own rules
    3. the method's own server makes the next state: it updates its memory, and the clients update their own state;
       the resulting model is dropped, because the next round begins with x_{t+1}

so SCAFFOLD's c_u, FedVARP's h_u and FedNCV's h_u, c_u, alpha_u and beta are what they would be if another method
moved the model. A method in the shadow of itself equals the run itself, bit for bit. A server's velocity is also
carried along; it is known before the draw, so it has no part in any error over the draw.

The method itself puts the model into its server's state (`Method.with_model`).
"""

from collections.abc import Iterator, Sequence

from fedncv.engine.problem import DivergedError, Problem, State, start
from fedncv.methods.base import BufferRule
from fedncv.observatory.everyone import Engine, Point, common_point

Path = list[Point]  # of one run, from the initial model on


def follow(problem: Problem, state: State, point: Point) -> State:
    """Return the state at the point of another run: model and running statistics replaced, the rest unchanged."""
    common_point(problem, state)  # raises if clients share no model
    method, rule = problem.method, problem.buffer_rule
    if method.with_model is None:
        raise ValueError(f"{problem.config.method} has no model that all clients train from, so it cannot follow a run")
    server = method.with_model(state.server, point.x_P)
    buffers = rule.with_statistics(state.buffers, point.buffers_R) if isinstance(rule, BufferRule) else point.buffers_R
    return state._replace(server=server, buffers=buffers)


def states_along(engine: Engine, rounds: int, paths: Sequence[Path] | None = None) -> Iterator[list[State]]:
    """Yield the states of all runs after 0, …, ``rounds`` rounds: on their own path, or along ``paths`` in shadow."""
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
