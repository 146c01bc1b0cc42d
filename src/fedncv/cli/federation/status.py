"""fedncv federation status: show processes, clients and runs."""

from dataclasses import dataclass
from pathlib import Path

from fedncv.cli.arguments import parse
from fedncv.cli.federation.shared import Folder


@dataclass(frozen=True, kw_only=True)
class Status:
    """Show the processes on this machine, the connected clients, and the progress of every run."""

    folder: Folder
    """The folder that `fedncv federation init` wrote."""


def main(argv: list[str]) -> int:
    from fedncv.flower import processes
    from fedncv.flower.folder import read_server_settings
    from fedncv.results import is_run, read_run

    folder = Path(parse(Status, argv, command="federation status").folder)
    read_server_settings(folder / "server")  # raise for a wrong folder: it is not a server that is down
    try:
        connected, answers = processes.online(folder / "server", seconds=20.0), "answers"
    except ValueError:
        connected, answers = [], "does not answer"
    for name in processes.names(folder):
        pid = processes.group(folder, name)
        here = "not started here" if pid is None else f"running here (process group {pid})"
        label, said = ("server", answers) if name == "server" else (f"client {name}", _connected(int(name), connected))
        print(f"{label:10}  {said:15}  {here}")
    for u in sorted(set(connected) - {int(name) for name in processes.names(folder)[1:]}):
        print(f"client {u:<3}  connected        on another machine")
    for path in sorted((folder / "server" / "runs").glob("*")):
        if is_run(path):
            run = read_run(path)
            print(f"run {path.name}: {run.config.method}, round {run.rounds} of {run.config.rounds}, {run.status}")
    return 0


def _connected(u: int, connected: list[int]) -> str:
    return "connected" if u in connected else "not connected"
