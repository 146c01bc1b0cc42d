"""status.json of a run: what its process last said of itself, for people who watch. No result depends on it.

    {"state": "running", "reason": "", "at": "2026-01-31T12:00:00+00:00", "pid": 4711,
     "machine": "5f0c1d2e", "memory": 812345678, "gpu_memory": 0}

``state`` is running, finished, failed or stopped. A process that is killed leaves "running"; the lock on the folder,
which ends with its process, tells the difference on the same machine. ``machine`` is a fingerprint that says whether
it is this one, and no name. Memory is in bytes: that of the process now, and the most that it held on its GPU.
"""

import contextlib
import hashlib
import json
import os
import platform
import struct
import sys
import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fedncv.files import parse, write_atomically
from fedncv.results import LOCK, STATUS

try:
    import fcntl
except ImportError:  # no POSIX system
    fcntl = None  # type: ignore[assignment]

OFTEN = 5.0  # seconds between two writes while rounds are finished
LARGEST = 65_536  # bytes that are read of the file
RUNNING, FINISHED, FAILED, STOPPED = "running", "finished", "failed", "stopped"
PLAIN = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # neither links nor waits for a pipe
# struct flock: type, whence, start, length, process
FLOCK = {"linux": "hhqqi", "darwin": "qqihh"}


class Beat(NamedTuple):
    state: str
    reason: str
    at: str
    pid: int
    machine: str
    memory: int
    gpu_memory: int


class Heart:
    """Writes status.json of a run that this process trains."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._next = folder, 0.0

    def beat(self) -> None:
        """Say that the run goes on, at most every ``OFTEN`` seconds."""
        if time.monotonic() >= self._next:
            self.say(RUNNING)

    def say(self, state: str, reason: str = "") -> None:
        self._next = time.monotonic() + OFTEN
        write(self._folder, state, reason)


def write(folder: Path, state: str, reason: str = "") -> None:
    """Replace status.json. A full disk or the like is no reason to stop a run, so it is ignored."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    found = Beat(state, reason, now, os.getpid(), this_machine(), _memory(), _gpu_memory())
    with contextlib.suppress(OSError, ValueError):
        write_atomically(folder / STATUS, json.dumps(found._asdict()).encode() + b"\n")


def read(folder: Path) -> Beat | None:
    """Return what status.json says; None if there is none, or it is damaged or a symbolic link."""
    try:
        descriptor = os.open(folder / STATUS, PLAIN)
        with open(descriptor, "rb") as file:
            found = parse(file.read(LARGEST))
        beat = Beat(**{name: found[name] for name in Beat._fields})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    kinds = Beat.__annotations__
    return beat if all(type(value) is kinds[name] for name, value in beat._asdict().items()) else None


def is_locked(folder: Path) -> bool | None:
    """Return whether another process trains the run; None if that cannot be told. It takes no lock.

    Do not call it in the process that trains the run: to close the file would release its lock.
    """
    form = FLOCK.get(sys.platform)
    if fcntl is None or form is None or struct.calcsize("l") != 8:
        return None
    kind = form.index("h")  # where the type of the lock is; a lock at 0 of length 0 is about the whole file
    asked = [fcntl.F_WRLCK if i == kind else 0 for i in range(len(form))]
    try:
        descriptor = os.open(folder / LOCK, PLAIN)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        found = struct.unpack(form, fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(form, *asked)))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return bool(found[kind] != fcntl.F_UNLCK)


@cache
def this_machine() -> str:
    """Return a fingerprint of this machine since its last start."""
    try:
        known = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        known = platform.node()
    return hashlib.sha256(known.encode()).hexdigest()[:8]


def _memory() -> int:
    """Return the bytes that this process holds in memory; 0 where the system does not tell it."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0


def _gpu_memory() -> int:
    """Return the most bytes that tensors of this process have taken on its GPU; 0 without one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.max_memory_allocated())
