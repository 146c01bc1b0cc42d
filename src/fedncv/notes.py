"""Notes on stderr, beside a command's results on stdout. ``--quiet`` and ``--verbose`` set how much is said.

quiet     results and errors only
normal    also progress and notes, such as which engine was taken
verbose   also details: versions, a line for every round, seconds, tracebacks of errors
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Literal, get_args

Level = Literal["quiet", "normal", "verbose"]
LEVELS: tuple[Level, ...] = get_args(Level)
VARIABLE = "FEDNCV_NOTES"  # the level in the environment, which processes that a command starts inherit


def level() -> Level:
    """Return how much is said; anything unknown in the environment counts as normal."""
    found = os.environ.get(VARIABLE, "")
    return found if found in LEVELS else "normal"


@contextlib.contextmanager
def at(wanted: Level) -> Iterator[None]:
    """Say so much in this block, here and in processes that it starts."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = wanted
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def note(text: str) -> None:
    """Print a line on stderr, unless quiet."""
    if level() != "quiet":
        _print(text)


def detail(text: str) -> None:
    """Print a line on stderr if verbose."""
    if level() == "verbose":
        _print(text)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
