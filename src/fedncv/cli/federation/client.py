"""fedncv federation client: run one client in the foreground."""

from dataclasses import dataclass
from pathlib import Path

from fedncv.cli.arguments import parse
from fedncv.cli.federation.shared import Folder


@dataclass(frozen=True, kw_only=True)
class Client:
    """Run one client in the foreground, and restart it whenever it ends, until Ctrl-C."""

    folder: Folder
    """The client's part of the federation: FOLDER/clients/0 for client 0, or a copy of it."""


def main(argv: list[str]) -> int:
    from fedncv.flower.processes import keep_client

    return keep_client(Path(parse(Client, argv, command="federation client").folder))
