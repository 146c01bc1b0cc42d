"""Train stacked clients in fixed memory: one vmapped step, and a CUDA graph for each number of active clients.

Each client is a row, those with the most steps first, so that the active ones are always the first k. The k rows
of a step are rounded up to a bucket. The rows after the active ones compute values that are never read, because
every client's result was copied out after its last step.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedncv.engine.local import local_step
from fedncv.engine.orders import Ints, Table
from fedncv.engine.problem import Problem
from fedncv.engine.resident import Resident
from fedncv.flat import Model
from fedncv.methods.base import Ask, Batch, Client
from fedncv.tree import leaves, tree_map

RATIO = 1.08  # between neighbouring bucket sizes: half of it is the mean share of idle rows


class Moving(NamedTuple):
    """Tensors that a step changes, one row per client."""

    y_P: Tensor
    state: Any  # of the optimizer
    buffers_R: Tensor
    scratch: Any
    loss: Tensor  # sum over the steps


class Fixed(NamedTuple):
    """Tensors that a step only reads."""

    down: Any
    own: Any
    client: Client
    lr: Tensor  # of the run the client belongs to


class Calls(NamedTuple):
    """Number of gradients and forward passes in one step."""

    gradients: int = 0
    forwards: int = 0


def buckets(capacity: int, ratio: float = RATIO) -> list[int]:
    """Return sizes up to ``capacity``, each at most ``ratio`` times the next smaller one, or one more.

    >>> buckets(20, ratio=1.3)
    [1, 2, 3, 4, 5, 6, 7, 9, 11, 14, 18, 20]
    """
    sizes = [1]
    while sizes[-1] < capacity:
        sizes.append(min(capacity, max(sizes[-1] + 1, int(sizes[-1] * ratio))))
    return sizes


class Stage:
    """Memory and graphs for up to ``capacity`` clients at a time."""

    def __init__(
        self,
        problem: Problem,
        model: Model,
        resident: Resident,
        *,
        capacity: int,
        num_batches: int,
        most_steps: Ints,
        ratio: float = RATIO,
    ) -> None:
        self.capacity = capacity
        self.calls: dict[int, Calls] = {}
        self.computed = 0  # samples that went through a step, idle rows and padding included
        self._problem, self._model, self._resident = problem, model, resident
        self._num_batches, self._most_steps = num_batches, most_steps
        self._buckets = buckets(capacity, ratio)
        self._device = model.start_P.device
        self._round = 0
        self._step = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._moving: Moving | None = None
        self._fixed: Fixed | None = None
        self._tables: dict[int, Table] = {}
        self._graphs: dict[tuple[int, int, int | None], torch.cuda.CUDAGraph] = {}
        self._round_matters: dict[int, bool] = {}
        self._pool: Any = None

    def run_phase(
        self, phase: int, rows: Ints, steps: Ints, table: Table, moving: Moving, fixed: Fixed, *, round: int
    ) -> None:
        """Train the clients ``rows``, with ``steps`` steps each, most first; change ``moving`` in place."""
        assert (np.diff(steps) <= 0).all(), "clients with the most steps come first"
        row_K = torch.from_numpy(rows).to(self._device)
        self._round = round
        self._step.zero_()
        self._moving = _load(self._moving, moving, row_K, self.capacity)
        self._fixed = _load(self._fixed, fixed, row_K, self.capacity)
        self._keep_table(phase, table)
        done, active = 0, int((steps > 0).sum())
        while active:
            bucket = next(size for size in self._buckets if size >= active)
            until = int(steps[active - 1])
            self._advance(phase, bucket, until - done)
            done, still = until, int((steps > until).sum())
            ends = slice(still, active)
            for (_, target), (_, source) in zip(leaves(moving), leaves(self._moving), strict=True):
                target.index_copy_(0, row_K[ends], source[ends])
            active = still

    def _keep_table(self, phase: int, table: Table) -> None:
        """Copy the table into fixed memory, long enough for the client with the most steps."""
        if phase not in self._tables:
            steps, batch = int(self._most_steps[phase]), table.index_TBK.shape[1]
            self._tables[phase] = Table(
                table.index_TBK.new_zeros(steps, batch, self.capacity),
                table.weight_TBK.new_ones(steps, batch, self.capacity),
                table.number_TK.new_zeros(steps, self.capacity),
                table.key_TK2.new_zeros(steps, self.capacity, 2),
            )
        for kept, new in zip(self._tables[phase], table, strict=True):
            kept[tuple(slice(0, size) for size in new.shape)].copy_(new)

    def _advance(self, phase: int, k: int, num_steps: int) -> None:
        self.computed += num_steps * k * self._tables[phase].index_TBK.shape[1]
        if self._device.type != "cuda":
            for _ in range(num_steps):
                self._one_step(phase, k)
            return
        graph = self._graphs.get((phase, k, self._graph_round(phase)))
        if graph is None:
            graph = self._capture(phase, k)
        for _ in range(num_steps):
            graph.replay()

    def _graph_round(self, phase: int) -> int | None:
        return self._round if self._round_matters.get(phase) else None

    def _capture(self, phase: int, k: int) -> torch.cuda.CUDAGraph:
        """Record one step of k clients; undo the trial run before it."""
        assert self._moving is not None
        saved = [(leaf, leaf[:k].clone()) for _, leaf in leaves(self._moving)]
        step = self._step.clone()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._one_step(phase, k)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._step.copy_(step)
        for leaf, rows in saved:
            leaf[:k].copy_(rows)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            self._one_step(phase, k)
        self._graphs = {key: g for key, g in self._graphs.items() if key[2] in (None, self._round)}
        self._graphs[phase, k, self._graph_round(phase)] = graph
        return graph

    def _one_step(self, phase: int, k: int) -> None:
        assert self._moving is not None
        assert self._fixed is not None
        problem, resident = self._problem, self._resident
        config, method = problem.config, problem.method
        phases = method.phases(config.epochs)
        part = phases[phase]
        counts = bool(part.trains) or not any(each.trains for each in phases)

        def client_step(moving, fixed, x_B, target_B, weight_B, number, key):  # type: ignore[no-untyped-def]
            ask = Ask(
                self._model,
                problem.task,
                moving.buffers_R,
                client=fixed.client,
                round=self._round,
                key=key,
                num_batches=self._num_batches,
                batch_size=self._tables[phase].index_TBK.shape[1],
                phase=phase,
                mode=part.mode,
                stacked=True,
            )
            batch = Batch(x_B, target_B, weight_B, number)
            g_P, scratch = method.direction(ask, moving.y_P, batch, fixed.down, fixed.own, moving.scratch)
            y_P, state = local_step(
                problem.optimizer, part, self._model.layout, g_P, moving.state, moving.y_P, fixed.lr
            )
            notes = ask.notes
            self.calls[phase] = Calls(notes.num_gradients, notes.num_forwards)
            self._round_matters[phase] = notes.saw_round
            loss = moving.loss + notes.value.to(moving.loss) if counts else moving.loss
            return Moving(y_P, state, notes.buffers_R, scratch, loss)

        first = tree_map(lambda leaf: leaf[:k], (self._moving, self._fixed))
        batch = resident.batch(self._tables[phase], self._step, k)
        step = torch.vmap(client_step, in_dims=(0, 0, 1, 1, 1, 0, 0))
        new = step(*first, *batch)
        overwrite([leaf for _, leaf in leaves(first[0])], [leaf for _, leaf in leaves(new)])
        self._step += 1


def overwrite(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy the sources into the targets, also if a source is a view of some target's memory."""
    memory = {target.untyped_storage().data_ptr() for target in targets}
    stays = [s.data_ptr() == t.data_ptr() and s.stride() == t.stride() for t, s in zip(targets, sources, strict=True)]
    sources = [
        s.clone() if s.untyped_storage().data_ptr() in memory and not stay else s
        for s, stay in zip(sources, stays, strict=True)
    ]
    for target, source, stay in zip(targets, sources, stays, strict=True):
        if not stay:
            target.copy_(source)


def _load(memory: Any, tree: Any, row_K: Tensor, capacity: int) -> Any:
    """Copy the rows of ``tree`` into the fixed memory, which the first call allocates."""
    if memory is None:
        memory = tree_map(lambda leaf: leaf.new_zeros(capacity, *leaf.shape[1:]), tree)
    for (_, kept), (_, new) in itertools.zip_longest(leaves(memory), leaves(tree)):
        kept[: len(row_K)].copy_(new.index_select(0, row_K))
    return memory
