"""The Flower ServerApp: runs the rounds from the server's folder and the run's settings."""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedncv.flower.client import study_of
from fedncv.flower.folder import SERVER_VARIABLE, read_form, read_nodes
from fedncv.flower.rules import read_rules
from fedncv.flower.server import log, serve
from fedncv.methods import find_method

LOCK_SECONDS = 60.0

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    if SERVER_VARIABLE not in os.environ:
        raise ValueError(f"{SERVER_VARIABLE} is not set; start the server with `fedncv federation server`")
    folder = Path(os.environ[SERVER_VARIABLE])
    config = study_of(str(context.run_config["study"]), is_ours=True)
    run_folder = folder / "runs" / str(context.run_config["name"])
    log_to(run_folder / "log.txt")
    rules = read_rules(folder / "rules.toml", reveals=tuple(find_method(config.method).reveals))
    nodes = {u: node for u, node in read_nodes(folder).items() if u < config.clients}  # others were added later
    with only_one(run_folder):
        serve(grid, run_folder, config, read_form(folder), nodes, rules)


def log_to(path: Path) -> None:
    """Write the run's log into its folder, because Flower discards a ServerApp's output."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Let only one process serve a run: a new one waits until an old, disconnected one has ended."""
    with (folder / "lock").open("w") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ValueError(f"another process serves {folder}; stop it, then resume") from None
                time.sleep(0.5)
        yield
