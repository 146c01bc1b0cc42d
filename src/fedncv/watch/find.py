"""Find the runs in and below a folder, again only if a folder has changed. Symbolic links are not followed."""

import os
import stat
from pathlib import Path
from typing import NamedTuple

from fedncv.report.gather import DEPTH
from fedncv.results import CONFIG

MOST = 20_000  # folders that are looked into


class Found(NamedTuple):
    runs: list[Path]
    links: int  # symbolic links to folders, which were passed over
    more: bool  # whether there are more folders than ``MOST``


class Finder:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[Path, tuple[int, int]] = {}  # folders that are no runs: inode, and when they were changed
        self._found = Found([], 0, False)

    def look(self) -> Found:
        """Return the runs; only stamps are read if no folder has changed. Raise ValueError if the root is gone."""
        if not self._seen or any(_stamp(folder) != seen for folder, seen in self._seen.items()):
            self._seen = {}
            self._found = self._walk()
        return self._found

    def _walk(self) -> Found:
        if _stamp(self._root) is None:
            raise ValueError(f"there is no folder {self._root} any more")
        runs: list[Path] = []
        links, waiting = 0, [(self._root, 0)]
        while waiting and len(self._seen) < MOST:
            folder, depth = waiting.pop()
            seen, inner, is_run = _stamp(folder), [], False
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        is_run = is_run or entry.name == CONFIG
                        if entry.name.startswith("."):
                            continue
                        if entry.is_dir(follow_symlinks=False):
                            inner.append((Path(entry.path), depth + 1))
                        elif entry.is_symlink() and entry.is_dir():
                            links += 1
            except OSError:  # deleted at this moment, or not ours to read
                continue
            if is_run:
                runs.append(folder)
            elif seen is not None:
                self._seen[folder] = seen
                waiting += inner if depth < DEPTH else []
        return Found(sorted(runs), links, bool(waiting))


def _stamp(folder: Path) -> tuple[int, int] | None:
    """Return inode and time of change; None if it is no folder. The root itself may be a link: it was named."""
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns) if stat.S_ISDIR(found.st_mode) else None
