"""fedncv federation stop: stop a run."""

from dataclasses import dataclass
from pathlib import Path

from fedncv.cli.arguments import parse
from fedncv.cli.federation.shared import Folder, check_server


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stop a run after its last finished round. The server and the clients go on; the run can be resumed."""

    folder: Folder
    """The folder that `fedncv federation init` wrote."""
    name: str = "first"
    """Name of the run."""


def main(argv: list[str]) -> int:
    from fedncv.flower import coordinator

    chosen = parse(Stop, argv, command="federation stop")
    folder = Path(chosen.folder)
    check_server(folder)
    run = coordinator.stop(folder, chosen.name)
    print(f"{run.folder}: stopped after round {run.rounds} of {run.config.rounds}")
    return 0
