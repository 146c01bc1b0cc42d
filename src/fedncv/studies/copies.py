"""Copies of a run's folder: on a worker that does not see the study's folder, the run trains in a copy of it.

A copy is read between two rounds, when its files agree with each other, and is written such that a crash at any moment
leaves a folder that can be resumed.
"""

import time
from collections.abc import Callable
from pathlib import Path

from fedncv.results import LOCK, METRICS, STATE
from fedncv.runner import LiveRun, Row
from fedncv.store import write_atomically
from fedncv.studies.group_job import Files

ROWS = "rows-"  # begins the names of files with clients' rows
SHARE = 20  # of the time, copies take at most one part in so many


def read_files(folder: Path) -> Files:
    """Return all files of a run, but not the lock and what was being written when a process died."""
    names = (path.name for path in folder.iterdir() if path.is_file())
    return {name: (folder / name).read_bytes() for name in names if name != LOCK and not name.endswith(".new")}


def write_files(folder: Path, files: Files) -> None:
    """Write a later copy over an earlier one. The checkpoint, which refers to the others, is written last.

    Rows are found by their names, wherever they are in their file. While the earlier checkpoint is there, the file
    holds its rows as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = {name: data for name, data in files.items() if name.startswith(ROWS)}
    for name, data in rows.items():
        before = (folder / name).read_bytes() if (folder / name).exists() else b""
        write_atomically(folder / name, data + before, name="rows")
    late = [name for name in (METRICS, STATE) if name in files]
    for name in [*(name for name in files if name not in rows and name not in late), *late]:
        write_atomically(folder / name, files[name], name=f"copy of {name}")
    for name, data in rows.items():
        write_atomically(folder / name, data, name="rows")


class Copier:
    """Sends copies of the runs of a group, all of the same round, every so many seconds and at the end."""

    def __init__(self, folders: list[Path], seconds: float, send: Callable[[dict[int, Files]], object]) -> None:
        self._numbers = {folder: i for i, folder in enumerate(folders)}
        self._seconds, self._send = seconds, send
        self._sent: dict[Path, Files] = {folder: read_files(folder) for folder in folders}
        self._waiting: dict[int, Files] = {}
        self._together = len(folders)
        self._round, self._due = -1, False
        self._last, self._took = time.monotonic(), 0.0

    def begin(self, together: int) -> None:
        """So many runs train together from now on."""
        self._flush()
        self._together, self._round = together, -1

    def on_round(self, run: LiveRun, row: Row) -> None:
        """Copy the run if it is time; the copies leave when all runs have finished the round."""
        began = time.monotonic()
        if row["round"] != self._round:  # some of the last round's may have diverged
            self._flush()
            self._due = began - self._last >= max(self._seconds, SHARE * self._took)
            self._round, self._took = row["round"], 0.0 if self._due else self._took
        if not self._due or run.folder is None:
            return
        run.checkpoint()
        self._copy(run.folder)
        if len(self._waiting) == self._together:
            self._flush()
        self._last = time.monotonic()
        self._took += self._last - began

    def close(self) -> None:
        """Send what all runs have left."""
        for folder in self._numbers:
            self._copy(folder)
        self._flush()

    def _copy(self, folder: Path) -> None:
        files = read_files(folder)
        before = self._sent.get(folder, {})
        self._waiting[self._numbers[folder]] = {n: data for n, data in files.items() if before.get(n) != data}
        self._sent[folder] = {name: data for name, data in files.items() if not name.startswith(ROWS)}

    def _flush(self) -> None:
        found = {i: files for i, files in self._waiting.items() if files}
        self._waiting = {}
        if found:
            self._send(found)
