"""fedncv resume: go on with runs that were stopped."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fedncv.cli.arguments import parse
from fedncv.cli.progress import run_all
from fedncv.results import runs_in


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Go on with runs that were stopped, from their latest checkpoints; finished ones stay as they are."""

    folder: Annotated[str, tyro.conf.Positional]
    """A run, or a folder of runs."""


def main(argv: list[str]) -> int:
    folder = Path(parse(Arguments, argv, command="resume").folder)
    return run_all(folder, runs_in(folder))
