"""fedncv federation down: stop what was started on this machine."""

from dataclasses import dataclass
from pathlib import Path

from fedncv.cli.arguments import parse
from fedncv.cli.federation.shared import Folder


@dataclass(frozen=True, kw_only=True)
class Down:
    """Stop the server and all clients that `fedncv federation up` started on this machine."""

    folder: Folder
    """The folder that `fedncv federation init` wrote."""


def main(argv: list[str]) -> int:
    from fedncv.flower import processes
    from fedncv.flower.folder import read_server_settings

    folder = Path(parse(Down, argv, command="federation down").folder)
    if not (folder / "logs").is_dir():  # nothing was ever started here: check that it is a federation
        read_server_settings(folder / "server")
    ended = processes.down(folder)
    names = ", ".join(f"client {name}" if name.isdigit() else name for name in ended)
    print(f"{folder}: stopped {names}" if names else f"{folder}: nothing was running")
    return 0
