"""Arguments of a command from a dataclass, with tyro; its boxes of errors become one line."""

import contextlib
import io
from typing import TypeVar

import tyro

T = TypeVar("T")


def parse(kind: type[T], argv: list[str], *, command: str, default: T | None = None) -> T:
    """``kind`` from the words after the command; ValueError in one line, --help prints and leaves."""
    said = io.StringIO()
    prog = f"fedncv {command}"
    try:
        with contextlib.redirect_stderr(said):
            if default is None:
                return tyro.cli(kind, prog=prog, args=argv)
            return tyro.cli(kind, prog=prog, args=argv, default=default)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        raise ValueError(one_line(said.getvalue(), prog)) from None


def one_line(box: str, prog: str) -> str:
    """What the box says and what it suggests, without its frame and without the help it repeats.

    Where the terminal knows no lines the frame is made of minus signs, and the title stands inside.
    """
    parts: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip("│ ")
        if text.startswith(("╭", "╰")):
            continue
        if not text.strip("─-"):
            parts.append([])
        else:
            parts[-1].append(text)
    said = parts if box.lstrip().startswith("╭") else parts[1:]
    message = " ".join(said[0])
    for part in said[1:]:
        if part and part[0].startswith("Perhaps you meant") and len(part) > 1:
            message += f"; perhaps you meant {part[1].split()[0]}"
    return f"{message} ({prog} --help lists the options)"
