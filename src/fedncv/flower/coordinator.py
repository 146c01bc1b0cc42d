"""Start, watch and resume runs of a federation.

Flower forgets a run when its server dies. A run of fedncv is its folder (config, metrics, checkpoint); Flower only
gets the request to resume this folder, as often as necessary.
"""

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shlex import quote

from fedncv import store
from fedncv.config import CUSTOM, RunConfig, write_toml
from fedncv.flower import checkpoints, joining
from fedncv.flower.folder import LINK, read_server_settings
from fedncv.flower.halves import check
from fedncv.flower.processes import flwr
from fedncv.flower.serving import only_one
from fedncv.results import Run, is_run, read_run

LOG = "log.txt"  # of a run: rejections, failures, and why it stopped
LOOK_SECONDS = 2.0
STUCK_SECONDS = 30.0  # without a new round, before we ask Flower if the run is alive

PYPROJECT = """\
[project]
name = "fedncv-run"
version = "1.0.0"
description = "A run of fedncv. Its code is installed on every machine; this app only names it"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedncv"

[tool.flwr.app.components]
serverapp = "fedncv_run.server:app"
clientapp = "fedncv_run.client:app"

[tool.flwr.app.config]
name = {name}
run = {run}
study = {study}
"""


def create(folder: Path, name: str, config: RunConfig) -> Path:
    """Create a run without starting it: its folder, and the app that Flower sends to the machines."""
    server = folder / "server"
    check(config)
    clients = read_server_settings(server).clients
    if config.clients != clients:
        raise ValueError(
            f"the run is for {config.clients} clients, but {folder} has {clients}; use --clients {clients}"
        )
    if not name or not all(c.isalnum() or c in "._-" for c in name) or name.startswith("."):
        raise ValueError(f"{name!r} is not a valid name of a run; use letters, digits and . _ -")
    run_folder = server / "runs" / name
    if is_run(run_folder):
        raise ValueError(
            f"the run {name!r} already exists; resume it with "
            f"`fedncv federation resume {quote(str(folder))} --name {quote(name)}`, or choose another --name"
        )
    # the clients have the data, so `fedncv resume`, which would simulate them, rejects such a run
    config = replace(config, data=CUSTOM)
    # not the name alone: a second run of that name would find the clients' state of the first
    values = {"name": name, "run": f"{name}-{secrets.token_hex(4)}", "study": write_toml(config)}
    package = app_folder(folder, name) / "fedncv_run"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "server.py").write_text("from fedncv.flower.server_app import app\n\n__all__ = ['app']\n")
    (package / "client.py").write_text("from fedncv.flower.client_app import app\n\n__all__ = ['app']\n")
    text = PYPROJECT.format(**{key: json.dumps(value) for key, value in values.items()})
    (package.parent / "pyproject.toml").write_text(text, encoding="utf-8")
    store.create(run_folder, config)
    return run_folder


def app_folder(folder: Path, name: str) -> Path:
    return folder / "server" / "apps" / name


def submit(folder: Path, name: str) -> int:
    """Submit the run to Flower; return Flower's number for it."""
    return int(flwr(folder / "server", "run", str(app_folder(folder, name)), LINK)["run-id"])


def roll_back(folder: Path, name: str, *, to: int) -> None:
    """Go back to the checkpoint of round ``to``; the next resume continues from there."""
    run_folder = _run_folder(folder, name)
    with only_one(run_folder, seconds=0.0):
        checkpoints.roll_back(run_folder, now=read_run(run_folder).rounds, to=to)


def accept_version(folder: Path, name: str) -> None:
    """Let the run continue with the version of fedncv that is installed here now."""
    run_folder = _run_folder(folder, name)
    with only_one(run_folder, seconds=0.0):
        joining.accept_version(run_folder)


def _run_folder(folder: Path, name: str) -> Path:
    run_folder = folder / "server" / "runs" / name
    if not is_run(run_folder):
        raise ValueError(f"there is no run {name!r} in {run_folder.parent}; start one with `fedncv federation run`")
    return run_folder


def lives(folder: Path, number: int) -> tuple[bool, str]:
    """Return whether Flower still works on the run, and Flower's status of it."""
    (found,) = flwr(folder / "server", "list", LINK, "--run-id", str(number))["runs"]
    return not str(found["status"]).startswith("finished"), f"{found['status']} {found.get('status-details') or ''}"


def follow(
    folder: Path,
    name: str,
    *,
    seconds: float,
    restarts: int = 3,
    submitted: int | None = None,
    on_round: Callable[[int], None] | None = None,
) -> Run:
    """Start or resume a run until its last round is on the disk; resume it if it stops before.

    ``submitted`` is Flower's number of a run in progress.
    """
    run_folder = _run_folder(folder, name)
    deadline = time.monotonic() + seconds
    seen, why = read_run(run_folder).rounds, ""
    for _ in range(restarts + 1):
        run = read_run(run_folder)
        if run.status == "finished":
            return run
        number = submit(folder, name) if submitted is None else submitted
        submitted = None
        looked = time.monotonic()
        while time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS if seconds > 10 * LOOK_SECONDS else 0.2)
            run = read_run(run_folder)
            if run.rounds != seen:
                seen, looked = run.rounds, time.monotonic()
                if on_round is not None:
                    on_round(seen)
            if run.status == "finished":
                return run
            if time.monotonic() - looked > STUCK_SECONDS:
                looked = time.monotonic()
                try:
                    alive, why = lives(folder, number)
                except ValueError as error:  # the server is down: its keeper restarts it
                    alive, why = True, str(error)
                if not alive:
                    break
        if time.monotonic() >= deadline:
            raise ValueError(
                f"run {name} is at round {seen} of {run.config.rounds} after {seconds:g} s; "
                f"continue with `fedncv federation resume`"
            )
    raise ValueError(f"run {name} stopped at round {seen}, {restarts + 1} times: {why}; see {run_folder / LOG}")
