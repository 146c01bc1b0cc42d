"""Start, watch and end SuperLink and SuperNodes as processes.

Each runs under a keeper (see ``keeper``), which restarts it whenever it ends. A keeper leads its own process
group, so ending the group ends everything that Flower has started in it.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

from fedncv.engine.problem import find_device
from fedncv.flower.audit import AUDIT, verify
from fedncv.flower.consent import read_client_rules
from fedncv.flower.folder import (
    LINK,
    client_commands,
    client_environment,
    client_watch,
    key_file,
    reachable,
    read_client_settings,
    read_keys,
    read_nodes,
    read_registered,
    read_server_settings,
    server_commands,
    server_environment,
    write_nodes,
)
from fedncv.flower.keeper import keep, watch_words
from fedncv.flower.private import private_files, private_folder

KEEPER = str(Path(__file__).with_name("keeper.py"))
GRACE_SECONDS = 10.0  # for an orderly end; then the group is killed
DOWN = "down"  # a file of the logs' folder
CALL_SECONDS = 180.0  # for a single command of Flower's
AT_A_TIME = 8  # commands of Flower's: each is a process of 100 MB


# ---- in the foreground ------------------------------------------------------------------------------------


def keep_server(server: Path) -> int:
    """Run the server until this process is stopped; register its clients' keys as soon as it is up."""
    read_server_settings(server)  # raise for a wrong folder before it is changed
    private_folder(server)
    environment = server_environment(server)
    _check_files(server, "server.key", "server.crt", "ca.crt")
    check_part(server)
    (server.parent / "logs" / DOWN).unlink(missing_ok=True)
    Thread(target=_register_or_say_why, args=(server,), daemon=True).start()
    return keep(server_commands(server), environment)


def keep_client(client: Path) -> int:
    commands = client_commands(client)
    _check_files(client, "node.key", "ca.crt")
    check_part(client)
    private_folder(client)
    return keep(commands, client_environment(client), client_watch(client))


def check_part(part: Path) -> None:
    """Raise ValueError, before anything is started, for a part that would refuse or fail every request."""
    if (part / "client.toml").is_file():
        read_client_rules(part)
        try:
            find_device(read_client_settings(part).device)
        except ValueError as error:
            raise ValueError(f"{part / 'client.toml'}: {error}") from None
    if (part / AUDIT).exists():
        verify(part / AUDIT)


def _check_files(place: Path, *names: str) -> None:
    """Raise ValueError for missing files, instead of restarting a process for ever."""
    for name in names:
        if not (place / name).is_file():
            raise ValueError(f"there is no {place / name}; copy the whole folder that `init` wrote for this machine")


def _register_or_say_why(server: Path) -> None:
    try:
        register(server)
        print(f"fedncv: clients {sorted(read_nodes(server))} may join", file=sys.stderr, flush=True)
    except ValueError as error:
        print(f"fedncv: {error}", file=sys.stderr, flush=True)


def register(server: Path, *, seconds: float = CALL_SECONDS) -> None:
    """Let Flower know exactly the keys in the server's folder: register new ones, unregister all that are gone."""
    wait_for_port(reachable(read_server_settings(server)), seconds)
    keys, nodes = read_keys(server), read_nodes(server)
    known = read_registered(server)
    registered = {u: keys[u] for u in nodes if u in keys} | known  # earlier versions noted no keys
    if registered != known:
        write_nodes(server, nodes, registered)
    for u in [u for u in nodes if u not in keys or keys[u] != registered[u]]:
        flwr(server, "supernode", "unregister", str(nodes.pop(u)), LINK, seconds=seconds)
        registered.pop(u, None)
        write_nodes(server, nodes, registered)
    new = sorted(set(keys) - set(nodes))
    for first in range(0, len(new), AT_A_TIME):
        calls = {
            u: _start_flwr(server, "supernode", "register", str(key_file(server, u)), LINK)
            for u in new[first : first + AT_A_TIME]
        }
        try:
            for u, call in calls.items():
                nodes[u], registered[u] = int(_answer(call, seconds)["node-id"]), keys[u]
                write_nodes(server, nodes, registered)
        finally:
            for call in calls.values():
                call.kill()
                call.wait()


