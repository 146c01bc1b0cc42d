"""Run the loops of a server that trains (``ServerAsk.loop``) in fixed memory: on a GPU each step replays a CUDA graph.

If the host launched each operation, the small steps of a server would take longer than all clients together.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedncv.engine.problem import Problem
from fedncv.engine.stage import overwrite
from fedncv.flat import Model
from fedncv.methods.base import ServerAsk, Step, Stepped
from fedncv.tree import leaves, tree_map

MOST = 16  # recorded loops to keep; each number of replies has its own form


class Memory(NamedTuple):
    """The memory that a recorded step reads and writes."""

    state: Any
    rows: Any
    given: Any
    number: Tensor  # of the current row


class Loops:
    """The loops of all runs of an engine. A step is recorded once for each form of its arguments."""

    def __init__(self, model: Model) -> None:
        self._model = model  # of any of the runs: they differ only in their initial parameters
        self._recorded: dict[Any, tuple[Memory, torch.cuda.CUDAGraph | None]] = {}

    def __call__(self, step: Step, state: Any, rows: Any, given: Any) -> Any:
        form = step, *(_form(tree) for tree in (state, rows, given)), _numbers(given)
        if form not in self._recorded:
            if len(self._recorded) == MOST:
                self._recorded.clear()
            self._recorded[form] = self._record(step, state, rows, given)
        memory, graph = self._recorded[form]
        for kept, new in zip(_tensors(memory[:3]), _tensors((state, rows, given)), strict=True):
            kept.copy_(new)
        memory.number.zero_()
        for _ in range(len(_tensors(rows)[0])):
            if graph is None:
                self._one_step(step, memory)
            else:
                graph.replay()
        return tree_map(lambda _, now: now.clone(), state, memory.state)

    def _record(self, step: Step, state: Any, rows: Any, given: Any) -> tuple[Memory, torch.cuda.CUDAGraph | None]:
        number = torch.zeros(1, dtype=torch.int64, device=_tensors(rows)[0].device)
        memory = Memory(tree_map(_copy, state), tree_map(_copy, rows), tree_map(_copy, given), number)
        if not number.is_cuda:
            return memory, None
        stream = torch.cuda.Stream(number.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(number.device))
        with torch.cuda.stream(stream):
            self._one_step(step, memory)  # a trial, so that everything is compiled and allocated
        torch.cuda.current_stream(number.device).wait_stream(stream)
        number.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._one_step(step, memory)
        return memory, graph

    def _one_step(self, step: Step, memory: Memory) -> None:
        row = tree_map(lambda leaf: leaf.index_select(0, memory.number)[0], memory.rows)
        overwrite(_tensors(memory.state), _tensors(step(self._model, memory.state, row, memory.given)))
        memory.number.add_(1)


def with_loops(problem: Problem, loops: Loops) -> Problem:
    """Return the problem whose server runs its loops through ``loops``."""
    step = problem.method.step

    def repeating(ask: ServerAsk, server: Any, combined: Any) -> Stepped:
        return step(ask._replace(repeat=loops), server, combined)

    return problem._replace(method=problem.method._replace(step=repeating))


def _copy(leaf: Tensor) -> Tensor:
    return leaf.detach().clone(memory_format=torch.contiguous_format)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]


def _form(tree: Any) -> tuple[Any, ...]:
    return tuple((path, leaf.shape, leaf.dtype) for path, leaf in leaves(tree) if isinstance(leaf, Tensor))


def _numbers(tree: Any) -> tuple[Any, ...]:
    """Return the Python numbers of a tree, which are constants of a recorded step."""
    return tuple(leaf for _, leaf in leaves(tree) if not isinstance(leaf, Tensor))
