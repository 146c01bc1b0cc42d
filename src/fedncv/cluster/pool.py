"""Run tasks on Ray actors of which any may die, hang, disappear or be added, with the same results in any case.

A task is run by one worker at a time; tasks that will take longest start first. If its worker dies, the task is run
again, up to ``TRIES`` times. A worker that takes far longer than expected is taken for hung and is killed. Workers
that are lost are replaced where there is room, and new ones start when machines join.

A task must be a function of its own arguments, because it may run several times.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from fedncv import termination
from fedncv.cluster.connect import ClusterError, reason_of
from fedncv.notes import note

TRIES = 3  # deaths of the worker of one task before the work stops
LOOK = 4  # of the longest tasks that wait, a worker may take the one whose data it has
HUNG_FACTOR, HUNG_FLOOR = 20.0, 120.0  # a task is hung after so many times its expected seconds, and at least so many
NOBODY_SECONDS = 120.0  # without a single worker, before the work stops
AHEAD = 2  # tasks that a worker has at a time, while enough wait: it starts the next one without waiting for us
TICK = 1.0  # seconds between looks at the clock and the cluster


class Task(NamedTuple):
    """Work for any worker."""

    words: str  # for people: clients 3 to 17
    size: float  # proportional to its time
    pace: Any = ""  # tasks of one pace take the same time for the same size
    beat: float = 0.0  # seconds in which each of its many answers is due; 0: its time tells when it is hung


class Died(NamedTuple):
    """Result of a call to a worker that is gone."""

    reason: str


@dataclass
class Call:
    """A task that a worker has."""

    task: int
    answer: Any
    began: float


@dataclass
class Worker:
    """An actor, and what it does now."""

    number: int
    actor: Any
    starting: list[Any]  # references to the answers that are still to come before it is ready
    placed: bool = False  # a machine has room for it
    calls: list[Call] = field(default_factory=list)  # it runs the first one
    data: dict[Any, bytes] = field(default_factory=dict)  # what the caller believes that it has


class Pool:
    """Workers of one kind."""

    def __init__(
        self, start: Callable[[], tuple[Any, list[Any]]], wanted: Callable[[], int], greet: Callable[[Any], None]
    ) -> None:
        """``start`` returns an actor and references to its first two answers: that it lives, and that it is ready.

        ``greet`` receives or refuses the second one.

        ``wanted`` is the number of workers for which there is room now.
        """
        self.workers: list[Worker] = []
        self._start, self._wanted, self._greet = start, wanted, greet
        self._failed_starts = 0
        self._numbers = itertools.count()
        self._seconds: dict[Any, float] = {}  # per size, of each pace
        self._looked = 0.0
        self._nobody_since = time.monotonic()

    def close(self) -> None:
        """Kill all workers."""
        for worker in list(self.workers):
            self._remove(worker)

    def expected(self, task: Task) -> float:
        """Return the seconds of a task as far as they were measured; before that, its size."""
        return task.size * self._seconds.get(task.pace, 1.0)

    def wait(self) -> None:
        """Wait for one worker that is ready."""
        with termination.noting() as check:
            while True:
                check()
                self._fill()
                if any(not worker.starting for worker in self.workers):
                    return
                self._check_somebody()
                self._receive([])

    def map(
        self,
        tasks: Sequence[Task],
        submit: Callable[[Worker, int], Any],
        take: Callable[[Worker, int, Any], Any],
        *,
        holds: Callable[[Worker, int], int] = lambda _worker, _i: 0,
        lost: Callable[[int, str], bool] | None = None,
        ahead: int = AHEAD,
    ) -> None:
        """Run all tasks. ``submit`` sends task i to a worker and returns a reference to its answer.

        ``take`` receives the answer. If it returns a new reference, the worker goes on with this task; otherwise the
        task is done. ``holds`` says how much of the data of task i a worker already has; it never changes a result.
        ``lost`` is told that the worker of task i was lost, and returns whether to run the task again; without it the
        third loss ends the work.
        """
        waiting = sorted(range(len(tasks)), key=lambda i: self.expected(tasks[i]))  # taken from the end
        deaths = [0] * len(tasks)
        left = len(tasks)
        with termination.noting() as check:
            while left:
                check()
                self._fill()
                for depth in range(ahead):
                    for worker in self.workers:
                        enough = waiting if depth == 0 else len(waiting) >= len(self.workers)
                        if enough and not worker.starting and len(worker.calls) == depth:
                            i = max(waiting[: -LOOK - 1 : -1], key=partial(holds, worker))
                            waiting.remove(i)
                            worker.calls.append(Call(i, submit(worker, i), time.monotonic()))
                self._check_somebody()
                for worker, answer in self._receive(tasks, deaths):
                    call = worker.calls[0]
                    if isinstance(answer, Died):
                        waiting += [each.task for each in reversed(worker.calls)]
                        if lost is None:
                            self._retry(call.task, tasks, deaths, answer.reason)
                        elif not lost(call.task, answer.reason):
                            waiting.remove(call.task)
                            left -= 1
                        continue
                    again = take(worker, call.task, answer)
                    if again is not None:
                        call.answer, call.began = again, time.monotonic()
                        continue
                    left -= 1
                    del worker.calls[0]
                    now, task = time.monotonic(), tasks[call.task]
                    if task.size:
                        self._seconds[task.pace] = (now - call.began) / task.size
                    for each in worker.calls[:1]:
                        each.began = now

    def _retry(self, i: int, tasks: Sequence[Task], deaths: list[int], reason: str) -> None:
        deaths[i] += 1
        if deaths[i] == TRIES:
            self.close()
            raise ClusterError(
                f"the worker of {tasks[i].words} was lost {TRIES} times (the last time: {reason}); nothing is lost: "
                'resume the run. With engine="sequential" in its config.toml, one process may show the cause'
            )
        note(f"ray: a worker was lost ({reason}); running {tasks[i].words} again")

    def _receive(self, tasks: Sequence[Task], deaths: Sequence[int] = ()) -> list[tuple[Worker, Any]]:
        """Return the answers that arrive within a tick, and ``Died`` for workers that are lost while they work."""
        import ray

        calls = {worker.starting[0]: worker for worker in self.workers if worker.starting}
        calls |= {worker.calls[0].answer: worker for worker in self.workers if worker.calls}
        if not calls:
            time.sleep(TICK / 10)
            return []
        arrived, _ = ray.wait(list(calls), num_returns=1, timeout=TICK)
        if arrived:  # and all others that are there too
            arrived, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        found: list[tuple[Worker, Any]] = []
        for reference in arrived:
            worker = calls[reference]
            try:
                answer = ray.get(reference)
            except ray.exceptions.RayTaskError as error:  # of our own code: the worker returns all other errors
                self.close()
                raise ClusterError(f"a worker failed: {str(error).strip().splitlines()[-1]}") from None
            except ray.exceptions.RayError as error:
                self._remove(worker)
                answer = Died(reason_of(error))
                if worker.starting:  # nothing is lost, but a worker that cannot start may never start
                    self._cannot_start(answer.reason)
                    continue
            if worker.starting:
                worker.placed = True
                del worker.starting[0]
                if not worker.starting:
                    self._failed_starts = 0
                    self._greet(answer)
                continue
            found.append((worker, answer))
        return found + self._hung(tasks, deaths, arrived)

    def _hung(self, tasks: Sequence[Task], deaths: Sequence[int], arrived: Sequence[Any]) -> list[tuple[Worker, Died]]:
        """Kill the workers whose task takes far longer than expected; a task that was tried before gets twice as long.

        Nothing is known about the time of a task before the first one of its pace is done.
        """
        found = []
        for worker in list(self.workers):
            if not worker.calls or worker.calls[0].answer in arrived:
                continue
            call = worker.calls[0]
            beat = tasks[call.task].beat
            if not beat and tasks[call.task].pace not in self._seconds:
                continue
            most = beat or max(HUNG_FLOOR, HUNG_FACTOR * self.expected(tasks[call.task])) * 2 ** deaths[call.task]
            if time.monotonic() - call.began > most:
                self._remove(worker)
                found.append((worker, Died(f"no answer for {most:.3g} s")))
        return found

    def _remove(self, worker: Worker) -> None:
        import ray

        self.workers.remove(worker)
        if ray.is_initialized():
            ray.kill(worker.actor, no_restart=True)

    def _fill(self) -> None:
        """Start workers where there is room; look at most every tick."""
        if self.workers and time.monotonic() - self._looked < TICK:
            return
        self._looked = time.monotonic()
        for _ in range(self._wanted() - len(self.workers)):
            self.workers.append(Worker(next(self._numbers), *self._start()))

    def _cannot_start(self, reason: str) -> None:
        self._failed_starts += 1
        if self._failed_starts == TRIES:
            self.close()
            raise ClusterError(f"workers cannot start: {reason}")

    def _check_somebody(self) -> None:
        """Raise ClusterError if there has been no worker for long, because no machine has room for one."""
        if any(worker.placed for worker in self.workers):
            self._nobody_since = time.monotonic()
        elif time.monotonic() - self._nobody_since > NOBODY_SECONDS:
            self.close()
            raise ClusterError(
                f"no machine of the cluster has had room for a worker for {NOBODY_SECONDS:g} s; machines are gone, or "
                "other programs use them. Resume when there is room"
            )
