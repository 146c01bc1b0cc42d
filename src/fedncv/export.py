"""A trained model as an ordinary state_dict."""

from numbers import Integral

import numpy as np
from torch import Tensor

from fedncv.engine.evaluate import decides, received, shared_model
from fedncv.engine.problem import Problem, State, arrivals, messages


def export(problem: Problem, state: State, client: int | None = None) -> dict[str, Tensor]:
    """Return the shared model, or the one that ``client`` predicts with, as an ordinary state_dict.

    Raise ValueError if the method has no shared model, or if there is no such client.
    """
    problem = problem.at(state.round).in_use
    model = problem.model
    name, shared_P = problem.config.method, shared_model(problem, state)
    if client is None:
        if shared_P is None:
            of = name if problem.topology is None else f"{name} with topology {problem.config.topology}"
            raise ValueError(f"{of} has no model that all clients share; name a client with --client")
        _, b_SR = messages(problem, state, np.array([0]))
        return model.state_dict(shared_P, b_SR[0])
    if not isinstance(client, Integral) or not 0 <= client < problem.federation.num_clients:
        raise ValueError(f"there is no client {client}; clients are numbered 0 to {problem.federation.num_clients - 1}")
    (arrival,) = arrivals(problem, state, np.array([client]))
    used = received(problem, state.round, arrival)
    if decides(used):
        raise ValueError(
            f"a client of {name} predicts with more than a model, which a state_dict cannot hold; "
            + ("there is no shared model either" if shared_P is None else "leave --client out for the shared model")
        )
    return model.state_dict(used.x_P, used.buffers_R, used.offset_C)
