"""fedncv federation server: run the server in the foreground."""

from dataclasses import dataclass
from pathlib import Path

from fedncv.cli.arguments import parse
from fedncv.cli.federation.shared import Folder


@dataclass(frozen=True, kw_only=True)
class Server:
    """Run the server in the foreground, and restart it whenever it ends, until Ctrl-C."""

    folder: Folder
    """The server's part of the federation: FOLDER/server, or a copy of it."""


def main(argv: list[str]) -> int:
    from fedncv.flower.processes import keep_server

    return keep_server(Path(parse(Server, argv, command="federation server").folder))
