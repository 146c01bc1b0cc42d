"""What a run's server notes while it works: the audit log of its part, and progress.json for those who wait.

It looks at the messages themselves, as they cross: names, sizes and norms of their fields, and never a value of them.
progress.json says what the server does at this moment. It is replaced at most every second; no result depends on it.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedncv.config import RunConfig
from fedncv.files import write_atomically
from fedncv.flower import audit
from fedncv.flower.asking import Grid
from fedncv.flower.refusals import REFUSAL

PROGRESS = "progress.json"
FIELDS = 64  # of a message that are named
SHOWN = 160  # characters of a text of another machine
PHASES = {"query": "joining", "train": "training", "evaluate": "scoring"}


class Progress(NamedTuple):
    """What a server does now."""

    phase: str  # joining, training, scoring, or done
    round: int
    rounds: int
    asked: int  # clients
    replied: int
    began: float  # of the phase, in seconds since 1970


class Record:
    """Notes of one run, at the server. ``nodes`` is client -> node."""

    def __init__(self, folder: Path, config: RunConfig, nodes: dict[int, int]) -> None:
        self._folder, self._config = folder, config
        self._log = folder.parents[1] / audit.AUDIT  # one for all runs of the server
        self._clients = {node: u for u, node in nodes.items()}
        self._now = Progress("joining", 0, config.rounds, config.clients, 0, time.time())
        self._replied: set[int] = set()
        self._next = 0.0
        self.head = ""

    def note(self, event: str, **about: Any) -> None:
        self.head = audit.append(self._log, event, run=self._folder.name, **about)

    def watch(self, grid: Grid) -> Grid:
        """Return the grid; what goes through it is noted."""
        return _Watched(grid, self)

    def phase(self, kind: str, round: int, asked: int) -> None:
        self._now = Progress(kind, round, self._config.rounds, asked, 0, time.time())
        self._replied = set()
        self._write()

    def sent(self, message: Message) -> None:
        about = message.metadata
        u = self._clients.get(about.dst_node_id, -1)
        self.note("sent", client=u, kind=_phase(message), group=about.group_id, **summary(message.content))

    def received(self, message: Message) -> None:
        u = self._clients.get(message.metadata.src_node_id, -1)
        kind, group = _phase(message), cut(message.metadata.group_id, 20)
        if message.has_error():
            said: dict[str, Any] = {"error": cut(message.error.reason)}
        else:
            said = summary(message.content, norms=kind != "scoring")  # of a client's scores, only the total is kept
        self.note("received", client=u, kind=kind, group=group, **said)
        self._replied.add(u)
        self._now = self._now._replace(replied=len(self._replied))
        if time.monotonic() >= self._next:
            self._write()

    def round(self, line: dict[str, Any]) -> None:
        """Note whom a round counted, and why it did not count others."""
        names = ("round", "counted", "absent", "refused", "clipped", "barred", "before_by", "after_by")
        self.note("round", **{name: line[name] for name in names if name in line})

    def done(self) -> None:
        self._now = self._now._replace(phase="done")
        self._write()

    def _write(self) -> None:
        self._next = time.monotonic() + 1.0
        with contextlib.suppress(OSError, ValueError):  # no reason to stop a run
            write_atomically(self._folder / PROGRESS, json.dumps(self._now._asdict()).encode())


class _Watched:
    def __init__(self, grid: Grid, record: Record) -> None:
        self._grid, self._record = grid, record

    def get_nodes(self) -> Iterable[Any]:
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:  # first: what was sent is never missing
            self._record.sent(message)
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        answers = list(self._grid.pull_messages(message_ids))
        for answer in answers:
            self._record.received(answer)
        return answers


def _phase(message: Message) -> str:
    return PHASES.get(message.metadata.message_type.partition(".")[0], "other")


def read_progress(folder: Path) -> Progress | None:
    """Return what the server of a run said last; None if it has said nothing yet."""
    try:
        said = json.loads((folder / PROGRESS).read_bytes())
        found = Progress(*(kind(said[name]) for name, kind in Progress.__annotations__.items()))
        return found if said.keys() == set(Progress._fields) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


# ---- messages ---------------------------------------------------------------------------------------------


def summary(content: RecordDict, *, norms: bool = True) -> dict[str, Any]:
    """Return the fields of a message with their sizes and norms, and a refusal if it is one. It may be hostile."""
    said: dict[str, Any] = {"fields": {}}
    names = [(name, each) for name, record in content.items() if name != REFUSAL for each in _fields(record, norms)]
    for name, (field, array) in names[:FIELDS]:
        said["fields"][cut(f"{name}.{field}", 80)] = array
    if len(names) > FIELDS:
        said["more_fields"] = len(names) - FIELDS
    refusal = content.get(REFUSAL)
    if isinstance(refusal, ConfigRecord):
        said["refused"] = {cut(name, 60): cut(value) for name, value in list(refusal.items())[:2]}
    return said


def _fields(record: Any, norms: bool) -> list[tuple[str, Any]]:
    """Return name -> what is noted of each field: bytes and norm of an array, a number or a mark as it is."""
    if isinstance(record, ArrayRecord):
        return [(name, _array(array, norms)) for name, array in list(record.items())[: FIELDS + 1]]
    if isinstance(record, ConfigRecord):
        return [(name, _plain(value)) for name, value in list(record.items())[: FIELDS + 1]]
    return [("", type(record).__name__)]


def _array(array: Any, norms: bool) -> dict[str, Any]:
    kind = {"float32": np.float32, "float64": np.float64}.get(array.dtype)
    said: dict[str, Any] = {"bytes": len(array.data)}
    if norms and kind is not None and len(array.data) % np.dtype(kind).itemsize == 0:
        with np.errstate(over="ignore", invalid="ignore"):
            norm = float(np.linalg.norm(np.frombuffer(array.data, dtype=kind).astype(np.float64)))
        said["norm"] = float(f"{norm:.6g}") if np.isfinite(norm) else str(norm)
    return said


def _plain(value: Any) -> Any:
    if type(value) in (int, float):
        return value if np.isfinite(value) else str(value)
    return cut(value, 64) if isinstance(value, str) else f"{type(value).__name__} of {len(value)}"


def cut(text: object, most: int = SHOWN) -> str:
    """Return the beginning of a text of another machine; JSON escapes what could be misread.

    >>> cut("A" * 5000, 3)
    'AAA… (4997 more characters)'
    """
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[:most]}… ({len(whole) - most} more characters)"


def fingerprint(key: str) -> str:
    """Return a short mark of a public key, as it is in the folder of keys."""
    return hashlib.sha256(" ".join(key.split()[:2]).encode()).hexdigest()[:16]
