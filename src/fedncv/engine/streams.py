"""Train each client by an ordinary step of its own, several clients at a time, each on a CUDA stream of its own.

This is for models that are too large to gain from one vectorised step (``stage``), and for layers that ``torch.vmap``
cannot run. A slot has the memory of one client and, on a GPU, a stream and the recorded graphs of a step. Clients are
dealt to the slots, those with the most steps first, and no slot waits for another.

A batch that is smaller than the others is padded with samples of weight 0 if the model can ignore them (``masked``).
Otherwise one step is recorded for each size of batch.
"""

import contextlib
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedncv.engine.local import local_step
from fedncv.engine.orders import Ints, Table
from fedncv.engine.problem import Problem
from fedncv.engine.resident import Resident
from fedncv.engine.stage import Calls, Fixed, Moving, overwrite
from fedncv.flat import Model
from fedncv.keys import Key
from fedncv.methods.base import Ask, Batch
from fedncv.tree import leaves, row, tree_map

SLOTS = 16
"""Clients in flight. A few fill a GPU while all slots have work; with 8, ten equal clients would need two turns."""


class Models(NamedTuple):
    """The model, and the same model for padded batches; None if padding would change its numbers."""

    whole: Model
    padded: Model | None

    @property
    def differ(self) -> bool:
        """Whether a whole batch and a padded one need different layers."""
        return self.padded is None or self.padded.uses_weights


class Steps(NamedTuple):
    """The steps of one client in one phase."""

    index_TB: Tensor
    weight_TB: Tensor
    number_T: Tensor
    key_T2: Key


Form = tuple[int, int, bool, int | None]
"""Of a recorded step: its phase, samples in the batch, whether some are padding, and the round if the step read it."""


