"""Score the clients' models on the clients' own test samples. Scoring changes no state.

before   the model as client u would use it when it receives it
after    the same client after its local training
pooled   the shared model, without anything personal, on the test samples of all clients

With ``eval_clients`` all three are of a sample of the clients, the same in every round. Then the row of round 0 has
``scored_clients``, the sample, and ``scored_of``, the number of clients that it was drawn from. In every row lists such
as ``before_clients`` have one number for each client of the sample, in its order, and each score has its
``…_standard_error`` (``scored.py``).

Clients that never train (setting ``unseen``) are scored in the same way, with the names ``unseen_before`` and so on: no
other score includes them. They begin as a client that was never drawn: with the message that such a client gets, and
the state of ``init_own``. Their lists have one number for each of them, in the order of their ids, or for each one of
``unseen_scored_clients``, a sample of them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedncv.engine.local import train
from fedncv.engine.looking import surveyed
from fedncv.engine.problem import Arrival, DivergedError, Problem, State, arrivals
from fedncv.engine.sampling import Ids
from fedncv.engine.scored import standard_error
from fedncv.flat import Model, Output
from fedncv.methods.base import Method, Prediction
from fedncv.metrics import measure
from fedncv.results import UNSEEN
from fedncv.tree import leaves

CHUNK = 1024  # test samples in one forward pass


class Scores(NamedTuple):
    """Sum of scores and number of test samples of each client: of all N, or of a sample."""

    total_N: NDArray[np.float64]
    samples_N: NDArray[np.int64]
    clients_N: Ids
    of: int | None = None  # number of clients with test samples, if these are a sample of them

    def score(self, name: str) -> dict[str, float | None]:
        """Return the mean over samples, with its standard error if clients are a sample."""
        mean = {name: float(self.total_N.sum() / self.samples_N.sum())}
        if self.of is None:
            return {**mean}
        return {**mean, f"{name}_standard_error": standard_error(self.total_N, self.samples_N, self.of)}

    def summary(self, name: str) -> dict[str, Any]:
        """Return the mean over samples, over clients, over the worst tenth of clients, and every client's score."""
        if not np.isfinite(self.total_N).all():
            i = int(np.flatnonzero(~np.isfinite(self.total_N))[0])
            raise DivergedError(f"client {self.clients_N[i]} scores {self.total_N[i]} {name} training; try a lower lr")
        tested = self.samples_N > 0
        if not tested.any():
            return {}
        each = np.sort(self.total_N[tested] / self.samples_N[tested])
        worst = each[: -(-len(each) // 10)]
        return {
            **self.score(name),
            f"{name}_client_mean": float(each.mean()),
            f"{name}_worst_decile": float(worst.mean()),
            f"{name}_clients": [
                float(total / samples) if samples else None
                for total, samples in zip(self.total_N, self.samples_N, strict=True)
            ],
        }


class Scored(NamedTuple):
    """Scores of one client: the sum over its test samples, and the model's outputs if the study has metrics."""

    total: float
    outputs: NDArray[Any] | None = None


def score(problem: Problem, u: int, used: Prediction) -> Scored:
    """Score client u's test samples."""
    total, outputs = 0.0, []
    for index in torch.split(torch.from_numpy(problem.clients.test[u]), CHUNK):
        inputs = problem.dataset.inputs(index, problem.dtype)
        with torch.no_grad():
            output, _ = problem.model.forward(used.x_P, used.buffers_R, inputs, mode="eval")
            logits = decided(problem.method, problem.model, used, output)
        total += float(problem.task.score(logits, problem.dataset.y[index]).sum(dtype=torch.float64))
        if problem.metrics:
            outputs.append(logits.cpu().numpy())
    return Scored(total, np.concatenate(outputs) if outputs else None)


def decided(method: Method, model: Model, used: Prediction, output: Output) -> Tensor:
    """Return the logits that a client decides by."""
    logits_BC = output.logits_BC if used.offset_C is None else output.logits_BC + used.offset_C
    if not decides(used):
        return logits_BC
    if method.decide is None:
        raise ValueError("the method's predict returns something for decide, but it has no decide")
    return method.decide(model, used.x_P, output._replace(logits_BC=logits_BC), used.given)


def decides(used: Prediction) -> bool:
    """Return whether the client decides by more than a model's logits."""
    return any(True for _ in leaves(used.given))


def summary(problem: Problem, name: str, scored: Mapping[int, Scored]) -> dict[str, Any]:
    """Return the row of the clients' scores and metrics, and the same of those that never train."""
    row: dict[str, Any] = {}
    for group in groups(problem):
        mine = {u: scored[u] for u in group.ids.tolist() if u in scored}
        what, scores = f"{group.prefix}{name}", _scores(problem, group, {u: each.total for u, each in mine.items()})
        outputs = {u: each.outputs for u, each in mine.items() if each.outputs is not None}
        targets = {u: problem.dataset.y[torch.from_numpy(problem.clients.test[u])].cpu().numpy() for u in outputs}
        measured = measure(problem.metrics, outputs, targets, clients=scores.clients_N.tolist())
        row |= scores.summary(what) | {f"{what}_{metric}": value for metric, value in measured.items()}
    return row


def before(problem: Problem, state: State) -> dict[str, Any]:
    """Score the clients with the model they receive, and the shared model if there is one."""
    problem = problem.at(state.round).in_use
    shared_P = shared_model(problem, state)
    scored = {
        arrival.client: score_before(problem, state.round, arrival, shared_P)
        for arrival in arrivals(problem, state, problem.scored)
    }
    return summary_before(problem, scored, shared=shared_P is not None)


def score_before(problem: Problem, round: int, arrival: Arrival, shared_P: Tensor | None) -> tuple[Scored, float]:
    """Score one client with the model it receives; return also the sum of scores of the shared one if there is one."""
    u, buffers_R = arrival.client, arrival.buffers_R
    used = received(problem, round, arrival)
    scored = score(problem, u, used)
    same = used.offset_C is None and not decides(used) and used.buffers_R.equal(buffers_R)
    if shared_P is None or (same and torch.equal(used.x_P, shared_P)):
        return scored, scored.total
    return scored, score(problem._replace(metrics=()), u, Prediction(shared_P, buffers_R)).total


def received(problem: Problem, round: int, arrival: Arrival) -> Prediction:
    """Return what a client predicts with when it receives its model."""
    u, down, buffers_R, kept = arrival
    y_P, _ = problem.method.begin(problem.ask(u, buffers_R, round), down, kept.own)
    notes = surveyed(problem, round, arrival, y_P)
    return problem.method.predict(problem.ask(u, buffers_R, round, survey=notes), y_P, down, kept.own)


def summary_before(problem: Problem, scored: Mapping[int, tuple[Scored, float]], *, shared: bool) -> dict[str, Any]:
    row = summary(problem, "before", {u: mine for u, (mine, _) in scored.items()})
    totals = {u: total for u, (_, total) in scored.items()}
    for group in groups(problem) if shared else ():
        if f"{group.prefix}before" in row:
            row |= _scores(problem, group, totals).score(f"{group.prefix}pooled")
    return row


class Group(NamedTuple):
    """Clients whose scores are averaged together."""

    prefix: str  # of the names in a row
    ids: Ids  # clients that rows list: all of the group, or the sample
    of: int | None  # number of clients with test samples, if a sample of them is scored


def groups(problem: Problem) -> list[Group]:
    """Return the clients that train, and those that never do if there are any."""
    sizes, n = problem.clients.test_sizes, problem.federation.num_clients
    found = [Group("", np.arange(n), None)]
    if problem.sample is not None:
        found = [Group("", problem.sample, int((sizes[:n] > 0).sum()))]
    if problem.guests is not None:
        tested = int((sizes[n:] > 0).sum())
        is_sample = len(problem.guests) < tested
        ids = problem.guests if is_sample else np.arange(n, len(sizes))
        found.append(Group(UNSEEN, ids, tested if is_sample else None))
    return found


def _scores(problem: Problem, group: Group, totals: Mapping[int, float]) -> Scores:
    """Return the sums of scores of the clients of a group."""
    sizes = problem.clients.test_sizes[group.ids]
    return Scores(np.array([totals.get(u, 0.0) for u in group.ids.tolist()]), sizes, group.ids, group.of)


def sampled(problem: Problem) -> dict[str, Any]:
    """Return what the first row says about clients that never train, and about samples of scored clients."""
    row: dict[str, Any] = {}
    if problem.guests is not None:
        row["unseen"] = len(problem.clients.train) - problem.federation.num_clients
    for group in groups(problem):
        if group.of is not None:
            row |= {f"{group.prefix}scored_clients": group.ids.tolist(), f"{group.prefix}scored_of": group.of}
    return row


def after(problem: Problem, state: State) -> dict[str, Any]:
    """Score the clients after a local training that is then discarded and not counted as work."""
    problem = problem.at(state.round).in_use
    scored = {
        arrival.client: score_after(problem, state.round, arrival)
        for arrival in arrivals(problem, state, problem.scored)
    }
    return summary(problem, "after", scored)


def score_after(problem: Problem, round: int, arrival: Arrival) -> Scored:
    """Score one client after its local training."""
    problem = problem.tuning
    method = problem.method
    u, down, buffers_R, kept = arrival
    trained = train(problem, round, arrival)
    if trained is None:  # too little data for a single step: the client keeps the received model
        y_P, _ = method.begin(problem.ask(u, buffers_R, round), down, kept.own)
    else:
        y_P, buffers_R, kept = trained.y_P, trained.buffers_R, trained.kept
    notes = surveyed(problem, round, Arrival(u, down, buffers_R, kept), y_P)
    ask = problem.ask(u, buffers_R, round, received_R=arrival.buffers_R, survey=notes)
    return score(problem, u, method.predict(ask, y_P, down, kept.own))


def shared_model(problem: Problem, state: State) -> Tensor | None:
    """Return the model that all clients share, or None; with personal running statistics there is none."""
    return None if problem.buffer_rule == "personal" else problem.method.shared(state.server)
