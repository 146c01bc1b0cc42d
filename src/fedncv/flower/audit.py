"""An append-only log in which every line holds the hash of the one before it: who sent what, and what was refused.

    a line    {"n": 12, "time": "2026-01-31T12:00:00.000+00:00", "event": "sent", ..., "before": h11, "hash": h12}
    h12       SHA-256 of the line without "hash": JSON with sorted keys and no spaces

A change to a line, a line taken out or put in, and a change of order break the chain there. Who changes a line and
computes all later hashes again, or cuts whole lines off the end, leaves a chain that fits itself. So the latest hash,
the head, is also kept elsewhere: in each round's line of timing.jsonl at the server, and of history.jsonl at a client.
A head that is not in the log shows it, unless those files were changed too; so `audit` prints the head for you to note.

A process that is killed while it writes leaves the beginning of a line. It stays, and the next line, "torn", names its
length and hash. The file is flushed to the disk before ``append`` returns; processes take turns. Only the standard
library is imported.
"""

import fcntl
import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

AUDIT = "audit.jsonl"
HEAD = "audit"  # the field of timing.jsonl and history.jsonl that holds the head
START = "0" * 64  # what the first line holds as the hash before it
TORN = "torn"
PIECE = 1 << 16
REMEDY = "restore it from a copy; or rename it to audit-old.jsonl, and a new log begins"


class Found(NamedTuple):
    """What a log holds, if its chain is whole."""

    lines: int
    head: str  # the hash of the last line
    last: str  # its time
    hashes: frozenset[str]
    torn: int  # beginnings of lines that a kill has left


def append(path: Path, event: str, **about: Any) -> str:
    """Add a line, flush it to the disk, and return its hash. Raise ValueError if the end of the log was changed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        last, rest = _end(path, file)
        number, before = (last["n"], last["hash"]) if last else (0, START)
        text = b""
        if rest:  # the line of a process that was killed; only its new line may be missing
            whole = _line(rest)
            text = b"\n"
            if whole is not None and (whole["n"], whole["before"]) == (number + 1, before):
                number, before = whole["n"], whole["hash"]
            else:
                torn = sealed(
                    number + 1, before, TORN, {"bytes": len(rest), "sha256": hashlib.sha256(rest).hexdigest()}
                )
                text += _text(torn)
                number, before = torn["n"], torn["hash"]
        line = sealed(number + 1, before, event, about)
        size = os.fstat(file.fileno()).st_size
        try:
            _write(file.fileno(), text + _text(line))
            os.fsync(file.fileno())
        except OSError:  # the disk is full: leave no part of a line
            os.ftruncate(file.fileno(), size)
            raise
    return str(line["hash"])


def head_of(path: Path) -> str:
    """Return the hash of the last whole line; empty if there is no log yet, or if its end is damaged."""
    try:
        with path.open("rb") as file:
            last, _ = _end(path, file)
    except (OSError, ValueError):
        return ""
    return str(last["hash"]) if last else ""


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def sealed(number: int, before: str, event: str, about: dict[str, Any]) -> dict[str, Any]:
    """Return a line with its hash."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = {"n": number, "time": now, "event": event, **about, "before": before}
    return line | {"hash": _hash(line)}


def _hash(line: dict[str, Any]) -> str:
    text = json.dumps({name: value for name, value in line.items() if name != "hash"}, sort_keys=True,
                      separators=(",", ":"), allow_nan=False)  # fmt: skip
    return hashlib.sha256(text.encode()).hexdigest()


def _text(line: dict[str, Any]) -> bytes:
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def _line(text: bytes) -> dict[str, Any] | None:
    """Return the line if it is a whole one whose hash fits."""
    try:
        line = json.loads(text)
        fits = isinstance(line, dict) and type(line["n"]) is int and line["hash"] == _hash(line)
        return line if fits and isinstance(line["before"], str) and isinstance(line["time"], str) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _end(path: Path, file: Any) -> tuple[dict[str, Any] | None, bytes]:
    """Return the last complete line, None if there is none, and what follows it."""
    size = left = os.fstat(file.fileno()).st_size
    text = b""
    while left and text.rstrip(b"\n").count(b"\n") < 2:
        step = min(PIECE, left)
        left -= step
        text = os.pread(file.fileno(), step, left) + text
    *lines, rest = text.split(b"\n")
    if not lines:
        return None, rest
    line = _line(lines[-1])
    if line is None:
        raise ValueError(
            f"{path}: its last whole line was changed or is damaged (at byte {size - len(rest)}); {REMEDY}"
        )
    return line, rest


