"""The Flower ServerApp: runs the rounds from the server's folder and the run's settings."""

import contextlib
import logging
import os
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedncv.flower.absences import absences
from fedncv.flower.audit import AUDIT, append
from fedncv.flower.client import study_of
from fedncv.flower.folder import SERVER_VARIABLE, read_form, read_nodes
from fedncv.flower.record import cut
from fedncv.flower.rules import read_rules
from fedncv.flower.secure_server import Secure
from fedncv.flower.server import log, serve
from fedncv.flower.serving import only_one
from fedncv.methods import find_method
from fedncv.results import read_rows

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    if SERVER_VARIABLE not in os.environ:
        raise ValueError(f"{SERVER_VARIABLE} is not set; start the server with `fedncv federation server`")
    folder = Path(os.environ[SERVER_VARIABLE])
    config = study_of(str(context.run_config["study"]), is_ours=True)
    run_folder = folder / "runs" / str(context.run_config["name"])
    log_to(run_folder / "log.txt")
    reveals = tuple(find_method(config.method).reveals)
    nodes = {u: node for u, node in read_nodes(folder).items() if u < config.clients}  # others were added later
    try:
        rules = read_rules(folder / "rules.toml", reveals=reveals, clients=config.clients)
        text = str(context.run_config.get("secure", ""))
        secure = Secure(folder, str(context.run_config["run"]), text, config, rules) if text else None
        with only_one(run_folder):
            serve(grid, run_folder, config, read_form(folder), nodes, rules, secure)
            for line in absences(read_rows(run_folder)):
                log.warning("%s", line)
    except Exception as error:
        log.error("stopped: %s", error)
        with contextlib.suppress(ValueError, OSError):  # the reason may be the audit log itself
            append(folder / AUDIT, "stopped", run=run_folder.name, why=cut(error, 500))
        raise


def log_to(path: Path) -> None:
    """Write the run's log into its folder, because Flower discards a ServerApp's output."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