class Slot:
    """Memory for one client at a time, with a stream and recorded steps on a GPU."""

    def __init__(self, moving: Moving, fixed: Fixed, steps: Steps) -> None:
        empty = lambda leaf: torch.zeros_like(leaf, memory_format=torch.contiguous_format)  # noqa: E731
        self.moving, self.fixed, self.steps = tree_map(empty, (moving, fixed, steps))
        device = moving.y_P.device
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.graphs: dict[Form, torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.stream else None

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """Launch on the slot's stream."""
        return torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()

    def load(self, moving: Moving, fixed: Fixed, steps: Steps) -> None:
        with self.running():
            self.step.zero_()
            for kept, new in zip(_tensors((self.moving, self.fixed)), _tensors((moving, fixed)), strict=True):
                kept.copy_(new)
            for kept, new in zip(self.steps, steps, strict=True):
                kept[: len(new)].copy_(new)

    def store(self, moving: Moving) -> None:
        with self.running():
            for target, source in zip(_tensors(moving), _tensors(self.moving), strict=True):
                target.copy_(source)


def deal(steps: Ints, slots: int) -> list[list[int]]:
    """Deal clients, those with the most steps first, each to the slot with the fewest steps so far.

    >>> deal(np.array([5, 4, 3, 1]), 2)
    [[0, 3], [1, 2]]
    """
    dealt: list[list[int]] = [[] for _ in range(slots)]
    total = np.zeros(slots, dtype=np.int64)
    for i, num in enumerate(steps.tolist()):
        slot = int(total.argmin())
        dealt[slot].append(i)
        total[slot] += num
    return dealt


class Streams:
    """Slots for up to ``capacity`` clients in flight."""

    def __init__(
        self, problem: Problem, models: Models, resident: Resident, *, capacity: int, num_batches: int, most_steps: Ints
    ) -> None:
        self.capacity = capacity
        self.calls: dict[int, Calls] = {}
        self.computed = 0  # samples that went through a step, padding included
        self._problem, self._models, self._resident = problem, models, resident
        self._num_batches, self._longest = num_batches, int(most_steps.max())
        self._round = 0
        self._slots: list[Slot] = []
        self._round_matters: dict[int, bool] = {}
        self._tried: set[tuple[int, int, bool]] = set()

    def run_phase(
        self, phase: int, rows: Ints, steps: Ints, table: Table, moving: Moving, fixed: Fixed, *, round: int
    ) -> None:
        """Train the clients ``rows``, with ``steps`` steps each, most first; change ``moving`` in place."""
        assert (np.diff(steps) <= 0).all(), "clients with the most steps come first"
        self._round = round
        size_TK = table.weight_TBK.sum(1).to(torch.int64).cpu().numpy()
        num = int((steps > 0).sum())
        while len(self._slots) < min(self.capacity, num):
            self._slots.append(self._new_slot(row(moving, 0), row(fixed, 0), table))
        slots = self._slots[:num]
        for slot in slots:
            if slot.stream:
                slot.stream.wait_stream(torch.cuda.current_stream(moving.y_P.device))
        work = [
            self._work(slot, phase, [(i, rows[i], steps[i]) for i in some], size_TK, table, moving, fixed)
            for slot, some in zip(slots, deal(steps[:num], len(slots)), strict=True)
        ]
        try:
            for _ in zip_longest(*work):  # a step of each slot in turn: a long queue would keep the others waiting
                pass
        finally:  # also after an error: the slots still use memory that is freed then
            for slot in slots:
                if slot.stream:
                    torch.cuda.current_stream(moving.y_P.device).wait_stream(slot.stream)

    def _new_slot(self, moving: Moving, fixed: Fixed, table: Table) -> Slot:
        index_TBK, weight_TBK, number_TK, key_TK2 = table
        batch = index_TBK.shape[1]
        return Slot(
            moving,
            fixed,
            Steps(
                index_TBK.new_zeros(self._longest, batch),
                weight_TBK.new_zeros(self._longest, batch),
                number_TK.new_zeros(self._longest),
                key_TK2.new_zeros(self._longest, 2),
            ),
        )

    def _work(
        self, slot: Slot, phase: int, clients: list[tuple[int, int, int]], size_TK: Ints, table: Table, moving: Moving,
        fixed: Fixed,
    ) -> Iterator[None]:  # fmt: skip
        """Launch the steps of these clients (place in the table, row, steps), one after each ``next``."""
        index_TBK, weight_TBK, number_TK, key_TK2 = table
        for i, at, num in clients:
            mine = Steps(index_TBK[..., i], weight_TBK[..., i], number_TK[:, i], key_TK2[:, i])
            slot.load(row(moving, at), row(fixed, at), mine)
            for size in size_TK[:num, i].tolist():
                self._advance(slot, phase, size)
                yield
            slot.store(row(moving, at))

    def _advance(self, slot: Slot, phase: int, size: int) -> None:
        """Make one step with a batch of ``size`` samples."""
        whole, padded = slot.steps.index_TB.shape[1], False
        if size < whole and self._models.padded is not None:
            size, padded = whole, True
        if not self._models.differ:
            padded = True  # one recorded step serves all batches
        self.computed += size
        if slot.stream is None:
            self._one_step(slot, phase, size, padded)
            return
        form = phase, size, padded, self._round if self._round_matters.get(phase) else None
        if form not in slot.graphs:
            self._record(slot, phase, size, padded)
            form = *form[:3], self._round if self._round_matters[phase] else None
        with slot.running():
            slot.graphs[form].replay()

    def _record(self, slot: Slot, phase: int, size: int, padded: bool) -> None:
        """Record a step. The first of its kind is run before, so that everything is loaded, and undone."""
        assert slot.stream is not None
        if (phase, size, padded) not in self._tried:
            kept = [*_tensors(slot.moving), slot.step]
            with slot.running():
                saved = [leaf.clone() for leaf in kept]
                self._one_step(slot, phase, size, padded)
                for leaf, before in zip(kept, saved, strict=True):
                    leaf.copy_(before)
            self._tried.add((phase, size, padded))
        graph = record(lambda: self._one_step(slot, phase, size, padded), slot.stream, slot.pool)
        of_round = self._round if self._round_matters[phase] else None
        slot.graphs = {form: g for form, g in slot.graphs.items() if form[3] in (None, self._round)}
        slot.graphs[phase, size, padded, of_round] = graph

    def _one_step(self, slot: Slot, phase: int, size: int, padded: bool) -> None:
        problem, resident, moving, fixed = self._problem, self._resident, slot.moving, slot.fixed
        method = problem.method
        phases = method.phases(problem.config.epochs)
        part = phases[phase]
        counts = bool(part.trains) or not any(each.trains for each in phases)
        model = self._models.padded if padded and self._models.padded is not None else self._models.whole
        index_B, weight_B, number, key = (leaf.index_select(0, slot.step)[0] for leaf in slot.steps)
        index_B, weight_B = index_B[:size], weight_B[:size]
        ask = Ask(
            model,
            problem.task,
            moving.buffers_R,
            client=fixed.client,
            round=self._round,
            key=key,
            num_batches=self._num_batches,
            batch_size=slot.steps.index_TB.shape[1],
            phase=phase,
            mode=part.mode,
        )
        batch = Batch(resident.inputs(index_B), resident.targets(index_B), weight_B, number)
        g_P, scratch = method.direction(ask, moving.y_P, batch, fixed.down, fixed.own, moving.scratch)
        y_P, state = local_step(problem.optimizer, part, model.layout, g_P, moving.state, moving.y_P, fixed.lr)
        notes = ask.notes
        self.calls[phase] = Calls(notes.num_gradients, notes.num_forwards)
        self._round_matters[phase] = notes.saw_round
        loss = moving.loss + notes.value.to(moving.loss) if counts else moving.loss
        new = Moving(y_P, state, notes.buffers_R, scratch, loss)
        overwrite(_tensors(moving), _tensors(new))
        slot.step += 1


def record(step: Any, stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
    """Record what ``step`` launches. Raise its own error if it cannot be recorded, not that of the broken recording."""
    graph, failed = torch.cuda.CUDAGraph(), None
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            try:
                step()
            except Exception as error:
                failed = error
                raise
    except Exception as error:
        raise (failed or error) from None
    return graph


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(tree)]
