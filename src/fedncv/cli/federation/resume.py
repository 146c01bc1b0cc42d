"""fedncv federation resume: resume a run after its last finished round."""

from dataclasses import dataclass
from pathlib import Path

from fedncv.cli.arguments import parse
from fedncv.cli.federation.run import follow
from fedncv.cli.federation.shared import Folder, check_seconds, check_server


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Resume a run after its last finished round, or go back to an earlier one. Exit code 3: finished, but some round
    lacks a client."""

    folder: Folder
    """The folder that `fedncv federation init` wrote."""
    name: str = "first"
    """Name of the run."""
    seconds: float = 86400.0
    """How long to wait for the run, in seconds."""
    from_round: int = -1
    """Go back to the checkpoint of this round first, and drop what came after it; -1: do not. The server keeps the last
    ones (checkpoints in rules.toml), and the clients what belongs to them."""
    accept_version: bool = False
    """Continue with the fedncv that is installed now, on all machines, though the run was begun with another one."""


def main(argv: list[str]) -> int:
    from fedncv.flower import coordinator

    chosen = parse(Resume, argv, command="federation resume")
    check_seconds(chosen.seconds)
    folder = Path(chosen.folder)
    check_server(folder)
    if chosen.accept_version:
        coordinator.accept_version(folder, chosen.name)
    if chosen.from_round != -1:
        coordinator.roll_back(folder, chosen.name, to=chosen.from_round)
    return follow(folder, chosen.name, chosen.seconds)
