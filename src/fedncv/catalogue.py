"""Descriptions of the methods and switches, without loading their code.

They are stored in methods/index.json. After a change to a method, run ``python tools/method_index.py`` to update that
file; a test checks that the two agree.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

INDEX = Path(__file__).parent / "methods" / "index.json"


class Knob(NamedTuple):
    name: str
    kind: str
    default: str
    meaning: str


class About(NamedTuple):
    """A method or a switch. A switch has no title, reference, form, uploads or running statistics of its own."""

    name: str
    title: str  # as people write it
    summary: str
    reference: str
    form: str  # what the server needs of the clients: "sums" of their replies, or "each reply"
    knobs: tuple[Knob, ...]
    reveals: dict[str, str]  # field of the upload -> what the server learns from it
    buffers: str  # how BatchNorm's running statistics are treated
    needs_sgd: str  # why clients must train with SGD; empty: any optimizer is correct
    formula: str  # the docstring of its file: formula, reference, departures


@cache
def methods() -> dict[str, About]:
    return _read("methods")


@cache
def switches() -> dict[str, About]:
    return _read("switches")


def _read(what: str) -> dict[str, About]:
    entries: list[dict[str, Any]] = json.loads(INDEX.read_text(encoding="utf-8"))[what]
    return {entry["name"]: _about(entry) for entry in entries}


def _about(entry: dict[str, Any]) -> About:
    return About(**entry | {"knobs": tuple(Knob(**knob) for knob in entry["knobs"])})
