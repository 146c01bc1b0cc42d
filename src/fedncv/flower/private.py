"""Folders and files that only their owner can read: other users of a machine see neither samples nor a run's state.

A folder is made with mode 0700, whatever the umask. One that an earlier version of fedncv made is tightened, with the
files in it. A folder of another owner is refused: its owner can read what is written there.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

OTHERS = 0o077


def private_folder(folder: Path) -> Path:
    """Make the folder and its missing parents, or tighten it; return it. Raise ValueError if somebody else owns it."""
    for missing in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    about = folder.stat()
    if os.geteuid() not in (0, about.st_uid):
        raise ValueError(f"{folder} belongs to user {about.st_uid}; run as that user, or use `chown -R`")
    if about.st_mode & OTHERS:
        _tighten(folder)
        for place, folders, files in os.walk(folder):
            for name in (*folders, *files):
                _tighten(Path(place) / name)
    return folder


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Give files and folders that this process makes here modes 0600 and 0700."""
    before = os.umask(OTHERS)
    try:
        yield
    finally:
        os.umask(before)


def _tighten(path: Path) -> None:
    mode = path.lstat().st_mode
    if not stat.S_ISLNK(mode) and mode & OTHERS:
        path.chmod(stat.S_IMODE(mode) & ~OTHERS)
