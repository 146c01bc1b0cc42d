"""fedncv federation: run a real federation over Flower, with TLS and authenticated nodes."""

from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import tyro
from tyro.conf import Suppress

from fedncv.cli.arguments import parse
from fedncv.config import RunConfig, named, simulation_only
from fedncv.spec import nearest

Folder = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
OF_INIT = named("samples")  # set once for all runs, by `federation init`
ANSWER_SECONDS = 5.0  # a running server answers within this time


@dataclass(frozen=True, kw_only=True)
class Init:
    """Write a federation's folder: certificates, keys, settings, and a dataset divided among the clients."""

    folder: Folder
    """A new folder. Copy server/ to the server's machine, clients/0/ to client 0's, and so on."""
    host: str = "127.0.0.1"
    """Name or address at which clients reach the server; written into the certificate."""
    listen: str = ""
    """Address the server listens on; empty: the host. 0.0.0.0: every address of the machine."""
    port: int = 0
    """Port of the server; 0: a free one."""
    clients: int = 2
    """Number of clients, at least 1."""
    data: str = RunConfig.data
    """Dataset name, or your own data as for `fedncv run`; `fedncv datasets` lists them. Real clients replace their part
    with their own samples."""
    data_dir: str = RunConfig.data_dir
    """Folder with the datasets' files; empty: $FEDNCV_DATA, then the cache folder."""
    partition: str = RunConfig.partition
    """Division of samples among clients: dirichlet:alpha=0.1,min_samples=10 or iid. `fedncv partition` draws it."""
    test_share: float = RunConfig.test_share
    """Share of each client's samples kept for testing, at least 0 and below 1."""
    seed: int = RunConfig.seed
    """Seed of the partition and the split; 0 to 2^64 - 1."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """Show the processes on this machine, the connected clients, and the progress of every run."""

    folder: Folder
    """The folder that `fedncv federation init` wrote."""


@dataclass(frozen=True, kw_only=True)
class Down:
    """Stop the server and all clients that `fedncv federation up` started on this machine."""

    folder: Folder
    """The folder that `fedncv federation init` wrote."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """Run the server in the foreground, and restart it whenever it ends, until Ctrl-C."""

    folder: Folder
    """The server's part of the federation: FOLDER/server, or a copy of it."""


@dataclass(frozen=True, kw_only=True)
class Client:
    """Run one client in the foreground, and restart it whenever it ends, until Ctrl-C."""

    folder: Folder
    """The client's part of the federation: FOLDER/clients/0 for client 0, or a copy of it."""