# ---- verify -----------------------------------------------------------------------------------------------


def verify(path: Path) -> Found:
    """Return what the log holds. Raise ValueError that names the first line that breaks the chain."""
    number, before, last, torn = 0, START, "", 0
    hashes = {START}
    fragment: bytes | None = None  # a line that cannot be read: the next one must explain it
    with path.open("rb") as file:
        for place, text in enumerate(file, start=1):
            line = _line(text)
            if fragment is not None and not (line and _explains(line, fragment)):
                raise _broken(path, place - 1, "was changed or is damaged: its hash does not fit")
            if line is None:
                fragment, torn = text.removesuffix(b"\n"), torn + 1
                continue
            if (line["n"], line["before"]) != (number + 1, before):
                raise _broken(path, place, _why(line, number))
            fragment = None
            number, before, last = line["n"], line["hash"], line["time"]
            hashes.add(before)
        if fragment is not None and text.endswith(b"\n"):
            raise _broken(path, place, "was changed or is damaged: its hash does not fit")
    return Found(number, before, last, frozenset(hashes), torn)


def _explains(line: dict[str, Any], fragment: bytes) -> bool:
    found = (line.get("event"), line.get("bytes"), line.get("sha256"))
    return found == (TORN, len(fragment), hashlib.sha256(fragment).hexdigest())


def _why(line: dict[str, Any], number: int) -> str:
    if line["n"] == number + 1:
        return f"does not follow the line before it (number {number}), which was changed and given a new hash"
    if line["n"] > number + 1:
        return f"has number {line['n']} and follows number {number}: lines between them were taken out"
    return f"has number {line['n']} and follows number {number}: it was put in, or moved"


def _broken(path: Path, place: int, why: str) -> ValueError:
    return ValueError(f"{path}, line {place}, {why}; {REMEDY}")


def anchors(part: Path) -> dict[str, tuple[str, int]]:
    """Return head -> the file and round that note it, of a server's runs or a client's."""
    found: dict[str, tuple[str, int]] = {}
    for path in sorted((part / "runs").glob("*/*.jsonl")):
        if path.name in ("timing.jsonl", "history.jsonl"):
            for text in path.read_bytes().split(b"\n"):
                try:
                    row = json.loads(text)
                    if isinstance(row.get(HEAD), str):
                        found.setdefault(row[HEAD], (str(path), row.get("round", 0)))
                except (ValueError, AttributeError, RecursionError):
                    continue  # a line that a kill has cut short
    return found


def renamed(part: Path) -> list[Path]:
    """Return logs of the part that somebody has renamed, so that a new one began."""
    return sorted(part.glob("audit-*.jsonl"))


def check(part: Path, *, head: str = "") -> tuple[Found, int]:
    """Verify the log of a part; return what it holds, and how many heads noted elsewhere are in it.

    ``head`` is one that was noted before. Raise ValueError for the first thing that does not fit.
    """
    path, noted = part / AUDIT, anchors(part)
    if not path.exists():
        if noted:
            raise ValueError(f"there is no {path}, and {next(iter(noted.values()))[0]} notes its lines; {REMEDY}")
        raise ValueError(f"there is no {path} yet: the first run begins it")
    found = verify(path)
    older = {line["hash"] for old in renamed(part) for text in old.read_bytes().split(b"\n") if (line := _line(text))}
    for each, (where, round) in noted.items():
        if each not in found.hashes and each not in older:
            raise ValueError(
                f"{path} ends with number {found.lines}, and lacks the line with hash {each[:16]}… that {where} notes "
                f"in round {round}: its end was cut, or lines were changed and given new hashes; {REMEDY}"
            )
    if head and not any(each.startswith(head) for each in found.hashes):
        raise ValueError(f"{path} has no line with hash {head}: its end was cut, or it was written again")
    return found, len(noted)
