"""The public keys of all clients, on every client's own disk, for secure sums.

    clients/0/roster.toml    minimum_cohort      fewest clients whose sum this client lets the server see
                             [clients]           client -> its public key (its node.pub)
    server/roster.toml       the same keys; the server sends only their hash

`init` writes it, and the commands that change keys write it again in every part that is on the same machine. The server
never sends it: whoever sets the federation up copies it, so the server cannot put keys of its own in it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedncv.config import read_toml, to_toml
from fedncv.flower.private import private_files
from fedncv.flower.refusals import RefusedError
from fedncv.secure.signatures import Roster
from fedncv.store import write_atomically

FILE = "roster.toml"
MINIMUM = 3
HEAD = """\
# The public keys of all clients, for secure sums. It is equal on all machines, and never comes from the server.
# minimum_cohort: fewest clients whose sum this client lets the server see, at least 2; a lower threshold is refused.
"""


class Known(NamedTuple):
    minimum: int
    roster: Roster


def write_rosters(folder: Path, keys: Mapping[int, str]) -> list[Path]:
    """Write the keys into the server's part and those of the clients that are in this folder; return the latter."""
    parts = sorted(path.parent for path in (folder / "clients").glob("*/client.toml"))
    for part in [folder / "server", *parts]:
        try:
            minimum = read_roster(part).minimum
        except RefusedError:
            minimum = MINIMUM
        lines = [f"{u} = {_quoted(' '.join(key.split()[:2]))}\n" for u, key in sorted(keys.items())]
        text = HEAD + f"minimum_cohort = {minimum}\n\n[clients]\n" + "".join(lines)
        with private_files():
            write_atomically(part / FILE, text.encode(), name="roster")
    return parts


def read_roster(part: Path) -> Known:
    """Return the roster of a machine's part; raise RefusedError if it cannot be used."""
    path = part / FILE
    if not path.is_file():
        raise RefusedError("roster", f"there is no {path}; copy it from the person who set the federation up", "none")
    try:
        values: dict[str, Any] = read_toml(path)
        minimum, clients = values.pop("minimum_cohort"), values.pop("clients")
        if values or type(minimum) is not int or minimum < 2:
            raise ValueError("minimum_cohort must be a whole number of at least 2, and [clients] all else")
        roster = {int(u): str(key) for u, key in clients.items()}
    except (ValueError, KeyError, AttributeError, OSError) as error:
        raise RefusedError("roster", f"{path} cannot be used: {error}", "damaged") from None
    return Known(minimum, dict(sorted(roster.items())))


def _quoted(text: str) -> str:
    return to_toml({"x": text}).partition(" = ")[2].strip()
