"""The server's last checkpoints, and the way back to one of them.

    RUN/checkpoints/round-000007.safetensors    the checkpoint of round 7, a second name of that file
    RUN/rollbacks.json                          [from, to] of every roll-back

Every request says how often the run was rolled back, and which of its rounds the client must keep for going back. So a
client drops what it did after the round to which the operator went back, and still refuses a server whose disk was set
back to an old copy: that server knows of fewer roll-backs, or asks for an old round.
"""

import json
import os
import shutil
from pathlib import Path

from fedncv import store
from fedncv.results import METRICS, STATE

FOLDER, ROLLBACKS = "checkpoints", "rollbacks.json"


def rounds(folder: Path) -> list[int]:
    """Return the rounds whose checkpoints are kept, in order."""
    found = (folder / FOLDER).glob("round-*.safetensors")
    return sorted(int(path.stem.removeprefix("round-")) for path in found)


def path_of(folder: Path, round: int) -> Path:
    return folder / FOLDER / f"round-{round:06d}.safetensors"


def keep(folder: Path, round: int, number: int) -> None:
    """Keep the checkpoint of ``round``, which has just been written, and the last ``number`` in all."""
    kept = path_of(folder, round)
    kept.parent.mkdir(exist_ok=True)
    kept.unlink(missing_ok=True)
    try:
        os.link(folder / STATE, kept)  # a checkpoint is replaced, never changed: no byte is copied
    except OSError:  # a file system without links
        shutil.copyfile(folder / STATE, kept)
    there = rounds(folder)
    for old in there:
        if old > round or old not in [each for each in there if each <= round][-number:]:
            path_of(folder, old).unlink()


def forget(folder: Path, *, but: int) -> None:
    """Remove all kept checkpoints except that of one round."""
    for old in rounds(folder):
        if old != but:
            path_of(folder, old).unlink()


def rollbacks(folder: Path) -> list[list[int]]:
    """Return [from, to] of every roll-back of the run."""
    path = folder / ROLLBACKS
    if not path.exists():
        return []
    try:
        return [[int(before), int(after)] for before, after in json.loads(path.read_bytes())]
    except (ValueError, TypeError):
        raise ValueError(f"{path} is damaged; restore it, or start a new run") from None


def roll_back(folder: Path, *, now: int, to: int) -> None:
    """Make the checkpoint of round ``to`` the latest one. A crash leaves the old one or the new one."""
    there = rounds(folder)
    if to not in there or to > now:
        said = ", ".join(str(round) for round in there if round <= now) or "none"
        raise ValueError(
            f"{folder} has no checkpoint of round {to}; it has those of rounds {said} (checkpoints in rules.toml says "
            "how many are kept)"
        )
    if to == now:
        return
    done = [*rollbacks(folder), [now, to]]  # first: a client that hears of it too early loses nothing
    store.write_atomically(folder / ROLLBACKS, json.dumps(done).encode(), name="rollbacks")
    store.write_atomically(folder / STATE, path_of(folder, to).read_bytes(), name="state")
    _truncate(folder / METRICS, to)
    for newer in there:
        if newer > to:
            path_of(folder, newer).unlink()


def _truncate(path: Path, round: int) -> None:
    """Remove the rows after the one of ``round``, as resuming does too; until then, the run would look finished."""
    length = 0
    with path.open("r+b") as file:
        for line in file:
            if json.loads(line)["round"] > round:
                break
            length += len(line)
        file.truncate(length)
        os.fsync(file.fileno())
