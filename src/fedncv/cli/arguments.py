"""Parse a command's arguments into a dataclass with tyro, and turn tyro's error boxes into one line."""

import contextlib
import inspect
import io
import re
from pathlib import Path
from typing import TypeVar

import tyro

from fedncv.results import is_run

T = TypeVar("T")
EVERY_COMMAND = """Every command prints results to stdout, progress and notes to stderr, and takes
  -q, --quiet     only results and errors
  -v, --verbose   also versions, a line for every round, seconds, and the traceback of an error"""
PLAINER = {  # messages of Python and tyro -> plain messages
    r"Error parsing (\S+): invalid literal for int\(\) with base 10: (.+)": r"\1 must be a whole number, not \2",
    r"Error parsing (\S+): could not convert string to float: (.+)": r"\1 must be a number, not \2",
    r"Error parsing (\S+): Could not find valid parse for arguments: \[(.+)\]": (
        r"\1 takes numbers separated by spaces, not \2"
    ),
    r"Missing value for argument '(\S+)'\. Expected 1 values\.": r"\1 needs a value",
    r"Unrecognized options: ((?!-).+)": r"unexpected value: \1; write each value after its option",
    r"invalid choice 'compiled' for argument '--engine'\..*\)\.": "use --layers compiled instead of --engine compiled",
    r"Missing from (.+): \S+ (.+) \(required\)": r"\1 needs an argument: \2",
}


def check_words(option: str, words: tuple[str, ...]) -> None:
    """Raise ValueError if names are separated by commas. Commas only separate knobs, after a colon."""
    for word in words:
        names, colon, knobs = word.partition(":")
        if "," in names:
            apart = names.replace(",", " ") + colon + knobs
            raise ValueError(f"{word!r} is one name; separate several names with spaces: {option} {apart}")


def check_out(out: Path) -> None:
    """Raise ValueError if the folder for runs is itself a run."""
    if is_run(out):
        raise ValueError(f"{out} is a run, so it cannot hold other runs; choose another --out")


def parse(kind: type[T], argv: list[str], *, command: str, default: T | None = None) -> T:
    """Return a ``kind`` from the words after the command. Raise ValueError with one line; --help prints and exits."""
    said = io.StringIO()
    prog = f"fedncv {command}"
    try:
        with contextlib.redirect_stderr(said):
            about = f"{inspect.cleandoc(kind.__doc__ or '')}\n\n{EVERY_COMMAND}"
            if default is None:
                return tyro.cli(kind, prog=prog, args=argv, description=about)
            return tyro.cli(kind, prog=prog, args=argv, description=about, default=default)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        raise ValueError(one_line(said.getvalue(), prog)) from None


def one_line(box: str, prog: str) -> str:
    """Return the message of an error box and its suggestion, without the frame and the repeated help.

    If the terminal cannot draw lines, the frame is made of minus signs and the title is inside it.
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
