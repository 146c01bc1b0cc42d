"""A worker of ``engine=ray``: a process that holds the runs' problems on its own device, and trains block after block.

It is an ordinary class, which Ray makes an actor of. On a CPU it trains one client after the other, with the bits of
the sequential engine; on a GPU with the engine that ``choose`` takes there. Clients' rows that it has seen stay in its
cache, so that a job names a row, and carries it only if the worker lacks it.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fedncv.cluster.connect import ours
from fedncv.cluster.packing import Numbers, Packed, pack, unpack
from fedncv.engine.arithmetic import arithmetic
from fedncv.engine.evaluate import score_after, score_before
from fedncv.engine.gradients import of_client
from fedncv.engine.problem import Kept, Problem, State, arrivals
from fedncv.engine.relay import Block, Sent, relayed, returned
from fedncv.engine.round import Draw
from fedncv.engine.row_cache import RowCache
from fedncv.engine.sequential import outcomes
from fedncv.imports import look_in
from fedncv.tree import num_bytes


class Setup(NamedTuple):
    """What a worker needs before it can unpack the problems."""

    path: list[str]  # where the driver finds modules
    code_dir: str
    layers: str  # of the other workers, which this one must also use; empty: choose
    compiled: bool
    on_gpu: Callable[..., Any] | None  # ``choose.on_gpu``; None on a CPU


class Job(NamedTuple):
    """A block, and the state of its clients: names of rows, and the rows that the worker may lack."""

    block: Block
    sent: Sent
    names: dict[int, bytes]
    rows: dict[int, Kept]


class Started(NamedTuple):
    """First answer of a worker."""

    host: str
    versions: dict[str, str]
    layers: list[str]
    failed: str = ""


class Missing(NamedTuple):
    """Answer of a worker that lacks rows of these clients."""

    clients: list[int]


class Done(NamedTuple):
    """Answer of a worker that has run a block."""

    value: Any
    names: dict[int, bytes]  # of the rows that its clients keep from now on


class Failed(NamedTuple):
    """Answer of a worker whose block raised an error that another try would raise again."""

    error: str


class BlockWorker:
    """Problems, the engine of this device, and the cache of rows."""

    def __init__(self, setup: Setup, words: bytes, parts: Sequence[Numbers], samples: Packed) -> None:
        self._given = setup, words, parts, samples

    def alive(self) -> None:
        """Return at once: this process has a place."""

    def started(self) -> Started:
        """Make the engine, which may take a while."""
        failed, self._layers = "", [""]
        try:
            self._begin(*self._given)
        except Exception as error:  # the driver says it in one line
            failed = _words(error)
        del self._given
        return Started(socket.gethostname(), ours(), self._layers, failed)

    def _begin(self, setup: Setup, words: bytes, parts: Sequence[Numbers], samples: Packed) -> None:
        torch.set_num_threads(1)
        sys.path += [each for each in setup.path if each not in sys.path and os.path.isdir(each)]
        look_in(setup.code_dir)
        bare: list[Problem] = unpack(words, parts)
        datasets = unpack(*samples, copy=False)
        problems = [relayed(each._replace(dataset=one)) for each, one in zip(bare, datasets, strict=True)]
        for problem in problems[1:]:
            problem.model.share_constants(problems[0].model)
        config = problems[0].config
        contextlib.ExitStack().enter_context(arithmetic(config))  # for as long as this process lives
        device = problems[0].model.start_P.device
        self._engine: Any = None
        if setup.on_gpu:
            self._engine = setup.on_gpu(problems, before=[setup.layers])
            self._engines = [self._engine.only([j]) for j in range(len(problems))] if self._engine else []
        elif setup.compiled:
            from fedncv.engine.cpu_fused import fused

            problems = list(map(fused, problems))
        self._problems = problems
        self._layers = self._engine.layers if self._engine else [problem.layers for problem in problems]
        self._caches = [RowCache(device) for _ in problems]
        self._now: dict[int, tuple[int, Problem]] = {}  # run -> round, and its problem as it is then

    def run(self, words: bytes, *parts: Numbers) -> tuple[bytes, list[Numbers]]:
        """Run a job, and return its packed answer: ``Done``, ``Missing`` or ``Failed``."""
        job: Job = unpack(words, parts)
        try:
            answer: Any = self._run(job)
        except Exception as error:
            answer = Failed(_words(error))
        packed = pack(answer)
        return packed.words, packed.parts

    def _run(self, job: Job) -> Missing | Done:
        block, cache = job.block, self._caches[job.block.run]
        for row in job.rows.values():
            cache.put(row)
        kept = {u: job.rows.get(u) or cache.get(name) for u, name in job.names.items()}
        if missing := [u for u, row in kept.items() if row is None]:
            return Missing(missing)
        state = State(block.round, job.sent, self._problems[block.run].model.start_R, kept)
        if block.kind != "train":
            return Done(self._measured(block, state), {})
        problem, drawn = self._at(block), Draw(block.ids, block.answers, block.shares)
        if self._engine:
            ((*found,),) = self._engines[block.run].outcomes([state], [drawn])
        else:
            found = list(outcomes(problem, state, drawn))
        names = {
            each.client: cache.put(each.trained.kept)
            for each in found
            if each.trained is not None and num_bytes(each.trained.kept)
        }
        return Done(returned(problem, found), names)

    def _measured(self, block: Block, state: State) -> list[Any]:
        """Return the scores or the gradients of the block's clients, in their order."""
        problem = self._at(block)
        if self._engine:
            return self._measured_together(block, state)
        found = arrivals(problem, state, block.ids)
        if block.kind == "before":
            return [score_before(problem, block.round, each, state.server.shared_P) for each in found]
        if block.kind == "after":
            return [score_after(problem, block.round, each) for each in found]
        return [of_client(problem, block.round, each) for each in found]

    def _measured_together(self, block: Block, state: State) -> list[Any]:
        from fedncv.engine.stacked_gradients import of_clients
        from fedncv.engine.stacked_scores import each_after, each_before

        engine = self._engines[block.run].scoring(block.ids)
        if block.kind == "gradients":
            return list(of_clients(engine, [state], 0, block.ids))
        (scored,) = each_before(engine, [state]) if block.kind == "before" else each_after(engine, [state])
        return [scored[u] for u in block.ids.tolist()]

    def _at(self, block: Block) -> Problem:
        round, problem = self._now.get(block.run, (-1, None))
        if round != block.round or problem is None:
            problem = self._problems[block.run].at(block.round)
            self._now[block.run] = block.round, problem
        return problem


def _words(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
