"""A worker of a study's cluster: it starts a process for each group, and passes on what that reports.

The process can fork, load a GPU and be killed, while the worker stays free to answer. It is an ordinary class, which
Ray makes an actor of.
"""

import contextlib
import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedncv.cluster.connect import ours
from fedncv.machine import CORES
from fedncv.studies.group_job import Answer, CheckJob, CostJob, Setup, Started, TrainJob

BEAT = 1.0  # seconds after which a worker answers, even if nothing has happened
GATHER = 0.1  # seconds for which further events are waited for
LOOK = 15.0  # seconds between looks at the processor time of a group
LEAST = 0.5  # seconds of processor time that a group needs between them, to be alive
PROGRAM = "from fedncv.studies.group_process import main; main()"


class GroupWorker:
    """Runs one group at a time."""

    def __init__(self, setup: Setup, node: Callable[[], str]) -> None:
        self._setup, self._node = setup, node
        self._process: Process | None = None
        self._root = ""

    def alive(self) -> None:
        """Return at once: this process has a place."""

    def started(self) -> Started:
        """Check the machine, if it has joined after the study began."""
        failed = "" if self._node() in self._setup.checked else check(self._setup)
        return Started(socket.gethostname(), ours(), failed)

    def sees(self) -> bool:
        """Return whether the worker sees the study's folder."""
        return sees(self._setup)

    def begin(self, job: TrainJob) -> Answer:
        """Start a group, if the files are here or sent with it."""
        if job.files is None and not self.sees():
            return Answer(needs_files=True)
        if job.files is not None:
            self._root = tempfile.mkdtemp(prefix="fedncv-group-")
        self._process = Process(job._replace(root=self._root), self._setup)
        return self.go_on()

    def go_on(self) -> Answer:
        """Return what has happened, after ``BEAT`` seconds at the latest."""
        assert self._process is not None
        events = self._process.events()
        over = any(event[0] in ("over", "stopped") for event in events)
        reason = "" if over else self._process.lost()
        if over or reason:
            self._close()
        if any(event[0] == "stopped" for event in events):
            reason = "it was told to end"
        return Answer(events, ended=over and not reason, lost=reason)

    def stop(self, seconds: float) -> Answer:
        """End the group with a checkpoint, and return what had not been returned."""
        if self._process is None:
            return Answer()
        events, until = [], time.monotonic() + seconds
        self._process.terminate()
        while time.monotonic() < until and not self._process.lost():
            events += self._process.events()
            if any(event[0] in ("over", "stopped") for event in events):
                break
        self._close()
        return Answer(events)

    def _close(self) -> None:
        assert self._process is not None
        self._process.close()
        shutil.rmtree(self._root, ignore_errors=True)
        self._process, self._root = None, ""


def sees(setup: Setup) -> bool:
    path, content = setup.token
    try:
        return bool(path) and Path(path).read_text() == content
    except OSError:
        return False


def check(setup: Setup) -> str:
    """Return why the study cannot be trained on this machine; empty if it can."""
    return str(_asked(setup.check, setup, "unfit"))


def calibrated(job: CostJob, setup: Setup) -> Any:
    """Return ``costs`` on this machine."""
    return _asked(job, setup, "costs")


def _asked(job: CheckJob | CostJob, setup: Setup, name: str) -> Any:
    process = Process(job, setup)
    try:
        while True:
            for event in process.events():
                if event[0] == name:
                    return event[1]
            if reason := process.lost():
                raise RuntimeError(reason)
    finally:
        process.close()


class Process:
    """A process that does a job and sends events. It leads a session, so that all that it starts can be ended."""

    def __init__(self, job: TrainJob | CheckJob | CostJob, setup: Setup) -> None:
        path = [each or os.getcwd() for each in sys.path] + [each for each in setup.path if os.path.isdir(each)]
        variables = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), CORES: str(setup.cores)}
        if setup.data:
            variables["FEDNCV_DATA"] = os.environ.get("FEDNCV_DATA") or setup.data
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
            env=os.environ | variables, start_new_session=True,
        )  # fmt: skip
        self._told: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self._ended = False  # all its events were returned
        self._read = 0  # bytes of what it has said
        self._hung_seconds = setup.hung_seconds
        self._alive, self._looked, self._used = time.monotonic(), time.monotonic(), 0.0
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once, and ``lost`` says so
            pickle.dump(job, self._process.stdin)
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(EOFError, pickle.UnpicklingError, OSError, ValueError):
            while True:
                self._told.put(pickle.load(self._process.stdout))
        self._told.put(None)  # there will be no more

    def events(self) -> list[Any]:
        """Return the events of about a second; sooner if there are some."""
        found: list[Any] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._told.get(timeout=BEAT))
            until = time.monotonic() + GATHER
            while found[-1] is not None:
                found.append(self._told.get(timeout=max(0.0, until - time.monotonic())))
        if found and found[-1] is None:
            found.pop()
            self._ended = True
        if found:
            self._alive = time.monotonic()
        return found + self._lines()

    def _lines(self) -> list[Any]:
        """Return what it has written for people since the last look."""
        self._said.seek(self._read)
        text = self._said.read()
        self._read += len(text)
        return [("said", text.decode(errors="replace"))] if text else []

    def lost(self) -> str:
        """Return why the process ended or must end; empty while it works."""
        code = self._process.poll()
        if code is not None:
            self._kill()  # what it has forked would keep the pipe open
        if code is not None and self._ended:
            killed = " (killed, usually because memory was short)" if code == -signal.SIGKILL else ""
            return f"its process ended with code {code}{killed}{self._last_line()}"
        if code is None and self._is_hung():
            return f"it has computed nothing for {self._hung_seconds:g} s"
        return ""

    def _last_line(self) -> str:
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - 2000))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def _is_hung(self) -> bool:
        """Return whether there was no event and no use of a processor for long: one that waits for a GPU uses one."""
        now = time.monotonic()
        if now - self._looked >= min(LOOK, self._hung_seconds / 4):
            used = _processor_seconds(self._process.pid)
            if used is None or used - self._used >= LEAST * (now - self._looked) / LOOK:
                self._alive = now
            self._looked, self._used = now, used or 0.0
        return now - self._alive > self._hung_seconds

    def terminate(self) -> None:
        self._process.terminate()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End all processes of the session, and forget them."""
        self._kill()
        self._process.wait()
        for file in (self._process.stdin, self._said):
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()


def _processor_seconds(session: int) -> float | None:
    """Return the processor time of the live processes of a session; None where the system does not tell it."""
    ticks, found = 0, False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = path.read_text().rpartition(")")[2].split()
            if int(words[3]) == session:
                ticks, found = ticks + int(words[11]) + int(words[12]) + int(words[13]) + int(words[14]), True
    return ticks / os.sysconf("SC_CLK_TCK") if found else None
