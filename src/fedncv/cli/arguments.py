"""Arguments of a command from a dataclass, with tyro; its boxes of errors become one line."""

import contextlib
import io
import re
from pathlib import Path
from typing import TypeVar

import tyro

from fedncv.results import is_run

T = TypeVar("T")
PLAINER = {  # what Python and tyro say of a value, and what a person reads
    r"Error parsing (\S+): invalid literal for int\(\) with base 10: (.+)": r"\1 is a whole number, not \2",
    r"Error parsing (\S+): could not convert string to float: (.+)": r"\1 is a number, not \2",
    r"Error parsing (\S+): Could not find valid parse for arguments: \[(.+)\]": (
        r"\1 cannot be \2; it takes numbers, with spaces between them"
    ),
    r"Missing value for argument '(\S+)'\. Expected 1 values\.": r"\1 needs a value",
    r"Unrecognized options: ((?!-).+)": r"unexpected: \1; every value comes after its option",
    r"invalid choice 'compiled' for argument '--engine'\..*\)\.": "--engine compiled is gone; use --layers compiled",
    r"Missing from (.+): \S+ (.+) \(required\)": r"\1 needs another word: \2",
}


def check_words(option: str, words: tuple[str, ...]) -> None:
    """ValueError where several names were written as one: a comma is for the knobs, after a colon."""
    for word in words:
        names, colon, knobs = word.partition(":")
        if "," in names:
            apart = names.replace(",", " ") + colon + knobs
            raise ValueError(f"{word!r} is one word; write several with spaces between them: {option} {apart}")


def check_out(out: Path) -> None:
    """ValueError where the folder for runs is a run itself."""
    if is_run(out):
        raise ValueError(f"{out} is a run, and holds no others; choose another --out")


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
    for said_of_a_value, plainer in PLAINER.items():
        message = re.sub(said_of_a_value, plainer, message)
    return f"{message} ({prog} --help lists the options)"
