"""fedncv federation resume: resume a run after its last finished round."""

from dataclasses import dataclass
from pathlib import Path

from fedncv.cli.arguments import parse
from fedncv.cli.federation.run import follow
from fedncv.cli.federation.shared import Folder, check_server


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Resume a run after its last finished round."""

    folder: Folder
    """The folder that `fedncv federation init` wrote."""
    name: str = "first"
    """Name of the run."""
    seconds: float = 86400.0
    """How long to wait for the run, in seconds."""


def main(argv: list[str]) -> int:
    chosen = parse(Resume, argv, command="federation resume")
    check_server(Path(chosen.folder))
    return follow(Path(chosen.folder), chosen.name, chosen.seconds)
