"""Arguments of a command from a dataclass, with tyro; its boxes of errors become one line."""

import contextlib
import io
import sys
from typing import TypeVar

import tyro

T = TypeVar("T")


def parse(kind: type[T], argv: list[str], *, command: str, default: T | None = None) -> T:
    """``kind`` from the words after the command; ValueError in one line, --help prints and leaves."""
    caught = io.StringIO()
    prog = f"fedncv {command}"
    try:
        with contextlib.redirect_stderr(caught):
            if default is None:
                return tyro.cli(kind, prog=prog, args=argv)
            return tyro.cli(kind, prog=prog, args=argv, default=default)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        raise ValueError(one_line(caught.getvalue(), prog)) from None
    finally:
        if not caught.getvalue().startswith("╭"):
            sys.stderr.write(caught.getvalue())


def one_line(box: str, prog: str) -> str:
    """What the box says and what it suggests, without its frame and without the help it repeats."""
    lines = [line.strip("│ ").strip() for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    parts: list[list[str]] = [[]]
    for line in lines:
        if line and not line.strip("─"):
            parts.append([])
        else:
            parts[-1].append(line)
    message = " ".join(parts[0])
    for part in parts[1:]:
        if part and part[0].startswith("Perhaps you meant"):
            message += f"; perhaps you meant {part[1].split()[0]}"
    return f"{message} ({prog} --help lists the options)"
