"""fedncv resume: resume runs that were stopped."""

import sys
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
    """Resume runs that were stopped, from their latest checkpoints. Finished runs stay unchanged."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A run, or a folder of runs."""


def main(argv: list[str]) -> int:
    folder = Path(parse(Arguments, argv, command="resume").folder)
    runs = runs_in(folder)
    refused: dict[Path, str] = {}
    for run in runs:
        try:
            _check_place(run)
        except ValueError as error:
            refused[run] = str(error)
    if len(refused) == len(runs):
        raise ValueError("\n".join(dict.fromkeys(refused.values())))
    code = train(folder, [run for run in runs if run not in refused])
    for reason in dict.fromkeys(refused.values()):
        print(f"fedncv: {reason}", file=sys.stderr)
    return 2 if refused else code


def _check_place(run: Path) -> None:
    """Raise ValueError if the run cannot be resumed here: its GPU is missing, or it belongs to a federation."""
    device = read_config(run).device
    try:
        find_device(device)
    except ValueError as error:
        raise ValueError(f"{run}: {error} (set in {run / CONFIG})") from None
    server = run.resolve().parent.parent
    if (server / "server.toml").exists():
        command = f"fedncv federation resume {server.parent} --name {run.name}"
        raise ValueError(f"{run} is a federation's run; resume it with `{command}`")
