"""What one round of secure sums is about. Its digest goes into every key, signature and share of the round.

So a key, a share or a signature of one run, round, attempt, cohort or roster means nothing in another.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

PROTOCOL = "fedncv secure sums 1"


class RefusedError(ValueError):
    """A message that the receiver does not act on. ``code`` is short and says nothing about this machine."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Session(NamedTuple):
    """One attempt at one round."""

    run: str
    round: int  # 0: joining
    attempt: int  # counted from 1; a round that did not reach its threshold can be begun anew
    cohort: tuple[int, ...]  # clients drawn for the round, in order
    threshold: int  # so many of them must stay to the end
    neighbours: int  # of each client; 0: all others
    roster: str  # hash of the public keys of all clients (see ``signatures``)
    layout: str  # hash of the fields with their steps and bounds
    numbers: int  # in the vector of a client
    bits: int  # of each

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(canonical({"protocol": PROTOCOL, **self._asdict()})).digest()

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "cohort": list(self.cohort)}


NAMES = {
    "run": str, "round": int, "attempt": int, "cohort": list, "threshold": int, "neighbours": int, "roster": str,
    "layout": str, "numbers": int, "bits": int,
}  # fmt: skip


def session_of(said: object) -> Session:
    """Return the session that a message names; raise RefusedError if it cannot be one."""
    if not isinstance(said, dict) or sorted(said) != sorted(NAMES):
        raise RefusedError("message", "the message names no session of this protocol")
    for name, kind in NAMES.items():
        if type(said[name]) is not kind:
            raise RefusedError("message", f"the session's {name} is a {type(said[name]).__name__}")
    cohort = ids_of(said["cohort"], what="the cohort")
    session = Session(**{**said, "cohort": tuple(cohort)})
    right = 0 <= session.round < 2**32 and 1 <= session.attempt < 2**32 and 0 <= session.numbers < 2**40
    if not right or session.neighbours < 0 or session.bits not in range(8, 65, 8):
        raise RefusedError("message", f"the session's numbers are out of range: {session.round}, {session.attempt}")
    return session


def check_threshold(threshold: int, cohort: int) -> None:
    """Raise ValueError unless more than half of the cohort, and at least two, must stay.

    With half or less, the server could show two halves of the cohort different lists of those who dropped out.
    """
    least = max(2, cohort // 2 + 1)
    if not least <= threshold <= cohort:
        if cohort < 2:
            raise ValueError(f"secure sums need at least 2 clients in a round, not {cohort}")
        raise ValueError(
            f"threshold is {threshold}; for {cohort} clients in a round it must be from {least} to {cohort}: more than "
            "half of them, and at least 2"
        )


def ids_of(said: object, *, what: str) -> list[int]:
    """Return a list of clients, in order and without repetition."""
    if not isinstance(said, list) or not all(type(u) is int and u >= 0 for u in said):
        raise RefusedError("message", f"{what} is not a list of clients")
    if said != sorted(set(said)):
        raise RefusedError("lists", f"{what} is not in order, or names a client twice: {said[:20]}")
    return list(said)


def table_of(said: object, kind: type, *, what: str) -> dict[int, Any]:
    """Return client -> value, of a JSON object whose names are numbers."""
    if not isinstance(said, dict):
        raise RefusedError("message", f"{what} is not a table")
    found = {}
    for name, each in said.items():
        if not isinstance(name, str) or not name.isdecimal() or str(int(name)) != name or not isinstance(each, kind):
            raise RefusedError("message", f"{what} has an entry that is not of this protocol")
        found[int(name)] = each
    return dict(sorted(found.items()))


def raw(said: object, size: int | None = None, *, what: str) -> bytes:
    """Return the bytes of a text of hexadecimal digits."""
    try:
        found = bytes.fromhex(said) if isinstance(said, str) else None
    except ValueError:
        found = None
    if found is None or (size is not None and len(found) != size):
        raise RefusedError("message", f"{what} is not {'' if size is None else f'{size} '}bytes")
    return found


def canonical(value: Mapping[str, Any]) -> bytes:
    """Return the one text of a JSON value: sorted names, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def mark(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()
