"""fedncv federation revoke: shut a client out."""

from dataclasses import dataclass
from pathlib import Path

from fedncv.cli.arguments import parse
from fedncv.cli.federation.shared import Folder, when


@dataclass(frozen=True, kw_only=True)
class Revoke:
    """Shut a client out: remove its key. Run it on the server's machine. Runs in progress go on without the client."""

    folder: Folder
    """The folder that contains the server's part, server/."""
    client: int
    """Number of the client."""


def main(argv: list[str]) -> int:
    from fedncv.flower import members

    chosen = parse(Revoke, argv, command="federation revoke", default=None)
    told = members.revoke(Path(chosen.folder), chosen.client)
    print(f"{chosen.folder}: client {chosen.client} is shut out {when(told)}")
    return 0
