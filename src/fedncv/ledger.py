"""Write what each round spends of a privacy budget, before its noise is drawn: a crash cannot lose it.

privacy.jsonl has one line per round. A round that a crash cut short is on the ledger already. When the run is resumed,
the round is repeated with the same clients and the same noise, because both are keyed: it reveals nothing new and is
not charged again. If it would be repeated with anything else, it is refused.
"""

import json
import os
from pathlib import Path
from typing import Any

from fedncv.files import open_here, records, sealed, truncate
from fedncv.portable import sync_folder
from fedncv.results import LEDGER

TERMS = ("round", "unit", "neighbours", "noise", "drawn", "clients", "delta")
"""What a repeated round must have in common with the first one; its epsilon follows from them."""


def write_point(name: str) -> None:
    """Mark a moment at which a crash would do most harm. Tests send SIGKILL here."""


def charge(folder: Path, entry: dict[str, Any]) -> None:
    """Write the entry of the next round and flush it to the disk, unless the same entry is there.

    Raise ValueError if the ledger is damaged, lacks an earlier round, or has other terms for this one.
    """
    path, place = folder / LEDGER, entry["round"] - 1
    _cut_half_a_line(path)
    found, remedy = records(path), "restore it, or repeat the run with --overwrite"
    if found is None or [line.get("round") for line in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"{path} is damaged: what the run has spent is not known; {remedy}")
    if len(found) < place:
        raise ValueError(f"{path} has {len(found)} rounds, but the run has made {place}; {remedy}")
    if len(found) > place:
        differing = [name for name in TERMS if found[place].get(name) != entry[name]]
        if differing:
            words = ", ".join(f"{name} {found[place].get(name)!r}, now {entry[name]!r}" for name in differing)
            raise ValueError(f"{path}: round {entry['round']} is charged with other terms ({words}); {remedy}")
        return
    line = json.dumps(sealed(entry), allow_nan=False).encode() + b"\n"
    is_new = not path.exists()
    with os.fdopen(open_here(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0) as file:
        file.write(line[: len(line) // 2])
        write_point("ledger: half a line")
        file.write(line[len(line) // 2 :])
        os.fsync(file.fileno())
    if is_new:
        sync_folder(folder)
    write_point("ledger: charged")


def _cut_half_a_line(path: Path) -> None:
    """Remove a last line that a crash cut short: its round had not begun."""
    data = path.read_bytes() if path.exists() else b""
    if data and not data.endswith(b"\n"):
        truncate(path, data.rfind(b"\n") + 1)
