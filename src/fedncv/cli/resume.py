"""fedncv resume: resume runs that were stopped."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fedncv.cli.arguments import parse
from fedncv.cli.run import train
from fedncv.engine.problem import find_device
from fedncv.results import CONFIG, read_config, runs_in
from fedncv.runner import extend
from fedncv.study import FILE


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Resume runs that were stopped, from their latest checkpoints. Finished runs stay unchanged."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A run, or a folder of runs."""
    rounds: int | None = None
    """New number of rounds for all these runs, also finished ones, which then go on. Refused if the finished rounds
    would have differed with that number, as with schedule=cosine."""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, command="resume")
    folder = Path(arguments.folder)
    runs = runs_in(folder)
    refused: dict[Path, str] = {}
    for run in runs:
        try:
            _check_place(run)
        except ValueError as error:
            refused[run] = str(error)
    if len(refused) == len(runs):
        raise ValueError("\n".join(dict.fromkeys(refused.values())))
    if arguments.rounds is not None:
        _extend(folder, [run for run in runs if run not in refused], arguments.rounds)
    code = train(folder, [run for run in runs if run not in refused])
    for reason in dict.fromkeys(refused.values()):
        print(f"fedncv: {reason}", file=sys.stderr)
    return 2 if refused else code


def _extend(folder: Path, runs: list[Path], rounds: int) -> None:
    """Plan so many rounds for every run. If one cannot have them, raise ValueError and change none."""
    if study := next((each for each in (folder, *folder.resolve().parents) if (each / FILE).exists()), None):
        raise ValueError(
            f"{folder} belongs to a study, whose runs follow {study / FILE}; start another one with --rounds {rounds}"
        )
    for run in runs:
        extend(run, rounds, only_check=True)
    for run in runs:
        extend(run, rounds)


def _check_place(run: Path) -> None:
    """Raise ValueError if the run cannot be resumed here: its GPU is missing, or it belongs to a federation."""
    device = read_config(run).device
    try:
        find_device(device)
    except ValueError as error:
        raise ValueError(f"{run}: {error} (set in {run / CONFIG})") from None
    server = run.resolve().parent.parent
    if (server / "server.toml").exists():
        command = shlex.join(["fedncv", "federation", "resume", str(server.parent), "--name", run.name])
        raise ValueError(f"{run} is a federation's run; resume it with `{command}`")
