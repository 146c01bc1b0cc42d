"""What differs between operating systems: locks of files, the size of the memory, and what only POSIX systems have.

fedncv is developed and tested on Linux. On Windows a simulation needs nothing that is missing there, except state of
clients on disk; a federation and a Ray cluster do, and are refused in one line.
"""

import errno
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class LockedError(ValueError):
    """Another process holds the lock."""


def lock(descriptor: int) -> None:
    """Lock an open file until it is closed or this process ends, even by a crash. Raise LockedError if it is locked.

    On POSIX systems a record lock, which forked workers do not inherit.
    """
    try:
        if fcntl is not None:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            _lock_on_windows(descriptor)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        raise LockedError("another process holds the lock") from None


def _lock_on_windows(descriptor: int) -> None:
    import msvcrt

    os.lseek(descriptor, 0, os.SEEK_SET)  # the first byte, which need not exist
    msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk. Windows opens no folder, and keeps its names by itself."""
    if fcntl is None:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def memory_bytes() -> int:
    """Return the size of this machine's memory."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _windows_memory_bytes()


def _windows_memory_bytes() -> int:
    import ctypes

    class Status(ctypes.Structure):
        """MEMORYSTATUSEX of the Windows API: two 32-bit and seven 64-bit numbers; ``total`` is the physical memory."""

        _fields_ = [
            ("length", ctypes.c_uint32), ("load", ctypes.c_uint32), ("total", ctypes.c_uint64),
            ("others", ctypes.c_uint64 * 6),
        ]  # fmt: skip

    status = Status(length=ctypes.sizeof(Status))
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):  # type: ignore[attr-defined, unused-ignore]
        raise OSError("Windows does not tell the size of the memory")
    return int(status.total)


def need_posix(what: str, *, remedy: str = "use Linux, macOS or WSL 2") -> None:
    """Raise ValueError if this system is not a POSIX system; ``what`` is what cannot be had there."""
    if fcntl is None:
        raise ValueError(f"{what}: not supported on Windows; {remedy}")
