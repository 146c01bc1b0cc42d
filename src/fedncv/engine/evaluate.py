"""Score the clients' models on the clients' own test samples. Scoring changes no state.

before   the model as client u would use it when it receives it
after    the same client after its local training
pooled   the shared model, without anything personal, on the test samples of all clients
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedncv.engine.local import train
from fedncv.engine.problem import Arrival, DivergedError, Problem, State, arrivals
from fedncv.methods.base import Prediction

CHUNK = 1024  # test samples in one forward pass


class Scores(NamedTuple):
    """Sum of scores and number of test samples of each client."""

    total_N: NDArray[np.float64]
    samples_N: NDArray[np.int64]

    def summary(self, name: str) -> dict[str, Any]:
        """Return the mean over samples, over clients, over the worst tenth of clients, and every client's score."""
        if not np.isfinite(self.total_N).all():
            client = int(np.flatnonzero(~np.isfinite(self.total_N))[0])
            raise DivergedError(f"client {client} scores {self.total_N[client]} {name} training; try a lower lr")
        tested = self.samples_N > 0
        if not tested.any():
            return {}
        each = np.sort(self.total_N[tested] / self.samples_N[tested])
        worst = each[: -(-len(each) // 10)]
        return {
            name: float(self.total_N.sum() / self.samples_N.sum()),
            f"{name}_client_mean": float(each.mean()),
            f"{name}_worst_decile": float(worst.mean()),
            f"{name}_clients": [
                float(total / samples) if samples else None
                for total, samples in zip(self.total_N, self.samples_N, strict=True)
            ],
        }


def score(problem: Problem, u: int, used: Prediction) -> float:
    """Return the sum of the scores of client u's test samples."""
    total = 0.0
    for index in torch.split(torch.from_numpy(problem.clients.test[u]), CHUNK):
        inputs = problem.dataset.inputs(index, problem.dtype)
        with torch.no_grad():
            output, _ = problem.model.forward(used.x_P, used.buffers_R, inputs, mode="eval")
        logits = output.logits_BC if used.offset_C is None else output.logits_BC + used.offset_C
        total += float(problem.task.score(logits, problem.dataset.y[index]).sum(dtype=torch.float64))
    return total


def before(problem: Problem, state: State) -> dict[str, Any]:
    """Score all clients with the model they receive, and the shared model if there is one."""
    problem = problem.at(state.round).in_use
    sizes = test_sizes(problem)
    totals, pooled = np.zeros(len(sizes)), np.zeros(len(sizes))
    shared_P = shared_model(problem, state)
    for arrival in arrivals(problem, state, np.flatnonzero(sizes)):
        totals[arrival.client], pooled[arrival.client] = score_before(problem, state.round, arrival, shared_P)
    return summary_before(totals, sizes, None if shared_P is None else pooled)


def score_before(problem: Problem, round: int, arrival: Arrival, shared_P: Tensor | None) -> tuple[float, float]:
    """Return sums of scores of one client: with the model it receives, and with the shared one if there is one."""
    u, down, buffers_R, kept = arrival
    ask = problem.ask(u, buffers_R, round)
    y_P, _ = problem.method.begin(ask, down, kept.own)
    used = problem.method.predict(ask, y_P, down, kept.own)
    total = score(problem, u, used)
    same = used.offset_C is None and used.buffers_R.equal(buffers_R)
    if shared_P is None or (same and torch.equal(used.x_P, shared_P)):
        return total, total
    return total, score(problem, u, Prediction(shared_P, buffers_R))


def summary_before(
    total_N: NDArray[np.float64], samples_N: NDArray[np.int64], pooled_N: NDArray[np.float64] | None
) -> dict[str, Any]:
    summary = Scores(total_N, samples_N).summary("before")
    if pooled_N is not None and summary:
        summary["pooled"] = float(pooled_N.sum() / samples_N.sum())
    return summary


def after(problem: Problem, state: State) -> dict[str, Any]:
    """Score all clients after a local training that is then discarded and not counted as work."""
    problem = problem.at(state.round).in_use
    sizes = test_sizes(problem)
    totals = np.zeros(len(sizes))
    for arrival in arrivals(problem, state, np.flatnonzero(sizes)):
        totals[arrival.client] = score_after(problem, state.round, arrival)
    return Scores(totals, sizes).summary("after")


def score_after(problem: Problem, round: int, arrival: Arrival) -> float:
    """Return the sum of scores of one client after its local training."""
    method = problem.method
    u, down, buffers_R, kept = arrival
    trained = train(problem, round, arrival)
    if trained is None:  # too little data for a single step: the client keeps the received model
        y_P, _ = method.begin(problem.ask(u, buffers_R, round), down, kept.own)
    else:
        y_P, buffers_R, kept = trained.y_P, trained.buffers_R, trained.kept
    ask = problem.ask(u, buffers_R, round, received_R=arrival.buffers_R)
    return score(problem, u, method.predict(ask, y_P, down, kept.own))


def shared_model(problem: Problem, state: State) -> Tensor | None:
    """Return the model that all clients share, or None; with personal running statistics there is none."""
    return None if problem.buffer_rule == "personal" else problem.method.shared(state.server)


def test_sizes(problem: Problem) -> NDArray[np.int64]:
    return np.array([len(test) for test in problem.clients.test])
