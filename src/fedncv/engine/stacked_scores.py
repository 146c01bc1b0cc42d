"""Score the clients of all runs, stacked; ``evaluate`` does the same one client at a time.

Test samples are cut into blocks of one client each, and many blocks go through the model at once.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedncv.engine.asking import Asks, asking
from fedncv.engine.evaluate import CHUNK, Scored, decided, decides, shared_model, summary, summary_before
from fedncv.engine.gradients import Gradients
from fedncv.engine.orders import Ints
from fedncv.engine.problem import State, start
from fedncv.engine.stacked import Arrived, StackedEngine
from fedncv.engine.stacked_gradients import gradients
from fedncv.engine.stacked_looking import surveyed
from fedncv.methods.base import Prediction
from fedncv.notes import note
from fedncv.tree import row, tree_map

BLOCK = 64  # test samples of one client in a forward pass
GROUP = 512  # clients whose models are held at a time, or as many as a round has
FEW = 8  # clients of a model, from which on models are scored in turn: all clients' samples together
SAMPLES = 1 << 14  # that go through the model at a time
PARAMETERS = 1 << 27  # of all models in one forward pass


def before(engine: StackedEngine, states: Sequence[State]) -> list[dict[str, Any]]:
    """Return ``evaluate.before`` of every run."""
    scored = each_before(engine, states)
    return [
        summary_before(problem, mine, shared=shared_model(problem, state) is not None)
        for problem, state, mine in zip(engine.problems, states, scored, strict=True)
    ]


def each_before(engine: StackedEngine, states: Sequence[State]) -> list[dict[int, tuple[Scored, float]]]:
    """Return ``evaluate.score_before`` of the scored clients of every run."""
    num_clients = engine.resident.num_clients
    scored: list[dict[int, tuple[Scored, float]]] = [{} for _ in states]
    shared = [shared_model(p, s) for p, s in zip(engine.problems, states, strict=True)]
    for arrived, rows in _groups(engine, states):
        used = _received(engine, arrived, states[0].round)
        mine = pooled = scores(engine, rows, used)
        if shared[0] is not None:
            run_K = torch.from_numpy(rows // num_clients).to(engine.device)
            shared_KP = torch.stack([x for x in shared if x is not None])[run_K]
            alone = Prediction(shared_KP, arrived.buffers_KR)
            if used.offset_C is not None or decides(used) or not _equal(used, alone):
                pooled = scores(engine, rows, alone)
        for r, each, with_shared in zip(rows.tolist(), mine, pooled, strict=True):
            scored[r // num_clients][r % num_clients] = each, with_shared.total
    return scored


def after(engine: StackedEngine, states: Sequence[State]) -> list[dict[str, Any]]:
    """Return ``evaluate.after`` of every run."""
    scored = each_after(engine, states)
    return [summary(problem, "after", mine) for problem, mine in zip(engine.problems, scored, strict=True)]


def each_after(engine: StackedEngine, states: Sequence[State]) -> list[dict[int, Scored]]:
    """Return ``evaluate.score_after`` of the scored clients of every run."""
    num_clients, scoring = engine.resident.num_clients, engine
    scored: list[dict[int, Scored]] = [{} for _ in states]
    work = engine.used, engine.computed
    if engine.method.finetune is not None:
        engine = engine.with_problems("after", [problem.tuning for problem in engine.problems])
    for arrived, rows in _groups(engine, states):
        plan = engine.plan(rows, [1.0] * len(rows), states[0].round)
        asks = engine.asks(rows, states[0].round)

        def begin(ask_of, down, own, b_R):  # type: ignore[no-untyped-def]
            return engine.method.begin(ask_of(b_R), down, own)[0]

        own, buffers_KR = arrived.own, arrived.buffers_KR
        y_KP = asking(begin, asks, arrived.down, own, buffers_KR)  # for those with too little data for a step
        if len(plan.who):
            replied = engine.train(arrived, plan)
            who_K = torch.from_numpy(replied.who).to(engine.device)
            y_KP, own, buffers_KR = tree_map(
                lambda old, new, who_K=who_K: old.index_copy(0, who_K, new),
                (y_KP, own, buffers_KR),
                (replied.y_KP, replied.own, replied.buffers_KR),
            )
        used = _trained(engine, asks, arrived, y_KP, own, buffers_KR)
        for r, each in zip(rows.tolist(), scores(scoring, rows, used), strict=True):
            scored[r // num_clients][r % num_clients] = each
    engine.used, engine.computed = work  # measuring is not counted as work
    return scored


def scores(engine: StackedEngine, rows: Ints, used: Prediction) -> list[Scored]:
    """Score each client's test samples, with what it predicts with (K rows)."""
    x_KP, buffers_KR, offset_KC, _ = used
    if decides(used):  # each by itself: its samples alone
        return _scores_in_turn(engine, rows, np.arange(len(rows)), used)
    firsts = _firsts(engine, x_KP, buffers_KR)
    if engine.name == "streams" or engine.scores_alone or len(firsts) <= len(rows) / FEW:
        return _scores_in_turn(engine, rows, firsts, used)
    resident, model, task = engine.resident, engine.model, engine.problems[0].task
    sizes = resident.test.sizes[rows]
    block = int(min(BLOCK, sizes.max()))
    blocks = -(-sizes // block)
    owner = np.repeat(np.arange(len(rows)), blocks)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * block
    at_once = max(1, min(SAMPLES // block, PARAMETERS // x_KP.shape[1]))
    total_K = torch.zeros(len(rows), dtype=torch.float64, device=engine.device)
    sizes_K = torch.from_numpy(sizes).to(engine.device)
    keeps = bool(engine.problems[0].metrics)
    outputs: list[list[NDArray[Any]]] = [[] for _ in rows]

    def one(x_P, b_R, offset, inputs_B, target_B):  # type: ignore[no-untyped-def]
        output, _ = model.forward(x_P, b_R, inputs_B, mode="eval")
        logits = output.logits_BC if offset_KC is None else output.logits_BC + offset
        return task.score(logits, target_B), logits

    for i in range(0, len(owner), at_once):
        some = owner[i : i + at_once]
        owner_G = torch.from_numpy(some).to(engine.device)
        place_BG = torch.from_numpy(first[i : i + at_once]).to(engine.device) + torch.arange(
            block, device=engine.device
        ).unsqueeze(1)
        real_BG = place_BG < sizes_K[owner_G]
        index_BG = resident.test.samples(torch.minimum(place_BG, sizes_K[owner_G] - 1), rows[some])
        offset_GC = x_KP.new_zeros(len(some), 1) if offset_KC is None else offset_KC[owner_G]
        with torch.no_grad():
            score_GB, logits_GBC = torch.vmap(one, in_dims=(0, 0, 0, 1, 1))(
                x_KP[owner_G], buffers_KR[owner_G], offset_GC, resident.inputs(index_BG), resident.targets(index_BG)
            )
        total_K.index_add_(0, owner_G, (score_GB * real_BG.T).sum(1, dtype=torch.float64))
        if keeps:
            for k, start, logits_BC in zip(some, first[i : i + at_once], logits_GBC.cpu().numpy(), strict=True):
                outputs[k].append(logits_BC[: sizes[k] - start])
    totals: list[float] = total_K.tolist()
    if not keeps:
        return list(map(Scored, totals))
    return [Scored(total, np.concatenate(parts)) for total, parts in zip(totals, outputs, strict=True)]


def _firsts(engine: StackedEngine, x_KP: Tensor, buffers_KR: Tensor) -> Ints:
    """Return the places of the clients whose model is not that of the client before them."""
    same_K = torch.zeros(len(x_KP), dtype=torch.bool, device=engine.device)
    if not engine.scores_alone:
        same_K[1:] = (x_KP[1:] == x_KP[:-1]).all(1) & (buffers_KR[1:] == buffers_KR[:-1]).all(1)
    return np.flatnonzero(~same_K.cpu().numpy())


def _scores_in_turn(engine: StackedEngine, rows: Ints, firsts: Ints, used: Prediction) -> list[Scored]:
    """Score one model after the other, each on the samples of all its clients: from one of ``firsts`` to the next."""
    x_KP, buffers_KR, offset_KC, given = used
    resident, model, task = engine.resident, engine.scoring_model, engine.problems[0].task
    sizes = resident.test.sizes[rows]
    at_once = CHUNK if engine.scores_alone else 4 * CHUNK
    total_K = torch.zeros(len(rows), dtype=torch.float64, device=engine.device)
    keeps = bool(engine.problems[0].metrics)
    outputs: list[list[NDArray[Any]]] = [[] for _ in rows]
    for first, end in zip(firsts, [*firsts[1:], len(rows)], strict=True):
        owner = np.repeat(np.arange(first, end), sizes[first:end])
        place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes[first:end]) - sizes[first:end], sizes[first:end])
        for i in range(0, len(owner), at_once):
            some = owner[i : i + at_once]
            owner_B = torch.from_numpy(some).to(engine.device)
            index_B = resident.test.samples(torch.from_numpy(place[i : i + at_once]).to(engine.device), rows[some])
            with torch.no_grad():
                output, _ = model.forward(x_KP[first], buffers_KR[first], resident.inputs(index_B), mode="eval")
                logits = output.logits_BC if offset_KC is None else output.logits_BC + offset_KC[owner_B]
                if decides(used):
                    mine = Prediction(x_KP[first], buffers_KR[first], None, row(given, int(first)))
                    logits = decided(engine.method, model, mine, output._replace(logits_BC=logits))
                score_B = task.score(logits, resident.targets(index_B))
            total_K.index_add_(0, owner_B, score_B.to(torch.float64))
            if keeps:
                for k, logits_BC in _runs_of(some, logits.cpu().numpy()):
                    outputs[k].append(logits_BC)
    totals: list[float] = total_K.tolist()
    if not keeps:
        return list(map(Scored, totals))
    return [Scored(total, np.concatenate(parts)) for total, parts in zip(totals, outputs, strict=True)]


def _runs_of(owner: Ints, values: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield each owner with its part of the values, which are ordered by owner."""
    firsts = np.flatnonzero(np.diff(owner, prepend=-1))
    for first, part in zip(firsts, np.split(values, firsts[1:]), strict=True):
        yield int(owner[first]), part


def _received(engine: StackedEngine, arrived: Arrived, round: int) -> Prediction:
    """Return what each client predicts with when it receives its model."""
    asks = engine.asks(arrived.rows, round)

    def begin(ask_of, down, own, b_R):  # type: ignore[no-untyped-def]
        return engine.method.begin(ask_of(b_R), down, own)[0]

    y_KP = asking(begin, asks, arrived.down, arrived.own, arrived.buffers_KR)
    return _trained(engine, asks, arrived, y_KP, arrived.own, arrived.buffers_KR)


def _trained(
    engine: StackedEngine, asks: Asks, arrived: Arrived, y_KP: Tensor, own: Any, buffers_KR: Tensor
) -> Prediction:
    """Return what each client predicts with after its local training to ``y_KP``."""
    given_offset = False

    def predict(ask_of, y_P, down, own, b_R, received_R, survey):  # type: ignore[no-untyped-def]
        nonlocal given_offset
        used = engine.method.predict(ask_of(b_R, received_R, survey), y_P, down, own)
        given_offset = used.offset_C is not None
        return tuple(used) if given_offset else (used.x_P, used.buffers_R, (), used.given)

    survey = surveyed(engine, arrived._replace(own=own, buffers_KR=buffers_KR), y_KP, asks.round)
    arguments = y_KP, arrived.down, own, buffers_KR, arrived.buffers_KR, survey
    x_KP, used_KR, offset_KC, given = asking(predict, asks, *arguments)
    return Prediction(x_KP, used_KR, offset_KC if given_offset else None, given)


def _equal(used: Prediction, other: Prediction) -> bool:
    return torch.equal(used.x_P, other.x_P) and torch.equal(used.buffers_R, other.buffers_R)


def _groups(engine: StackedEngine, states: Sequence[State]) -> Iterator[tuple[Arrived, Ints]]:
    """Yield the clients to score, of all runs in order, as many at a time as their models fit in memory."""
    num_clients = engine.resident.num_clients
    rows = np.concatenate([problem.scored + j * num_clients for j, problem in enumerate(engine.problems)])
    size = max(1, min(max(GROUP, engine.capacity), 4 * PARAMETERS // engine.model.layout.num_parameters))
    for i in range(0, len(rows), size):
        some = rows[i : i + size]
        ids = [some[some // num_clients == j] % num_clients for j in range(len(states))]
        yield engine.arrive(states, ids, in_use=True), some


class ScoringEngine(StackedEngine):
    """The stacked engine with its measurements."""

    def _trial(self) -> None:
        """Train one step of two clients, and score two as they receive their models and after training."""
        super()._trial()
        ids = self.problems[0].scored[:2]
        if not len(ids):
            return
        states = [start(each) for each in self.problems]
        arrived = self.arrive(states, self._of_the_first_run(ids), in_use=True)
        asks = self.asks(arrived.rows, 0)
        scores(self, arrived.rows, _received(self, arrived, 0))

        def begin(ask_of, down, own, b_R):  # type: ignore[no-untyped-def]
            return self.method.begin(ask_of(b_R), down, own)[0]

        y_KP = asking(begin, asks, arrived.down, arrived.own, arrived.buffers_KR)
        scores(self, arrived.rows, _trained(self, asks, arrived, y_KP, arrived.own, arrived.buffers_KR))

    def before(self, states: Sequence[State]) -> list[dict[str, Any]]:
        return self._until_it_fits(lambda: before(self, states))

    def after(self, states: Sequence[State]) -> list[dict[str, Any]]:
        return self._until_it_fits(lambda: after(self, states))

    def gradients(self, states: Sequence[State]) -> Iterator[Gradients]:
        return gradients(self, states)

    def close(self) -> None:
        if self.computed:
            note(f"{self.name}: {self.waste:.1%} of the computed samples were padding or idle")
