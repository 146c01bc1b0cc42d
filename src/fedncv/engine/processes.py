"""Train clients in several processes of one machine, with the same bits as the sequential engine.

Workers are forked, so they share the data's memory with the parent; messages go through pipes. The clients that will
take longest go first. A worker that dies (killed, out of memory) is replaced and its client is run again, which
changes nothing: training is a function of the message and the keys.
"""

import copy
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from fedncv.engine.evaluate import score_after, score_before, shared_model, summary, summary_before
from fedncv.engine.gradients import Gradients, collected, of_client
from fedncv.engine.local import train
from fedncv.engine.pipes import Known, Place, receive, repeated, send
from fedncv.engine.problem import Arrival, DivergedError, Problem, Settled, State, arrivals
from fedncv.engine.round import Draw, Outcome, draw, outcome, settle
from fedncv.machine import num_cores
from fedncv.notes import note

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
TRIES = 3  # deaths of the worker of one client before the run stops


class Job(NamedTuple):
    """Work for one client, in any process that holds the problems."""

    kind: Literal["train", "before", "after", "gradients"]
    run: int
    round: int
    arrival: Arrival
    share: float = 1.0
    shared_P: Tensor | None = None


class WorkerError(ValueError):
    """A worker failed; the message says why."""


def can_fork() -> bool:
    return sys.platform.startswith("linux") and hasattr(os, "fork")


def work(problems: Sequence[Problem], job: Job) -> Any:
    """Run one job and return its result."""
    problem = problems[job.run].at(job.round)
    if job.kind == "before":
        return score_before(problem, job.round, job.arrival, job.shared_P)
    if job.kind == "after":
        return score_after(problem, job.round, job.arrival)
    if job.kind == "gradients":
        return of_client(problem, job.round, job.arrival)
    done = outcome(problem, job.arrival, train(problem, job.round, job.arrival, share=job.share))
    if done.trained is None:
        return done
    return done._replace(trained=done.trained._replace(y_P=done.trained.y_P[:0]))  # the model itself is not needed


