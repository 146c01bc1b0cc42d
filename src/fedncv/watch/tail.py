"""Rows of a file that another process writes, each parsed once.

A look reads what was added since the last one. It starts again from the beginning if the file was replaced or became
shorter, or if the bytes before the place where it stopped are others. A last line without its end is left for later.
It takes no lock, follows no symbolic link and reads only ordinary files.
"""

import json
import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedncv.heartbeat import PLAIN

MOST = 1 << 24  # bytes that one look reads; a longer line is refused
CHECKED = 1 << 16  # bytes before the place where a look stopped that the next one compares

Parse = Callable[[Path, int, bytes], Any]  # path, number of the line, line -> row; None: no row; or ValueError
Cut = Callable[[Path, int, bytes], None]  # the same for a line that has no end yet


class Stamp(NamedTuple):
    """When two stamps of a file are equal, it has not changed."""

    device: int
    inode: int
    size: int
    changed: int


def stamp(path: Path) -> Stamp | None:
    """Return the stamp of a file; None if there is none. Raise ValueError if it is a link or no ordinary file."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        what = "a symbolic link, which watch does not follow" if stat.S_ISLNK(found.st_mode) else "not an ordinary file"
        raise ValueError(f"{path} is {what}")
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def open_plain(path: Path) -> int:
    """Return a descriptor of an ordinary file, also if somebody exchanges it for a link or a pipe at this moment."""
    try:
        return os.open(path, PLAIN)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def any_object(_path: Path, _number: int, line: bytes) -> Any:
    """Parse a line of a file whose damaged lines are passed over."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def any_cut(_path: Path, _number: int, _cut: bytes) -> None:
    """Accept every beginning of a line."""


class Tail:
    """The rows of one file."""

    def __init__(self, path: Path, parse: Parse = any_object, cut: Cut = any_cut) -> None:
        self.path, self._parse, self._cut = path, parse, cut
        self.rows: list[Any] = []
        self.error = ""
        """Why the file cannot be read to its end; the rows before that are there."""
        self.changed = 0.0
        """When the file was last written, in seconds since 1970; 0 if it does not exist."""
        self._seen: Stamp | None = None
        self._forget()

    def _forget(self) -> None:
        self.rows, self.error = [], ""
        self._offset = self._lines = 0
        self._length = self._check = 0  # of the bytes before the offset that are compared

    def look(self, *, again: bool = False) -> bool:
        """Read what is new; return whether anything changed. ``again`` reads everything."""
        before = (len(self.rows), self.error, self._seen)
        try:
            now = stamp(self.path)
            if now == self._seen and not again:
                return False
            if now is None:
                self._forget()
                self._seen, self.changed = None, 0.0
            else:
                self._read(now, again=again or bool(self.error))
        except ValueError as error:
            self._forget()
            self._seen, self.error = None, str(error)
        return before != (len(self.rows), self.error, self._seen)

    def _read(self, now: Stamp, *, again: bool) -> None:
        replaced = self._seen is not None and self._seen[:2] != now[:2]
        if again or replaced:
            self._forget()
        with open(open_plain(self.path), "rb") as file:
            begin = self._offset - self._length
            file.seek(begin)
            data = file.read(self._length + MOST)
            if zlib.crc32(data[: self._length]) != self._check:  # it is shorter, or a row is another one now
                self._forget()
                begin = 0
                file.seek(0)
                data = file.read(MOST)
        self.changed = now.changed / 1e9
        old = self._length
        *lines, cut = data[old:].split(b"\n")
        full = len(data) == old + MOST  # more may follow
        for line in lines:
            self._lines += 1
            try:
                row = self._parse(self.path, self._lines, line)
            except ValueError as error:
                self.error, self._seen = str(error), now
                return
            if row is not None:
                self.rows.append(row)
        if full and not lines:
            raise ValueError(f"{self.path}, line {self._lines + 1}, has more than {MOST:,} bytes")
        end = len(data) - len(cut)
        self._offset = begin + end
        self._length = min(CHECKED, self._offset - begin)
        self._check = zlib.crc32(data[end - self._length : end])
        self._seen = None if full else now
        if not full:
            try:
                self._cut(self.path, self._lines + 1, cut)
            except ValueError as error:
                self.error = str(error)
