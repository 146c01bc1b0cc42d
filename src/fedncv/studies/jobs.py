"""Train groups of runs in several processes: together they use a GPU better than one stack of a few seeds.

Each process reports its events to the parent, in order. Ctrl-C or SIGTERM stops every process as it stops a
single one: nothing is lost, and the same command resumes them.
"""

import contextlib
import multiprocessing
import queue
import signal
from collections import deque
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fedncv import termination
from fedncv.runner import OnRound, Watch, reasons, refused, run_group

PAUSE = 0.1  # seconds between two looks at the processes


class JobError(ValueError):
    """Some processes failed; the message gives the reason of each."""


def run_groups(groups: list[list[Path]], jobs: int, watch: Watch) -> None:
    """Train each group in its own process, ``jobs`` at a time. Raise JobError at the end if some failed."""
    context = multiprocessing.get_context("spawn")  # a fork would share the GPU's handles
    told: Any = context.Queue()
    waiting, failed = deque(groups), list[str]()
    running: dict[BaseProcess, list[Path]] = {}
    process: BaseProcess
    try:
        while waiting or running:
            termination.check()
            while waiting and len(running) < jobs:
                process = context.Process(target=_work, args=(waiting[0], told))
                process.start()
                running[process] = waiting.popleft()
            _listen(told, watch, failed)
            for process in [each for each in running if not each.is_alive()]:
                group = running.pop(process)
                if process.exitcode:
                    failed.append(f"the process that ran {group[0].name} ended with code {process.exitcode}")
        _listen(told, watch, failed)
    except BaseException:
        for process in running:
            process.terminate()
        while any(process.is_alive() for process in running):
            with contextlib.suppress(queue.Empty):  # a process ends only after its events were read
                told.get(timeout=PAUSE)
        raise
    if failed:
        raise JobError("; ".join(failed))


def _listen(told: Any, watch: Watch, failed: list[str]) -> None:
    """Pass on all events that have arrived."""
    while True:
        try:
            name, *given = told.get(timeout=PAUSE)
        except queue.Empty:
            return
        if name == "failed":
            failed.append(given[0])
        else:
            getattr(watch, name)(*given)


def _work(group: list[Path], told: Any) -> None:
    work(group, Teller(told.put))


def work(group: list[Path], tell: "Teller", on_round: OnRound | None = None) -> bool:
    """Train a group in a process of its own and report; return whether it ended, and False if SIGTERM stopped it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the parent terminates them
    signal.signal(signal.SIGTERM, tell.terminate)
    watch = Watch(
        begin=lambda folders, rounds: tell("begin", folders, rounds),
        row=lambda folder, row: tell("row", folder, row),
        fail=lambda folder, reason: tell("fail", folder, reason),
        end=lambda folders: tell("end", folders),
    )
    try:
        for reason in reasons(refused(run_group(group, watch, on_round))):
            tell("failed", reason)
    except termination.Terminated:
        return False
    except Exception as error:
        tell("failed", f"{group[0].name}: {error}")
    return True


class Teller:
    """Sends events. SIGTERM waits until an event is sent: one that is sent by half would block the queue for all."""

    def __init__(self, put: Callable[[Any], object]) -> None:
        self._put, self._sends = put, False

    def __call__(self, *event: Any) -> None:
        self._sends = True
        self._put(event)
        self._sends = False

    def terminate(self, signal_: int, frame: Any) -> None:
        (termination.note if self._sends else termination.terminate)(signal_, frame)
