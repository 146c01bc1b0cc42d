"""Train the blocks of a cohort on the workers of a Ray cluster. The driver, this process, keeps all state.

The cohort is cut into blocks of consecutive clients. A block is what a worker trains, what is tried again if the worker
is lost, and what is summed: with a method in the sums form a block returns one sum, not the clients' replies, and the
driver adds the sums in the order of the blocks. So the numbers do not depend on the workers: not on how many there are,
on their speed, or on those that die.

What clients keep is in the driver's rows, and in its checkpoints. Workers cache the rows that they have seen.
"""

import copy
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from fedncv.cluster import connect
from fedncv.cluster.connect import ClusterError, ours, refuse_others
from fedncv.cluster.packing import CannotPackError, Packed, pack, unpack
from fedncv.cluster.pool import Pool, Task, Worker
from fedncv.config import OBJECTS, RunConfig
from fedncv.engine.evaluate import shared_model, summary, summary_before
from fedncv.engine.gradients import Gradients, collected
from fedncv.engine.loops import Loops, with_loops
from fedncv.engine.problem import DivergedError, Kept, Problem, Settled, State
from fedncv.engine.ray_worker import BlockWorker, Done, Failed, Job, Missing, Setup, Started
from fedncv.engine.relay import Kind, Messages, blocks_of, everybody, num_samples
from fedncv.engine.round import Draw, draw, settle
from fedncv.machine import num_cores
from fedncv.notes import note
from fedncv.rows import Rows, name_of
from fedncv.tree import num_bytes

SHARED_BYTES = 1 << 16  # tensors of several blocks that are at least this large go into the object store, once a round

LATEST = 16  # of them, to recognise one that is the same for all blocks


class Traffic:
    """Bytes between the driver and its workers."""

    def __init__(self) -> None:
        self.sent = self.received = 0


