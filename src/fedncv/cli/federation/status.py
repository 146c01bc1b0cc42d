"""fedncv federation status: show processes, clients and runs."""

import time
from dataclasses import dataclass
from pathlib import Path

from fedncv.cli.arguments import parse
from fedncv.cli.federation.shared import Folder

SILENT_SECONDS = 45.0  # a client sends a heartbeat every 23 s or sooner
EXPIRY_DAYS = 60


@dataclass(frozen=True, kw_only=True)
class Status:
    """Show the processes on this machine, when each client was last in contact, and the progress of every run."""

    folder: Folder
    """The folder that `fedncv federation init` wrote; or, on a client's machine, the client's part."""


def main(argv: list[str]) -> int:
    from fedncv.flower import processes
    from fedncv.flower.folder import read_keys, read_server_settings
    from fedncv.results import is_run, read_run

    folder = Path(parse(Status, argv, command="federation status").folder)
    if (folder / "client.toml").is_file():
        return _of_client(folder)
    settings = read_server_settings(folder / "server")  # raise for a wrong folder: it is not a server that is down
    try:
        online, answers = processes.online(folder / "server", seconds=20.0), "answers"
    except ValueError:
        online, answers = [], "does not answer"
    contacts, keys = processes.contacts(folder / "server"), read_keys(folder / "server")
    print(f"{'server':10}  {answers:15}  {_here(folder, 'server')}")
    parts = {int(name) for name in processes.names(folder)[1:]}
    for u in range(max(settings.clients, *(part + 1 for part in parts), 0)):
        address, at = contacts.get(u, ("", None))
        said = "revoked" if u not in keys else _connected(u in online, at)
        where = _here(folder, str(u)) if u in parts else f"on another machine{f' ({address})' if address else ''}"
        print(f"client {u:<3}  {said:15}  {where}, {_ago(at)}")
    _warn_of_expiry(folder / "server")
    for path in sorted((folder / "server" / "runs").glob("*")):
        if is_run(path):
            run = read_run(path)
            print(f"run {path.name}: {run.config.method}, round {run.rounds} of {run.config.rounds}, {run.status}")
    return 0


def _of_client(part: Path) -> int:
    from fedncv.flower.folder import last_contact, read_client_settings

    settings, at = read_client_settings(part), last_contact(part)
    silent = at is None or time.time() - at > SILENT_SECONDS
    print(f"client {settings.client:<3}  {'no contact' if silent else 'in contact'} with {settings.server}, {_ago(at)}")
    return 0


def _here(folder: Path, name: str) -> str:
    from fedncv.flower import processes

    pid = processes.group(folder, name)
    if pid is None:
        return "not started here"
    if not processes.keeper_lives(folder, name):
        return "running here without its keeper, which was killed; `fedncv federation up` starts it again"
    return f"running here (process group {pid})"


def _connected(online: bool, at: float | None) -> str:
    """Flower takes a client as online for a minute after its last heartbeat."""
    if not online:
        return "not connected"
    return "connected" if at is not None and time.time() - at < SILENT_SECONDS else "silent"


def _ago(at: float | None) -> str:
    return "no contact yet" if at is None else f"last contact {max(0.0, time.time() - at):.0f} s ago"


def _warn_of_expiry(server: Path) -> None:
    from fedncv.flower.members import expires

    left = min(expires(server / name).timestamp() for name in ("server.crt", "ca.crt")) - time.time()
    if left < EXPIRY_DAYS * 86400:
        print(f"the certificates expire in {left / 86400:.0f} days; renew them with `fedncv federation renew`")
