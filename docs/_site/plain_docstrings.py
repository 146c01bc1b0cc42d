"""Let Sphinx read docstrings as they are written: plain text, ``code``, indented formulas and ``>>>`` examples.

In reStructuredText ``*``, ``|`` and a trailing ``_`` are markup, and an indented block is a quotation. In our
docstrings they are products, norms, names and formulas.
"""

import inspect
import pydoc
import re
from typing import Any

MARKUP = re.compile(r"([*|\\`_])")
CODE = re.compile(r"(``.+?``|`[^`]+`)")
NAMED_TUPLE = re.compile(r"Alias for field number \d+")  # Python's, where the field has no text


def as_rst(lines: list[str]) -> list[str]:
    """Return the docstring as reStructuredText: marks escaped, indented blocks literal."""
    out: list[str] = []
    literal = example = False
    for line in lines:
        indented = line.startswith("    ") and bool(line.strip())
        example = line.startswith(">>>") or (example and bool(line.strip()))
        if literal and (indented or not line.strip()):
            out.append(line)
            continue
        literal = False
        if example:
            out.append(line)
        elif indented:
            out += ["", "::", "", line]
            literal = True
        elif re.match(r"\s*[-*] ", line):  # a list stays one
            mark, _, text = line.partition(" ")
            out.append(f"{mark} {escaped(text)}")
        else:
            out.append(escaped(line))
    return out


def escaped(line: str) -> str:
    parts = CODE.split(line)
    return "".join(f"``{part.strip('`')}``" if part[:1] == "`" else MARKUP.sub(r"\\\1", part) for part in parts)


def comment(field: str) -> list[str]:
    """Return the comment behind a field of a class, which says what the field is; without one, nothing.

    >>> comment("fedncv.Dataset.y")
    ['(n, ...) targets of the loss']
    """
    owner, _, name = field.rpartition(".")
    found = re.search(rf"^ +{name}: .*?  # (.*)$", inspect.getsource(pydoc.locate(owner)), re.MULTILINE)
    return [found[1]] if found else []


def process(_app: Any, _what: str, name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    if lines and NAMED_TUPLE.fullmatch(lines[0]):
        lines[:] = comment(name)
    lines[:] = [*as_rst(lines), ""]


def setup(app: Any) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", process)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