class RayEngine:
    """Run clients on a cluster; ``close`` it, or use it in a ``with`` block."""

    name = "ray"
    why = ""

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        on_gpu: Callable[..., Any] | None = None,
        compiled: bool = False,
        before: Sequence[str] = (),
    ) -> None:
        first = problems[0]
        self.problems = list(problems)
        self.traffic = Traffic()
        self._places = list(range(len(problems)))  # index of each run among those that the workers hold
        is_cuda = first.model.start_P.is_cuda
        self._servers = self.problems
        if is_cuda:
            loops = Loops(first.model)
            self._servers = [with_loops(problem, loops) for problem in problems]
        self._config = first.config
        self._names: dict[tuple[int, int], tuple[Kept, bytes]] = {}  # rows in memory that were named before
        self._layers = [before[0] if before and on_gpu else ""] * len(problems)
        self._gpus = join(first.config)
        self._use = connect.Use()
        self._setup = Setup(sys.path[:], first.config.code_dir, "", compiled, on_gpu)
        self._ours = ours()
        self._pool = Pool(self._start, self._wanted, self._greet)
        try:
            self._packed = _packed(self.problems)
            self._pool.wait()
        except BaseException:
            self.close()
            raise
        _note_idle(first.config, self._wanted())

    def __enter__(self) -> "RayEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def layers(self) -> list[str]:
        return [self._layers[place] for place in self._places]

    @property
    def pool(self) -> Pool:
        return self._pool

    def only(self, runs: Sequence[int]) -> Self:
        """Return an engine for some of the runs, with the same workers."""
        other = copy.copy(self)
        other.problems = [self.problems[j] for j in runs]
        other._servers = [self._servers[j] for j in runs]
        other._places = [self._places[j] for j in runs]
        return other

    def close(self) -> None:
        self._pool.close()
        self._use.end()

    # ---- rounds and measurements -------------------------------------------------------------------------

    def run_rounds(self, states: Sequence[State], drawn: Sequence[Draw] | None = None) -> list[Settled]:
        """Run one round of every run; return the error of a run that diverged, and continue the others."""
        problems = [problem.at(state.round) for problem, state in zip(self._servers, states, strict=True)]
        drawn = drawn or [draw(problem, state.round) for problem, state in zip(problems, states, strict=True)]
        found = self._run("train", problems, states, drawn, [None] * len(states))
        settled: list[Settled] = []
        for j, (problem, state) in enumerate(zip(problems, states, strict=True)):
            outcomes = [outcome for each in found[j] for outcome in each.outcomes]
            partials = [each.partial for each in found[j] if each.partial is not None]
            in_sums = problem.method.form == "sums"
            try:
                settled.append(settle(problem, state, drawn[j], outcomes, partials if in_sums else None))
            except DivergedError as error:
                settled.append(error)
        return settled

    def before(self, states: Sequence[State]) -> list[dict[str, Any]]:
        shared = [shared_model(p, s) for p, s in zip(self.problems, states, strict=True)]
        return [
            summary_before(problem, scored, shared=x_P is not None)
            for problem, x_P, scored in zip(self.problems, shared, self._scored("before", states, shared), strict=True)
        ]

    def after(self, states: Sequence[State]) -> list[dict[str, Any]]:
        scored = self._scored("after", states, [None] * len(states))
        return [summary(problem, "after", each) for problem, each in zip(self.problems, scored, strict=True)]

    def gradients(self, states: Sequence[State]) -> Iterator[Gradients]:
        return (self._gradients(j, state) for j, state in enumerate(states))

    def _gradients(self, j: int, state: State) -> Gradients:
        one, problem = self.only([j]), self.problems[j].at(state.round)
        drawn = everybody(problem.holders)
        (found,) = one._run("gradients", [problem], [state], [drawn], [None])
        return collected(problem, [moments for each in found for moments in each])

    def _scored(self, kind: Kind, states: Sequence[State], shared: Sequence[Tensor | None]) -> list[dict[int, Any]]:
        """Return the results of the clients that are scored, run by run."""
        problems = [problem.at(state.round).in_use for problem, state in zip(self.problems, states, strict=True)]
        drawn = [everybody(problem.scored) for problem in problems]
        found = self._run(kind, problems, states, drawn, shared)
        values = [[value for block in blocks for value in block] for blocks in found]
        return [dict(zip(each.ids.tolist(), mine, strict=True)) for each, mine in zip(drawn, values, strict=True)]

    # ---- blocks on workers -------------------------------------------------------------------------------

    def _run(
        self,
        kind: Kind,
        problems: Sequence[Problem],
        states: Sequence[State],
        drawn: Sequence[Draw],
        shared: Sequence[Tensor | None],
    ) -> list[list[Any]]:
        """Return the results of all blocks of every run, in the order of the blocks."""
        size = self._config.block
        blocks = [
            (j, block)
            for j, state in enumerate(states)
            for block in blocks_of(kind, self._places[j], state.round, drawn[j], size)
        ]
        tasks = [Task(block.words, num_samples(problems[j], block), (kind, block.run)) for j, block in blocks]
        results: list[Any] = [None] * len(blocks)
        store = Store(self.traffic)
        sent = [
            Messages(problem, state, each.ids, x_P)
            for problem, state, each, x_P in zip(problems, states, drawn, shared, strict=True)
        ]

        def submit(worker: Worker, i: int, lacks: Iterable[int] | None = None) -> Any:
            j, block = blocks[i]
            names = self._named(block.run, states[j], block.ids)
            if lacks is None:
                lacks = [u for u, name in names.items() if worker.data.get((block.run, u)) != name]
            rows = {u: states[j].kept[u] for u in lacks}
            job = Job(block, sent[j].to(block.ids), names, rows)
            worker.data |= {(block.run, u): name for u, name in names.items()}
            packed = pack(job)
            return worker.actor.run.remote(packed.words, *store.put(packed.parts))

        def take(worker: Worker, i: int, answer: Any) -> Any:
            words, parts = answer
            self.traffic.received += len(words) + sum(map(len, parts))
            result = unpack(words, parts)
            if isinstance(result, Missing):
                # all rows: those that it has would make room for the missing ones if its cache is small
                j, block = blocks[i]
                return submit(worker, i, self._named(block.run, states[j], block.ids))
            if isinstance(result, Failed):
                self.close()
                raise ClusterError(f"{tasks[i].words}: {result.error} (engine=sequential shows where)")
            assert isinstance(result, Done)
            results[i] = result.value
            if kind == "train":
                for outcome in result.value.outcomes:
                    if name := result.names.get(outcome.client):
                        key = blocks[i][1].run, outcome.client
                        if not isinstance(states[blocks[i][0]].kept, Rows):  # which are in a file, and named there
                            self._names[key] = outcome.trained.kept, name
                        worker.data[key] = name
            return None

        def holds(worker: Worker, i: int) -> int:
            j, block = blocks[i]
            names = self._named(block.run, states[j], block.ids)
            return sum(worker.data.get((block.run, u)) == name for u, name in names.items())

        self._pool.map(tasks, submit, take, holds=holds)
        found: list[list[Any]] = [[] for _ in states]
        for (j, _), result in zip(blocks, results, strict=True):
            found[j].append(result)
        return found

    def _named(self, run: int, state: State, ids: Any) -> dict[int, bytes]:
        """Return the names of the rows of these clients, without clients that keep nothing."""
        names = {}
        for u in ids.tolist():
            if u not in state.kept:
                continue
            if isinstance(state.kept, Rows):
                names[u] = state.kept.slot(u).name
                continue
            kept, name = self._names.get((run, u), (None, b""))
            if kept is not state.kept[u]:
                kept = state.kept[u]
                name = name_of(kept) if num_bytes(kept) else b""
                self._names[run, u] = kept, name
            if name:
                names[u] = name
        return names

    # ---- workers -----------------------------------------------------------------------------------------

    def _start(self) -> tuple[Any, list[Any]]:
        import ray

        actors: Any = ray.remote(num_cpus=1, num_gpus=self._gpus, max_restarts=0, max_task_retries=0)(BlockWorker)
        actor: Any = actors.remote(self._setup._replace(layers=self._layers[0]), *self._packed)
        return actor, [actor.alive.remote(), actor.started.remote()]

    def _greet(self, started: Started) -> None:
        """Raise ClusterError if a worker could not start, or runs other versions than this process."""
        refuse_others(started.host, self._ours, started.versions)
        if started.failed:
            raise ClusterError(f"a worker cannot start on {started.host}: {started.failed}")
        self._layers[:] = started.layers  # the other workers will use the same

    def _wanted(self) -> int:
        """Return the number of workers for which the cluster has room; the first one alone chooses the layers."""
        if self._gpus and not self._layers[0]:
            return 1
        return min(self._config.workers or sys.maxsize, max(1, room(self._gpus)))