def wait_for_port(address: str, seconds: float) -> None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise ValueError(f"no reply from {address} after {seconds:g} s; see the server's log") from None
            time.sleep(0.3)


# ---- Flower's command ------------------------------------------------------------------------------------


def flwr(server: Path, *words: str, seconds: float = CALL_SECONDS) -> dict[str, Any]:
    """Return the JSON output of Flower's own command."""
    return _answer(_start_flwr(server, *words), seconds)


def _start_flwr(server: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["flwr", *words, "--format", "json"],
        env=server_environment(server),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _answer(call: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    words = " ".join(map(str, call.args[1:3]))  # type: ignore[index]  # a list, see above
    try:
        said, _ = call.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        call.kill()
        call.communicate()
        raise ValueError(f"`flwr {words}` does not answer within {seconds:g} s; is the server up?") from None
    start = said.find("{")
    try:
        answer: dict[str, Any] = json.loads(said[start:]) if start >= 0 else {}
    except ValueError:
        answer = {}
    if call.returncode or not answer.get("success"):
        reason = answer.get("error-message") or said.strip() or "no answer"
        raise ValueError(f"`flwr {words}` failed: {' '.join(str(reason).split())[:300]}")
    return answer


def online(server: Path, *, seconds: float = CALL_SECONDS) -> list[int]:
    """Return the clients that are connected now."""
    wait_for_port(reachable(read_server_settings(server)), min(seconds, 5.0))
    nodes = flwr(server, "supernode", "list", LINK, seconds=seconds)["nodes"]
    there = {int(node["node-id"]) for node in nodes if node["status"] == "online"}
    return sorted(u for u, node in read_nodes(server).items() if node in there)


def contacts(server: Path) -> dict[int, tuple[str, float]]:
    """Return client -> the address of its last request that the gate let through, and when: seconds since 1970."""
    path = server / "flower" / "contacts.json"
    try:
        said = json.loads(path.read_bytes())
        return {int(u): (str(last["address"]), float(last["time"])) for u, last in said.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # no client has come yet


# ---- a federation on this machine -----------------------------------------------------------------------


def start(folder: Path, name: str) -> int:
    """Start "server", or the client of that number, under a keeper in its own process group; return the process id."""
    place = folder / "server" if name == "server" else folder / "clients" / name
    commands = server_commands(place) if name == "server" else client_commands(place)
    check_part(place)
    environment = server_environment(place) if name == "server" else client_environment(place)
    watch = [] if name == "server" else watch_words(client_watch(place))
    private_folder(place)
    logs = private_folder(folder / "logs")
    words = [word for command in commands for word in ("--", *command)][1:]
    arguments = [sys.executable, "-P", KEEPER, *watch, *words]
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    pid = os.posix_spawn(  # not a Popen: it must outlive this process
        sys.executable,
        arguments,
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(logs / f"{name}.log"), append, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    (logs / DOWN).unlink(missing_ok=True)
    with private_files():
        (logs / f"{name}.pid").write_text(json.dumps({"pid": pid, "began": _began(pid)}))
    return pid


def names(folder: Path) -> list[str]:
    """Return the server and the clients whose parts are in this folder."""
    clients = sorted(int(path.parent.name) for path in (folder / "clients").glob("*/client.toml"))
    return ["server", *map(str, clients)]


def group(folder: Path, name: str) -> int | None:
    """Return the process group of a keeper started here, if any process of it still runs."""
    path = folder / "logs" / f"{name}.pid"
    if not path.exists():
        return None
    said = json.loads(path.read_text())
    pid = int(said["pid"])
    if not _has_members(pid):
        return None
    began = _began(pid)  # None: the leader has ended, and a group that still has members keeps its number
    return pid if began is None or said["began"] is None or began == said["began"] else None


def keeper_lives(folder: Path, name: str) -> bool:
    """Return whether the keeper itself runs, not only processes that it started."""
    pid = group(folder, name)
    return pid is not None and _began(pid) is not None


def up(folder: Path, *, seconds: float = 180.0) -> list[int]:
    """Start what is not running, and wait until all clients are connected; return the connected clients."""
    deadline = time.monotonic() + seconds
    keys = read_keys(folder / "server")
    server, expected = folder / "server", [int(name) for name in names(folder)[1:] if int(name) in keys]
    for name in ("server", *map(str, expected)):
        if not keeper_lives(folder, name):
            end(folder, name)  # what a killed keeper has left
            start(folder, name)
        if name == "server":
            register(server, seconds=seconds)
    there: list[int] = []
    while time.monotonic() < deadline:
        there = online(server)
        if there == expected:
            return there
        time.sleep(1.0)
    missing = sorted(set(expected) - set(there))
    raise ValueError(f"clients {missing} are not connected after {seconds:g} s; see {folder / 'logs'}")


def down(folder: Path) -> list[str]:
    """End everything that was started here, clients first; return the names of what was running."""
    mark_down(folder)
    running = {name: pid for name in reversed(names(folder)) if (pid := group(folder, name)) is not None}
    for name, pid in running.items():
        if name != "server":  # clients sign off at the server
            _signal(os.kill, pid, signal.SIGTERM)
    for name in running:
        end(folder, name)
    for path in (folder / "logs").glob("*.pid"):
        path.unlink()
    strays = _strays(folder)
    for pid in strays:
        _end_group(pid, os.kill)
    return list(running) + [f"process group {pid}" for pid in strays]


def _strays(folder: Path) -> list[int]:
    """Return keepers of this folder that no file names, for example after two `up` at the same time."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            words = path.read_bytes().decode(errors="replace").split("\0")
            pid = int(path.parent.name)
            ours = KEEPER in words[:4] and any(word.startswith(f"{folder.absolute()}/") for word in words)
            if ours and os.getpgid(pid) == pid:
                found.append(pid)
    return found


def mark_down(folder: Path) -> None:
    """Note that the federation was stopped on purpose, so that a waiting `run` ends."""
    if (folder / "logs").is_dir():
        (folder / "logs" / DOWN).touch()


def is_down(folder: Path) -> bool:
    """Return whether the federation was stopped on this machine, and not started since."""
    return (folder / "logs" / DOWN).exists()


def end(folder: Path, name: str, *, how: signal.Signals = signal.SIGTERM) -> None:
    """End one keeper and all its processes; with SIGKILL if it does not end by itself."""
    pid = group(folder, name)
    if pid is None:
        return
    lives = keeper_lives(folder, name)
    _end_group(pid, None if how is not signal.SIGTERM else os.kill if lives else os.killpg)


def _end_group(pid: int, ask: Callable[[int, int], None] | None) -> None:
    """End a process group: ask its keeper, or all its processes, with SIGTERM; then with SIGKILL.

    A keeper ends its children, which sign off at the server. Without a keeper they get the signal themselves.
    """
    if ask is not None:
        _signal(ask, pid, signal.SIGTERM)
        _wait_for_end(pid)
    _signal(os.killpg, pid, signal.SIGKILL)
    _wait_for_end(pid)


def _wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while _has_members(pid) and time.monotonic() < deadline:
        _reap(pid)
        time.sleep(0.05)


def _has_members(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _signal(send: Callable[[int, int], None], pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        send(pid, number)


def _reap(pid: int) -> None:
    """Wait for a child of this process, which stays in the process table until then."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _began(pid: int) -> int | None:
    """Return the start time of the process, in the kernel's ticks; None if it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if words[0] in "ZX" else int(words[19])
    except (OSError, IndexError, ValueError):
        return None
