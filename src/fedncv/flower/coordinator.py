"""Start, watch and resume runs of a federation.

Flower forgets a run when its server dies. A run of fedncv is its folder (config, metrics, checkpoint); Flower only
gets the request to resume this folder, as often as necessary.
"""

import contextlib
import fcntl
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
from fedncv.flower.folder import LINK, read_keys, read_server_settings
from fedncv.flower.halves import check
from fedncv.flower.private import private_files
from fedncv.flower.processes import flwr, is_down
from fedncv.flower.secure_server import check_secure
from fedncv.flower.serving import only_one
from fedncv.results import Run, is_run, read_run
from fedncv.secure.settings import write_settings
from fedncv.store import write_atomically

LOG = "log.txt"  # of a run: rejections, failures, and why it stopped
NUMBER, STOPPED = "flower-run", "stopped"  # files beside the app: Flower's number of the run; it was stopped
LOOK_SECONDS = 2.0
STOP_SECONDS = 60.0
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
secure = {secure}
"""


@private_files()
def create(folder: Path, name: str, config: RunConfig, secure: str = "") -> Path:
    """Create a run without starting it: its folder, and the app that Flower sends to the machines.

    ``secure`` are the settings of secure sums, such as threshold=3; empty: the server sees each reply.
    """
    server = folder / "server"
    check(config)
    secure = write_settings(check_secure(config, secure)) if secure else ""
    clients = read_server_settings(server).clients
    if config.clients != clients:
        raise ValueError(
            f"the run is for {config.clients} clients, but {folder} has {clients}; use --clients {clients}"
        )
    without = sorted(set(range(clients)) - set(read_keys(server)))
    if without:
        raise ValueError(
            f"clients {without} of {folder} have no key: they were revoked; give them new ones with "
            f"`fedncv federation rotate {quote(str(folder))} --client {without[0]}`"
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
    values = {"name": name, "run": f"{name}-{secrets.token_hex(4)}", "study": write_toml(config), "secure": secure}
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


@private_files()
def submit(folder: Path, name: str) -> int:
    """Submit the run to Flower; return Flower's number for it."""
    place = app_folder(folder, name)
    (place / STOPPED).unlink(missing_ok=True)
    number = int(flwr(folder / "server", "run", str(place), LINK)["run-id"])
    write_atomically(place / NUMBER, str(number).encode(), name="number")
    return number


def stop(folder: Path, name: str) -> Run:
    """Stop a run, and whoever waits for it in ``follow``; return its state. It can be resumed."""
    run_folder, place = _run_folder(folder, name), app_folder(folder, name)
    run = read_run(run_folder)
    if run.status == "finished":
        raise ValueError(f"the run {name!r} has finished its {run.rounds} rounds; there is nothing to stop")
    (place / STOPPED).touch(mode=0o600)
    if (place / NUMBER).exists():
        number = int((place / NUMBER).read_bytes())
        if lives(folder, number)[0]:
            flwr(folder / "server", "stop", str(number), LINK)
    _wait_until_free(run_folder / "lock")
    return read_run(run_folder)


def _wait_until_free(lock: Path) -> None:
    """Wait until no ServerApp holds the run: one that was stopped notices it at its next request."""
    deadline = time.monotonic() + STOP_SECONDS
    while lock.exists() and time.monotonic() < deadline:
        with lock.open() as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.1)


def _in_progress(folder: Path, name: str) -> int | None:
    """Return Flower's number of the run if Flower still works on it: nobody waits for it, and it was not stopped."""
    place = app_folder(folder, name)
    if (place / STOPPED).exists() or not (place / NUMBER).exists():
        return None
    number = int((place / NUMBER).read_bytes())
    try:
        return number if lives(folder, number)[0] else None
    except ValueError:  # Flower does not know the number: its database is another one
        return None


def _raise_if_stopped(folder: Path, name: str, seen: int) -> None:
    """Raise ValueError if the run, or the whole federation, was stopped by a command."""
    resume = f"`fedncv federation resume {quote(str(folder))} --name {quote(name)}`"
    if (app_folder(folder, name) / STOPPED).exists():
        raise ValueError(f"run {name} was stopped at round {seen}; continue with {resume}")
    if is_down(folder):
        raise ValueError(
            f"run {name} is at round {seen}, and the federation was stopped by `fedncv federation down`; start it with "
            f"`fedncv federation up {quote(str(folder))}`, then continue with {resume}"
        )


def roll_back(folder: Path, name: str, *, to: int) -> None:
    """Go back to the checkpoint of round ``to``; the next resume continues from there."""
    run_folder = _run_folder(folder, name)
    if joining.read_joined(run_folder).identity.get("secure"):
        raise ValueError(
            f"the run {name!r} has secure sums, which never sum a round twice: the two sums could show one client's "
            "update. Start a new run"
        )
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
    on_look: Callable[[], None] | None = None,
) -> Run:
    """Start or resume a run until its last round is on the disk; resume it if it stops before.

    ``submitted`` is Flower's number of a run in progress. ``on_look`` is called at every look at the run's folder.
    """
    run_folder = _run_folder(folder, name)
    deadline = time.monotonic() + seconds
    seen, why = read_run(run_folder).rounds, ""
    for _ in range(restarts + 1):
        run = read_run(run_folder)
        if run.status == "finished":
            return run
        number = submitted or _in_progress(folder, name) or submit(folder, name)
        submitted = None
        looked = time.monotonic()
        while time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS if seconds > 10 * LOOK_SECONDS else 0.2)
            run = read_run(run_folder)
            if run.rounds != seen:
                seen, looked = run.rounds, time.monotonic()
                if on_round is not None:
                    on_round(seen)
            if on_look is not None:
                on_look()
            if run.status == "finished":
                return run
            _raise_if_stopped(folder, name, seen)
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
