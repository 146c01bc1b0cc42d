"""fedncv federation add: add a client."""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from fedncv.cli.arguments import parse
from fedncv.cli.federation.shared import Folder, when


@dataclass(frozen=True, kw_only=True)
class Add:
    """Add a client, who brings its own samples. It takes part in runs that begin after this."""

    folder: Folder
    """The folder that contains the server's part, server/."""
    host: str = ""
    """Name or address at which it reaches the server; empty: as the clients in FOLDER/clients do."""


def main(argv: list[str]) -> int:
    from fedncv.flower import members

    chosen = parse(Add, argv, command="federation add")
    part, told = members.add(Path(chosen.folder), host=chosen.host)
    print(
        f"{part}: client {part.name}, whose key is accepted {when(told)}\n"
        f"1. copy the folder to the client's machine, and write its samples there (docs/federation.md)\n"
        f"2. start it there: fedncv federation client {quote(str(part))}"
    )
    return 0
