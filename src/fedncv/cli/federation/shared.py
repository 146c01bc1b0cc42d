"""What several actions need: the folder's argument, and a check that the server answers."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import tyro

from fedncv.config import named

Folder = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
OF_INIT = named("samples")  # set once for all runs, by `federation init`
ANSWER_SECONDS = 5.0  # a running server answers within this time
MOST_SECONDS = 365 * 24 * 3600  # to wait


def check_server(folder: Path) -> None:
    """Raise ValueError if no server answers, before anything is written."""
    from fedncv.flower.folder import reachable, read_server_settings
    from fedncv.flower.processes import wait_for_port

    address = reachable(read_server_settings(folder / "server"))
    try:
        wait_for_port(address, ANSWER_SECONDS)
    except ValueError:
        raise ValueError(
            f"the server of {folder} does not answer; start it with `fedncv federation up {quote(str(folder))}`, "
            f"or on its own machine with `fedncv federation server {quote(f'{folder}/server')}`"
        ) from None


def check_seconds(seconds: float) -> None:
    if not 0 <= seconds <= MOST_SECONDS:
        raise ValueError(f"seconds must be from 0 to {MOST_SECONDS:,}, a year, not {seconds:g}")


def when(told: bool) -> str:
    """Say from when on a change of keys holds."""
    return "from now on" if told else "as soon as the server starts"