class Store:
    """The large tensors of one round in the object store: one that several blocks use is there once."""

    def __init__(self, traffic: Traffic) -> None:
        # address -> the numbers, which keep it, and the reference; the oldest are forgotten, which frees them
        self._there: OrderedDict[int, tuple[Any, Any]] = OrderedDict()
        self._traffic = traffic

    def put(self, parts: Sequence[Any]) -> list[Any]:
        import ray

        arguments: list[Any] = []
        for part in parts:
            address = part.ctypes.data
            if len(part) < SHARED_BYTES:
                arguments.append(part)
            elif address in self._there and len(self._there[address][0]) == len(part):
                self._there.move_to_end(address)
                arguments.append(self._there[address][1])
                continue
            else:
                self._there[address] = part, ray.put(part)
                arguments.append(self._there[address][1])
                if len(self._there) > LATEST:
                    self._there.popitem(last=False)
            self._traffic.sent += len(part)
        return arguments


def prepare(problem: Problem) -> None:
    """Raise ClusterError if the run's cluster cannot be used, has too little room, or cannot be sent the problem."""
    join(problem.config)
    try:
        _words_of([problem])
    except BaseException:
        connect.Use().end()  # nobody will
        raise


def _note_idle(config: RunConfig, workers: int) -> None:
    """Say on stderr if a round has fewer blocks than there are workers."""
    blocks = -(-config.per_round // config.block)
    if blocks < workers and config.block > 1:
        note(
            f"ray: a round has {config.per_round} clients in {blocks} block{'s' * (blocks > 1)} of {config.block}, so "
            f"{workers - blocks} of {workers} workers have nothing to train; --block "
            f"{max(1, config.per_round // workers)} gives work to more"
        )


def join(config: RunConfig) -> float:
    """Connect to the run's cluster, or start one on this machine; return the share of a GPU for each worker.

    Raise ClusterError if there is no room for as many workers as are asked for.
    """
    on_gpu = config.device != "cpu"
    gpus, visible = 0, None
    if on_gpu:
        gpus = torch.cuda.device_count()
        if ":" in config.device:  # this one alone, by its number among those that this process sees
            number = int(config.device.partition(":")[2])
            names = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
            gpus, visible = 1, names[number] if names else str(number)
    cpus = max(num_cores(), config.workers if on_gpu else 0)
    connect.connect(config.cluster, cpus=cpus, gpus=gpus, visible=visible)
    asked, there = max(1, config.workers), connect.resources()
    each = 1.0 / max(1, -int(-asked // max(1.0, there.get("GPU", 0.0)))) if on_gpu else 0.0
    if room(each) < asked:
        needs = f"{asked} CPUs and {asked * each:g} GPUs" if on_gpu else f"{asked} CPUs"
        raise ClusterError(
            f"{asked} workers need {needs}, but the cluster has {there.get('CPU', 0.0):g} CPUs and "
            f"{there.get('GPU', 0.0):g} GPUs; use at most {room(each)} workers, or workers=0 to use what is there"
        )
    return each


def room(gpus_each: float) -> int:
    """Return the number of workers that fit on the cluster's machines."""
    there = connect.resources()
    rooms = [there.get("CPU", 0.0)] + ([there.get("GPU", 0.0) / gpus_each] if gpus_each else [])
    return int(min(rooms) + 1e-9)


def _packed(problems: Sequence[Problem]) -> Any:
    """Put the problems into the object store: without samples, and the samples, which workers read where they lie."""
    import ray

    words = _words_of(problems)
    samples = [problem.dataset._replace(groups=None, owners=None) for problem in problems]
    return ray.put(words.words), ray.put(words.parts), ray.put(pack(samples))


def _words_of(problems: Sequence[Problem]) -> Packed:
    """Pack the problems without samples, as workers have them: with the engine of their device, for one block."""
    bare = []
    for problem in problems:
        config, data = problem.config, problem.dataset
        empty = data._replace(x=data.x[:0], y=data.y[:0], groups=None, owners=None)
        config = replace(config, engine="auto", per_round=min(config.per_round, config.block))
        bare.append(problem._replace(dataset=empty, config=config))
    try:
        return pack(bare)
    except CannotPackError as error:
        raise ClusterError(_unpacked(problems[0], str(error))) from None


def _unpacked(problem: Problem, reason: str) -> str:
    """Return the message for an object of the user's own that cannot be sent to other processes."""
    names = []
    for name in OBJECTS:
        found = getattr(problem, "dataset" if name == "data" else name)
        try:
            pack(found)
        except CannotPackError as error:
            names.append(name)
            reason = str(error)
    which = " and ".join(names) or "an object of this run"
    option = names[0] if names else "method"
    return (
        f"{which} cannot be sent to the workers ({reason}); put it into a module that all machines have, and give it "
        f'by name: {option}="module:function"'
    )