class Worker:
    """One forked process and the pipe to it."""

    def __init__(self, problems: Sequence[Problem], others: list[Connection]) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        inherited = [*others, self.connection]
        self.process = context.Process(target=_serve, args=(problems, theirs, inherited), daemon=True)
        with warnings.catch_warnings():  # Python 3.12 warns about threads; a worker does not use the parent's
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()
        self.job: int | None = None
        self.known: Known = {}

    def stop(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


class ProcessesEngine:
    """Run clients in a pool of worker processes; ``close`` it, or use it in a ``with`` block."""

    name = "processes"
    why = ""

    def __init__(self, problems: Sequence[Problem], *, workers: int | None = None) -> None:
        self.problems = list(problems)
        self._pool = Pool(self.problems, workers or num_cores())
        self._places = list(range(len(self.problems)))  # index of each run among those that the workers hold

    def __enter__(self) -> "ProcessesEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid or 0 for worker in self._pool.workers]

    @property
    def layers(self) -> list[str]:
        return [problem.layers for problem in self.problems]

    def only(self, runs: Sequence[int]) -> Self:
        """Return an engine for some of the runs, with the same workers."""
        other = copy.copy(self)
        other.problems = [self.problems[j] for j in runs]
        other._places = [self._places[j] for j in runs]
        return other

    def close(self) -> None:
        self._pool.close()

    def run_rounds(self, states: Sequence[State], drawn: Sequence[Draw] | None = None) -> list[Settled]:
        """Run one round of every run; return the error of a run that diverged, and continue the others."""
        problems = self._at(states)
        drawn = drawn or [draw(problem, state.round) for problem, state in zip(problems, states, strict=True)]
        arrived = [list(arrivals(p, s, d.ids)) for p, s, d in zip(problems, states, drawn, strict=True)]
        jobs = [
            Job("train", self._places[j], states[j].round, arrival, drawn[j].shares[i])
            for j, here in enumerate(arrived)
            for i, arrival in enumerate(here)
            if drawn[j].answers[i]
        ]
        results: list[Outcome] = self._pool.map(jobs)
        done = {(job.run, result.client): result for job, result in zip(jobs, results, strict=True)}
        settled: list[Settled] = []
        for j, (problem, state) in enumerate(zip(problems, states, strict=True)):
            place = self._places[j]
            outcomes = [done.get((place, each.client)) or outcome(problem, each, None) for each in arrived[j]]
            try:
                settled.append(settle(problem, state, drawn[j], outcomes))
            except DivergedError as error:
                settled.append(error)
        return settled

    def before(self, states: Sequence[State]) -> list[dict[str, Any]]:
        shared = [shared_model(p, s) for p, s in zip(self.problems, states, strict=True)]
        scored = self._scores("before", states, shared)
        return [
            summary_before(problem, each, shared=x_P is not None)
            for problem, x_P, each in zip(self.problems, shared, scored, strict=True)
        ]

    def after(self, states: Sequence[State]) -> list[dict[str, Any]]:
        scored = self._scores("after", states, [None] * len(states))
        return [summary(problem, "after", each) for problem, each in zip(self.problems, scored, strict=True)]

    def gradients(self, states: Sequence[State]) -> Iterator[Gradients]:
        return (self._gradients(j, problem, states[j]) for j, problem in enumerate(self._at(states)))

    def _gradients(self, j: int, problem: Problem, state: State) -> Gradients:
        holders = problem.holders
        jobs = [
            Job("gradients", self._places[j], state.round, arrival) for arrival in arrivals(problem, state, holders)
        ]
        return collected(problem, self._pool.map(jobs))

    def _scores(
        self, kind: Literal["before", "after"], states: Sequence[State], shared: Sequence[Tensor | None]
    ) -> list[dict[int, Any]]:
        """Return the results of the clients that are scored, run by run."""
        jobs = [
            Job(kind, self._places[j], state.round, arrival, shared_P=shared[j])
            for j, (problem, state) in enumerate(zip(self._at(states), states, strict=True))
            for arrival in arrivals(problem.in_use, state, problem.scored)
        ]
        scored: dict[int, dict[int, Any]] = {place: {} for place in self._places}
        for job, result in zip(jobs, self._pool.map(jobs), strict=True):
            scored[job.run][job.arrival.client] = result
        return list(scored.values())

    def _at(self, states: Sequence[State]) -> list[Problem]:
        """Return the problems as they are in this round."""
        return [problem.at(state.round) for problem, state in zip(self.problems, states, strict=True)]


def num_samples(problem: Problem, job: Job) -> float:
    """Return the samples that the job's client goes through, once."""
    clients, u = problem.clients, job.arrival.client
    return len(clients.test[u]) if job.kind == "before" else job.share * len(clients.train[u])


class Pace:
    """Seconds per sample of each client in each kind of job, as last measured."""

    def __init__(self) -> None:
        self._clients: dict[tuple[str, int, int], float] = {}
        self._runs: dict[tuple[str, int], float] = {}  # for clients that were not measured yet

    def record(self, job: Job, samples: float, seconds: float) -> None:
        if samples:
            pace = seconds / samples
            self._clients[job.kind, job.run, job.arrival.client] = self._runs[job.kind, job.run] = pace

    def expected(self, job: Job, samples: float) -> float:
        """Return the seconds of the job; before anything is measured, its samples."""
        of_run = self._runs.get((job.kind, job.run), 1.0)
        return samples * self._clients.get((job.kind, job.run, job.arrival.client), of_run)


class Pool:
    """The workers, each with all problems."""

    def __init__(self, problems: Sequence[Problem], num_workers: int) -> None:
        self.workers: list[Worker] = []
        self._problems, self._num_workers = list(problems), num_workers
        self._pace = Pace()
        self._start()

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()
        self.workers = []

    def _start(self, again: Iterable[Place] = ()) -> None:
        while len(self.workers) < self._num_workers:
            worker = Worker(self._problems, [worker.connection for worker in self.workers])
            worker.known = dict.fromkeys(again)
            self.workers.append(worker)

    def map(self, jobs: list[Job]) -> list[Any]:
        """Return the result of every job, in their order; those that will take longest start first."""
        at = {(run, t): self._problems[run].at(t) for run, t in {(job.run, job.round) for job in jobs}}
        samples = [num_samples(at[job.run, job.round], job) for job in jobs]
        expected = [self._pace.expected(job, each) for job, each in zip(jobs, samples, strict=True)]
        waiting = sorted(range(len(jobs)), key=lambda i: expected[i])  # taken from the end
        results: list[Any] = [None] * len(jobs)
        deaths = [0] * len(jobs)
        left, again = len(jobs), repeated(jobs)
        for worker in self.workers:
            worker.known = dict.fromkeys(again)
        while left:
            self._start(again)
            for worker in list(self.workers):  # a copy: a dead worker is removed from the list
                if worker.job is None and waiting:
                    worker.job = waiting.pop()
                    if not _sent(worker, jobs[worker.job]):
                        self._bury(worker, jobs, deaths, waiting)
            busy = [worker for worker in self.workers if worker.job is not None]
            ready = set(wait([worker.connection for worker in busy])) if busy else set()
            for worker in busy:
                if worker.connection not in ready or worker.job is None:
                    continue
                try:
                    failed, seconds, result = receive(worker.connection)
                except (EOFError, OSError):
                    self._bury(worker, jobs, deaths, waiting)
                    continue
                if failed:
                    self.close()
                    raise result
                results[worker.job] = result
                self._pace.record(jobs[worker.job], samples[worker.job], seconds)
                worker.job = None
                left -= 1
        return results

    def _bury(self, worker: Worker, jobs: list[Job], deaths: list[int], waiting: list[int]) -> None:
        """Remove a dead worker, and queue its client to run first."""
        i = worker.job
        assert i is not None
        worker.stop()
        self.workers.remove(worker)
        deaths[i] += 1
        client = jobs[i].arrival.client
        if deaths[i] == TRIES:
            self.close()
            raise WorkerError(
                f"the worker that trained client {client} died {TRIES} times (exit code {worker.process.exitcode}; "
                "-9 often means out of memory); use engine=sequential to see why"
            )
        note(f"processes: a worker died at client {client}; running the client again")
        waiting.append(i)


def _sent(worker: Worker, job: Job) -> bool:
    try:
        send(worker.connection, job, worker.known)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _serve(problems: Sequence[Problem], connection: Connection, inherited: list[Connection]) -> None:
    """Serve jobs until the pipe closes, which happens when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # and has a handler of its own
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
    _keep_memory()
    memory: list[Tensor] = []  # of the tensors that several jobs share
    while True:
        try:
            job = receive(connection, memory)
        except (EOFError, OSError):
            return
        began = time.process_time()
        try:
            result = work(problems, job)
        except Exception as error:  # the parent raises it again
            send(connection, (True, 0.0, _portable(error)))
            continue
        send(connection, (False, time.process_time() - began, result))


def _keep_memory() -> None:
    """Let this process keep what it frees: the pages of a large model's vectors are otherwise new at every step.

    With glibc; a ResNet-18 had 60,000 page faults per step, a tenth of its time.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return WorkerError(f"{type(error).__name__}: {error}")
    return error
