"""fedncv federation up: start a whole federation on this machine."""

from dataclasses import dataclass
from pathlib import Path

from fedncv.cli.arguments import parse
from fedncv.cli.federation.shared import Folder, check_seconds


@dataclass(frozen=True, kw_only=True)
class Up:
    """Start the server and all clients on this machine, in the background, to try it out."""

    folder: Folder
    """The folder that `fedncv federation init` wrote."""
    seconds: float = 180.0
    """How long to wait until all clients are connected, in seconds."""


def main(argv: list[str]) -> int:
    from fedncv.flower import processes

    chosen = parse(Up, argv, command="federation up")
    check_seconds(chosen.seconds)
    folder = Path(chosen.folder)
    try:
        there = processes.up(folder, seconds=chosen.seconds)
    except BaseException:
        processes.down(folder)  # leave nothing running if the start failed
        raise
    print(f"{folder}: the server is up, and clients {', '.join(map(str, there))} are connected")
    return 0