@dataclass(frozen=True, kw_only=True)
class Up:
    """Start the server and all clients on this machine, in the background, to try it out."""

    folder: Folder
    """The folder that `fedncv federation init` wrote."""
    seconds: float = 180.0
    """How long to wait until all clients are connected, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Begin(RunConfig):
    """Train a method on the federation and wait for it. Settings that a simulation does not have are in rules.toml."""

    folder: Folder
    """The folder that `fedncv federation init` wrote."""
    name: str = "first"
    """Name of the run; its folder is FOLDER/server/runs/NAME."""
    seconds: float = 86400.0
    """How long to wait for the run, in seconds; it can be resumed after that."""
    clients: int = 0
    """Number of clients; 0: all of them."""
    per_round: int = 0
    """Clients drawn per round; 0: all of them."""
    sampling: Literal["uniform", "weighted"] = "uniform"
    """How clients are drawn: uniformly, or weighted by their number of samples."""
    eval_every: int = RunConfig.eval_every
    """Every so many rounds each client scores the received model, into its own history.jsonl; 0: never."""
    rows: Literal["auto", "memory", "disk"] = "auto"
    """Where the server stores per-client state; auto: on disk if it would not fit in memory."""
    seed: int = RunConfig.seed
    """Seed of the initial model, the draws of clients and the batches; 0 to 2^64 - 1."""


def _offered(kind: type[Begin]) -> type[Begin]:
    """Return ``kind`` without the options that have no effect on a federation's run; `_refuse` says why."""
    hidden = [
        (f.name, Suppress[f.type], f.default)  # type: ignore[misc, name-defined]  # known only at run time
        for f in fields(RunConfig)
        if f.name in _reasons()
    ]
    return make_dataclass(
        kind.__name__, hidden, bases=(kind,), frozen=True, kw_only=True, namespace={"__doc__": kind.__doc__}
    )


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Resume a run after its last finished round."""

    folder: Folder
    """The folder that `fedncv federation init` wrote."""
    name: str = "first"
    """Name of the run."""
    seconds: float = 86400.0
    """How long to wait for the run, in seconds."""


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        raise SystemExit(0)
    if argv[0] not in ACTIONS:
        raise ValueError(nearest(argv[0], ACTIONS, what="action of federation"))
    if find_spec("flwr") is None:
        raise ValueError("a federation needs Flower, which is not installed; pip install 'fedncv[flower]'")
    action, _ = ACTIONS[argv[0]]
    return action(argv[1:])


def usage() -> str:
    width = max(map(len, ACTIONS))
    return "\n".join(
        [
            "usage: fedncv federation ACTION FOLDER [OPTIONS]      (fedncv federation ACTION --help lists the options)",
            "",
            *(f"  {name:{width}}  {meaning}" for name, (_, meaning) in ACTIONS.items()),
            "",
            "Try:  fedncv federation init trial && fedncv federation up trial &&",
            "      fedncv federation run trial --method scaffold --rounds 3 --epochs 1 && fedncv federation down trial",
        ]
    )


def init(argv: list[str]) -> int:
    from fedncv.flower.folder import init as write
    from fedncv.flower.folder import read_server_settings

    chosen = parse(Init, argv, command="federation init", default=None)
    config = RunConfig(**{name: getattr(chosen, name) for name in ("clients", *OF_INIT, "seed")}, per_round=1)
    folder = Path(chosen.folder)
    write(folder, config, host=chosen.host, port=chosen.port, listen=chosen.listen or chosen.host)
    port = read_server_settings(folder / "server").port
    print(
        f"{folder}: a server at {chosen.host}:{port} and {config.clients} clients\n"
        f"all on this machine    fedncv federation up {quote(str(folder))}\n"
        f"the server's machine   fedncv federation server {quote(f'{folder}/server')}\n"
        f"each client's machine  fedncv federation client {quote(f'{folder}/clients/0')}"
    )
    return 0


def server(argv: list[str]) -> int:
    from fedncv.flower.processes import keep_server

    return keep_server(Path(parse(Server, argv, command="federation server").folder))


def client(argv: list[str]) -> int:
    from fedncv.flower.processes import keep_client

    return keep_client(Path(parse(Client, argv, command="federation client").folder))


def up(argv: list[str]) -> int:
    from fedncv.flower import processes

    chosen = parse(Up, argv, command="federation up")
    folder = Path(chosen.folder)
    try:
        there = processes.up(folder, seconds=chosen.seconds)
    except BaseException:
        processes.down(folder)  # leave nothing running if the start failed
        raise
    print(f"{folder}: the server is up, and clients {', '.join(map(str, there))} are connected")
    return 0


def status(argv: list[str]) -> int:
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


def down(argv: list[str]) -> int:
    from fedncv.flower import processes
    from fedncv.flower.folder import read_server_settings

    folder = Path(parse(Down, argv, command="federation down").folder)
    if not (folder / "logs").is_dir():  # nothing was ever started here: check that it is a federation
        read_server_settings(folder / "server")
    ended = processes.down(folder)
    names = ", ".join(name if name == "server" else f"client {name}" for name in ended)
    print(f"{folder}: stopped {names}" if names else f"{folder}: nothing was running")
    return 0


def run(argv: list[str]) -> int:
    from fedncv.engine.check import anchored
    from fedncv.flower import coordinator
    from fedncv.flower.folder import read_server_settings

    _refuse(argv)
    chosen = parse(_offered(Begin), argv, command="federation run")
    folder = Path(chosen.folder)
    clients = chosen.clients or read_server_settings(folder / "server").clients
    config = anchored(_config(chosen, clients=clients, per_round=chosen.per_round or clients), custom=("data",))
    _check_server(folder)
    coordinator.create(folder, chosen.name, config)
    return _follow(folder, chosen.name, chosen.seconds)


def resume(argv: list[str]) -> int:
    chosen = parse(Resume, argv, command="federation resume")
    _check_server(Path(chosen.folder))
    return _follow(Path(chosen.folder), chosen.name, chosen.seconds)


def _refuse(argv: list[str]) -> None:
    """Raise ValueError for a setting that has no effect on a run, with its value and the remedy."""
    reasons = _reasons()
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        option, _, value = word.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if option.startswith("--") and name in reasons:
            raise ValueError(f"{option} {value or following}: {reasons[name]}; leave {option} out")


def _reasons() -> dict[str, str]:
    """Return the settings that have no effect on a federation's run, each with the reason."""
    reasons = simulation_only() | dict.fromkeys(OF_INIT, "`fedncv federation init` has already divided the samples")
    return reasons | {"code": "it is filled in when the run is created"}


def _check_server(folder: Path) -> None:
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


def _follow(folder: Path, name: str, seconds: float) -> int:
    from fedncv.flower.coordinator import follow

    done = follow(folder, name, seconds=seconds, on_round=lambda number: print(f"round {number}", flush=True))
    print(f"{done.folder}: {done.rounds} rounds of {done.config.method}")
    return 0


def _config(chosen: RunConfig, **values: int) -> RunConfig:
    return RunConfig(**{f.name: getattr(chosen, f.name) for f in fields(RunConfig)} | values)


ACTIONS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "init": (init, "write certificates, keys, settings and data for a server and its clients"),
    "up": (up, "start all of them on this machine, to try it out"),
    "run": (run, "train a method on the federation"),
    "resume": (resume, "resume a run after its last finished round"),
    "status": (status, "show the processes, the connected clients and the progress of runs"),
    "down": (down, "stop everything that was started on this machine"),
    "server": (server, "run the server in the foreground"),
    "client": (client, "run one client in the foreground"),
}
