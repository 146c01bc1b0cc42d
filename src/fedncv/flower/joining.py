"""What every client reports once in a run: its number of training samples, and the mark of its data file.

joined.json    sizes      client -> training samples, 0 for an excluded one
               barred     client -> why it is excluded
               marks      client -> the mark of its data file (see ``handshake``)
               identity   what the run was begun with
"""

import json
from pathlib import Path
from typing import NamedTuple

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedncv import store
from fedncv.flower import handshake
from fedncv.flower.asking import Grid, StoppedError, gather
from fedncv.flower.client import DATA, SAMPLES
from fedncv.flower.handshake import SERVER
from fedncv.flower.rules import Rules, too_many
from fedncv.flower.wire import ASK, WireError, records, whole_numbers

JOINED = "joined.json"
_WHAT = "the answer about samples"


class Joined(NamedTuple):
    """Reports of the clients that joined."""

    sizes: dict[int, int]
    barred: dict[int, str]
    marks: dict[int, str]
    identity: dict[str, str]
    samples: int = 0  # in all, if the run has secure sums: then no single number is known


def join(grid: Grid, folder: Path, nodes: dict[int, int], rules: Rules, identity: dict[str, str]) -> Joined:
    """Ask every client once; earlier reports are kept. Raise ValueError if the run was begun with something else."""
    joined = read_joined(folder, identity)
    handshake.compare(joined.identity, identity, str(folder))
    missing = {u: node for u, node in nodes.items() if u not in joined.sizes}
    if not missing:
        return joined
    asked = {u: node for u, node in missing.items() if u not in rules.leave_out}

    def receive(u: int, answer: Message) -> tuple[int, str]:
        content = records(answer, ASK, what=_WHAT)
        found = content[ASK]
        mark = found.get(DATA) if isinstance(found, ConfigRecord) else None
        (count,) = whole_numbers(content, SAMPLES, beside=[DATA], what=_WHAT)
        if not handshake.is_mark(mark):
            raise WireError(f"{_WHAT} lacks the mark of its data")
        if not 1 <= count <= rules.max_samples:
            raise WireError(f"it reports {count} samples, outside 1..{rules.max_samples}")
        known = rules.sizes.get(str(u), count)
        if count != known:
            raise WireError(f"it reports {count} samples, and sizes in rules.toml says {known}")
        return count, str(mark)

    gathered = gather(
        grid,
        asked,
        lambda _u: RecordDict({SERVER: ConfigRecord(dict(identity))}),
        receive,
        kind=MessageType.QUERY,
        group="joining",
        seconds=rules.join_seconds,
        attempts=rules.attempts,
        told={},
    )
    refusing = {u: why for u, why in gathered.refused.items() if u in gathered.unwilling}
    left_out = dict.fromkeys(sorted(set(missing) - set(asked)), "leave_out in rules.toml names it")
    barred = joined.barred | left_out | {u: why for u, why in gathered.refused.items() if u not in refusing}
    sizes = joined.sizes | {u: count for u, (count, _) in gathered.values.items()} | dict.fromkeys(barred, 0)
    absent = sorted(set(nodes) - set(sizes))
    if not absent:  # only now are the others known
        barred |= too_many(rules, {u: size for u, size in sizes.items() if size})
        sizes |= dict.fromkeys(barred, 0)
    marks = joined.marks | {u: mark for u, (_, mark) in gathered.values.items()}
    joined = Joined(dict(sorted(sizes.items())), dict(sorted(barred.items())), dict(sorted(marks.items())), identity)
    write_joined(folder, joined)
    if absent:
        why = "".join(f"; client {u}: {reason}" for u, reason in refusing.items())
        raise StoppedError(
            f"clients {absent} did not join within {rules.join_seconds:g} s{why}; start or mend them and resume, "
            "or raise join_seconds or set leave_out in rules.toml"
        )
    return joined


def read_joined(folder: Path, identity: dict[str, str] | None = None) -> Joined:
    """Return the reports so far; none of a run that begins, with ``identity``."""
    path = folder / JOINED
    if not path.exists():
        return Joined({}, {}, {}, identity or {})
    try:
        said = json.loads(path.read_bytes())
        return Joined(
            {int(u): int(size) for u, size in said["sizes"].items()},
            {int(u): str(why) for u, why in said["barred"].items()},
            {int(u): str(mark) for u, mark in said.get("marks", {}).items()},
            {str(name): str(value) for name, value in said.get("identity", {}).items()},
            int(said.get("samples", 0)),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is damaged; restore it, or start a new run") from None


def write_joined(folder: Path, joined: Joined) -> None:
    store.write_atomically(folder / JOINED, json.dumps(joined._asdict()).encode(), name="joined")


def accept_version(folder: Path) -> None:
    """Let a run continue with the fedncv that is installed now; it must be installed on all machines."""
    joined = read_joined(folder)
    if joined.identity:
        write_joined(folder, joined._replace(identity=joined.identity | handshake.installed()))
