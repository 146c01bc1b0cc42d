"""A lock on a run of the server."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_SECONDS = 60.0


@contextlib.contextmanager
def only_one(folder: Path, *, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Let only one process serve or change a run: a new one waits until an old, disconnected one has ended."""
    with (folder / "lock").open("w") as file:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ValueError(f"another process serves {folder}; stop it, then resume") from None
                time.sleep(0.5)
        yield
