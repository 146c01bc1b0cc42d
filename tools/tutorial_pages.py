"""Run the commands of docs/quickstart.md and docs/tutorials/, and write what they print below them.

    python tools/tutorial_pages.py                      # all pages
    python tools/tutorial_pages.py own_data method      # these only

A page runs in an empty folder, from top to bottom. A block after "Save this as `name`:" is a file of that folder. A
block ``console`` has commands, each after ``$ ``, on several lines if they end with a backslash; below it, until the
next command, is what it prints on standard output, without the lines that tell how far it is. Other blocks are not
run. The tests run every page in the same way and compare the output, apart from its numbers.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {path.stem: path for path in [DOCS / "quickstart.md", *sorted((DOCS / "tutorials").glob("[!R]*.md"))]}
BLOCK = re.compile(
    r"(?:Save this as `(?P<file>[^`]+)`:\n\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
PROGRESS = re.compile(r"run: |run \d+/")  # how many there are depends on the machine's speed
LEFT_BEHIND = re.compile(r"^\$ (fedncv federation down .*)$", re.MULTILINE)


class FailedError(Exception):
    """A command of a page ended with an error."""


class Command(NamedTuple):
    line: str
    printed: str


def commands(text: str) -> list[Command]:
    """Return the commands of a ``console`` block, each with the output below it.

    >>> commands("$ echo one\\none\\n$ true\\n")
    [Command(line='echo one', printed='one\\n'), Command(line='true', printed='')]
    """
    parts = re.split(r"^\$ ((?:.*\\\n)*.*)\n", text, flags=re.MULTILINE)
    if parts[0]:
        raise ValueError(f"a console block begins with a command after '$ ', not with {parts[0]!r}")
    return [Command(*pair) for pair in zip(parts[1::2], parts[2::2], strict=True)]


def played(text: str, folder: Path) -> str:
    """Run a page in ``folder`` and return its text with the output of this time. Raise FailedError if one fails."""

    def block(found: re.Match[str]) -> str:
        if found["file"]:
            (folder / found["file"]).write_text(found["text"], encoding="utf-8")
        if found["kind"] != "console":
            return found[0]
        return "```console\n" + "".join(f"$ {c.line}\n{run(c.line, folder)}" for c in commands(found["text"])) + "```"

    try:
        return BLOCK.sub(block, text)
    except FailedError:
        for line in LEFT_BEHIND.findall(text):  # no process stays
            subprocess.run(["bash", "-c", line], cwd=folder, env=environment(folder), check=False, capture_output=True)
        raise


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a page's commands: this Python's, with a width and a cache of their own."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "COLUMNS": "100", "NO_COLOR": "1", "FEDNCV_CACHE": str(folder / ".cache")}


def run(line: str, folder: Path) -> str:
    """Return what a command prints, without blanks at the ends of lines and without empty lines at its ends."""
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment(folder), check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise FailedError(f"{line}\n{done.stdout}{done.stderr}")
    lines = "\n".join(each.rstrip() for each in done.stdout.splitlines() if not PROGRESS.match(each)).strip("\n")
    return f"{lines}\n" if lines else ""


def without_numbers(text: str) -> str:
    """Return the text with # for numbers and fingerprints, and with single blanks: they depend on the machine.

    >>> without_numbers("fedavg   2  79.6 ± 4.4   10.2 MB  ───  patients-0b8e7a/fedavg-seed0")
    'fedavg # # ± # # MB ─ patients-#/fedavg-seed#'
    """
    text = re.sub(r"(?<=-)[0-9a-f]{6}\b", "#", text)
    return re.sub(r"─+", "─", re.sub(r"[ \t]+", " ", re.sub(r"\d[\d,.]*", "#", text)))


def main(names: list[str]) -> None:
    for name in names or PAGES:
        with tempfile.TemporaryDirectory() as folder:
            text = PAGES[name].read_text(encoding="utf-8")
            PAGES[name].write_text(played(text, Path(folder)), encoding="utf-8")
        print(PAGES[name].relative_to(DOCS.parent))


if __name__ == "__main__":
    main(sys.argv[1:])
