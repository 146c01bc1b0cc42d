"""fedncv resume: go on with runs that were stopped."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fedncv.cli.arguments import parse
from fedncv.cli.run import train
from fedncv.engine.problem import find_device
from fedncv.results import CONFIG, read_config, runs_in


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Go on with runs that were stopped, from their latest checkpoints; finished ones stay as they are."""

    folder: Annotated[str, tyro.conf.Positional]
    """A run, or a folder of runs."""


def main(argv: list[str]) -> int:
    folder = Path(parse(Arguments, argv, command="resume").folder)
    runs = runs_in(folder)
    for run in runs:
        _check_place(run)
    return train(folder, runs)


def _check_place(run: Path) -> None:
    """ValueError where the run goes on elsewhere: on a GPU that is not here, or between a federation's machines."""
    device = read_config(run).device
    try:
        find_device(device)
    except ValueError as error:
        raise ValueError(f"{run}: {error} (it stands in {run / CONFIG})") from None
    server = run.resolve().parent.parent
    if (server / "server.toml").exists():
        command = f"fedncv federation resume {server.parent} --name {run.name}"
        raise ValueError(f"{run} is a federation's run; go on with `{command}`")
