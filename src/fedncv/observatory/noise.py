"""Train with the noise of client sampling scaled: the same mean update, more or less variance.

    x <- x - [ g_bar + s (g_hat - g_bar) ]
    g_hat    the step that the clients drawn make, by the method's own server
    g_bar    the step if all clients answered, at the same model

s = 1 is the run itself, s = 0 has no sampling noise. In every round all clients train; only those drawn renew what they
or the server remember of them, for every s. Running statistics are those of the clients drawn.
"""

from collections.abc import Iterator, Sequence

import torch

from fedncv.engine.problem import DivergedError, State, start
from fedncv.observatory.errors import frozen_server
from fedncv.observatory.everyone import Engine, Point, common_point, everyone
from fedncv.observatory.shadow import follow


def states_with_noise(engine: Engine, scales: Sequence[float], rounds: int) -> Iterator[list[State]]:
    """Yield the states of all runs after 0, …, ``rounds`` rounds; run j has its noise multiplied by ``scales[j]``."""
    for s in scales:
        if not 0 <= s < float("inf"):
            raise ValueError(f"a scale of the noise must be at least 0 and finite, not {s}")
    if len(scales) != len(engine.problems):
        raise ValueError(f"{len(engine.problems)} runs need as many scales, not {len(scales)}")
    states = [start(problem, runs=len(engine.problems)) for problem in engine.problems]
    for t in range(rounds + 1):
        yield states
        if t < rounds:
            states = _next(engine, states, scales)


def _next(engine: Engine, states: list[State], scales: Sequence[float]) -> list[State]:
    whole_JP = []
    for problem, state, answers in zip(engine.problems, states, everyone(engine, states), strict=True):
        server = frozen_server(problem, state, answers)
        everybody = torch.arange(len(server.sizes_N), device=answers.ids_N.device)
        whole_JP.append(server.x_P - server.step(everybody, True))
    following = []
    settled = engine.run_rounds(states)
    for problem, outcome, whole_P, s in zip(engine.problems, settled, whole_JP, scales, strict=True):
        if isinstance(outcome, DivergedError):
            raise outcome
        drawn_P, buffers_R = common_point(problem, outcome[0])
        x_P = (whole_P + s * (drawn_P.double() - whole_P)).to(drawn_P.dtype) if s != 1 else drawn_P
        following.append(follow(problem, outcome[0], Point(x_P, buffers_R)))
    return following
