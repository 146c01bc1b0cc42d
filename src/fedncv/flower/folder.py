"""The folder of a federation: one part for each machine, and the authority that signs.

    authority/   ca.key ca.crt                 stays with the person who sets the federation up
    server/      server.toml                   the server's address, the number of clients, the form of a sample
                 rules.toml                    what the server accepts, and how long it waits
                 server.key server.crt ca.crt  its certificate
                 keys/client-0.pub ...         the keys of the accepted clients
                 roster.toml                   the same keys, for secure sums
                 nodes.json registered.json    client -> node, and its key; written when the keys are registered
                 runs/NAME/                    config, metrics and checkpoints of a run, as for any run of fedncv
                 audit.jsonl                   who sent what, in all runs (see ``audit``)
    clients/0/   client.toml                   its number, the server's address, its device
                 rules.toml                    what it agrees to (see ``consent``)
                 audit.jsonl                   what it was asked, and what it answered
                 node.key node.pub ca.crt      its key, and the certificate it trusts
                 roster.toml                   the public keys of all clients, for secure sums
                 data/samples.safetensors      its samples
                 secret                        for the marks of its samples (see ``handshake``), made in its first run
                 runs/RUN/                     its state between rounds

Copy server/ to the server's machine and clients/u/ to client u's machine. No part needs another one.
"""

import json
import os
import re
import secrets
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

from fedncv.config import RunConfig, read_toml
from fedncv.data import divide, load, split, standardised
from fedncv.flower import certificates, samples
from fedncv.flower.consent import RULES, ClientRules, write_client_rules
from fedncv.flower.halves import check
from fedncv.flower.keeper import Watch
from fedncv.flower.private import private_files, private_folder
from fedncv.flower.roster import write_rosters
from fedncv.flower.rules import Rules, write_rules
from fedncv.flower.samples import Form, form_of
from fedncv.flower.units import write_units
from fedncv.store import write_atomically

SERVER_VARIABLE = "FEDNCV_FEDERATION_SERVER"  # tells the ServerApp where the server's folder is
LINK = "federation"  # the name of the connection in Flower's own config
SECRET = "executor.secret"  # needed to get a task from Flower over the loopback interface
HEARTBEAT, WORKER = "heartbeat", "worker"  # files whose times say when Flower's threads last worked


class ServerSettings(NamedTuple):
    host: str  # address the gate listens on, for clients
    port: int
    inner_port: int  # of Flower's server behind the gate, open only to this machine
    clients: int
    form: Form
    metrics_port: int = 0  # on the loopback interface; 0: no metrics


class ClientSettings(NamedTuple):
    client: int
    server: str  # host:port
    port: int  # of the client's own Flower process, on its loopback
    device: str = "cpu"  # that it trains on: cpu, cuda, cuda:1
    metrics_port: int = 0  # on the loopback interface; 0: no metrics


def init(folder: Path, config: RunConfig, *, host: str, port: int, listen: str, rules: Rules = Rules()) -> None:
    """Write the folder; divide the dataset among the clients as a simulation of ``config`` does."""
    check(config)
    if not 0 <= port < 65536:
        raise ValueError(f"port must be from 1 to 65535, or 0 for a free one, not {port}")
    for address in (host, listen):
        if not address or any(c.isspace() for c in address):
            raise ValueError(f"{address!r} is not a host name or address; give one, for example fed.example.org")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; choose another folder, or remove it")
    dataset = load(config.data, config.data_dir or None)
    parts = divide(dataset, config.partition, num_clients=config.clients, seed=config.seed)
    clients = split(parts, config.test_share, config.seed)
    dataset = standardised(dataset, clients)
    inner_port, free, *ports = free_ports(config.clients + 2)
    port = port or free
    with private_files():
        for name in ("authority", "server/keys", "server/runs", "clients"):
            private_folder(folder / name)
        certificates.write_authority(folder / "authority")
        server = folder / "server"
        certificates.write_server(folder / "authority", server, [host])
        write_server_settings(server, ServerSettings(listen, port, inner_port, config.clients, form_of(dataset)))
        sizes = {u: len(part) for u, part in enumerate(clients.train)}
        (server / "rules.toml").write_text(write_rules(rules, sizes=sizes), encoding="utf-8")
        write_units(server)
        for u in range(config.clients):
            mine = write_client(folder, ClientSettings(u, f"{host}:{port}", ports[u]))
            samples.write(mine / "data", samples.part(dataset, clients, u))
        write_rosters(folder, read_keys(server))


def write_client(folder: Path, settings: ClientSettings) -> Path:
    """Write a client's part with a new key, and accept the key at the server; return the part."""
    mine, server = folder / "clients" / str(settings.client), folder / "server"
    with private_files():
        mine.mkdir(parents=True)
        (mine / "ca.crt").write_bytes((server / "ca.crt").read_bytes())
        write_client_settings(mine, settings)
        (mine / RULES).write_text(write_client_rules(ClientRules()), encoding="utf-8")
        write_units(mine)
        write_atomically(key_file(server, settings.client), certificates.write_node(mine), name="key")
    return mine


def free_ports(number: int) -> list[int]:
    """Return free ports of the loopback interface."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    try:
        return [int(s.getsockname()[1]) for s in sockets]
    finally:
        for s in sockets:
            s.close()


# ---- settings -------------------------------------------------------------------------------------------


def write_server_settings(server: Path, settings: ServerSettings) -> None:
    named = {name: value for name, value in settings._asdict().items() if name != "form"}
    lines = [f"{name} = {json.dumps(value)}{SAID.get(name, '')}" for name, value in named.items()]
    lines += ["", "[form]", *(f"{name} = {json.dumps(value)}" for name, value in settings.form._asdict().items())]
    (server / "server.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_server_settings(server: Path) -> ServerSettings:
    values = _read(server / "server.toml", ServerSettings)
    form = values["form"]
    if sorted(form) != sorted(Form._fields):
        raise ValueError(f"{server / 'server.toml'}: [form] must give {', '.join(Form._fields)}")
    shapes = {name: tuple(form[name]) for name in ("input_shape", "target_shape")}
    return ServerSettings(**{**values, "form": Form(**{**form, **shapes})})


def read_form(server: Path) -> Form:
    return read_server_settings(server).form


SAID = {
    "device": "  # that this client trains on: cpu, cuda, or one of several GPUs, such as cuda:1",
    "metrics_port": "  # serve health and metrics on this port of the loopback interface; 0: no metrics",
}


def write_client_settings(client: Path, settings: ClientSettings) -> None:
    lines = [f"{name} = {json.dumps(value)}{SAID.get(name, '')}" for name, value in settings._asdict().items()]
    (client / "client.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_client_settings(client: Path) -> ClientSettings:
    settings = ClientSettings(**_read(client / "client.toml", ClientSettings))
    if not isinstance(settings.device, str) or not re.fullmatch(r"cpu|cuda(:\d\d?)?", settings.device, re.ASCII):
        raise ValueError(
            f"{client / 'client.toml'}: unknown device {settings.device!r}; use cpu, cuda, or one of several "
            "GPUs, such as cuda:0"
        )
    return settings


def _read(path: Path, kind: Any) -> dict[str, Any]:
    """Return the settings of a part. Those with a default may be missing: earlier versions did not write them."""
    if not path.exists():
        raise ValueError(f"there is no {path}; `fedncv federation init FOLDER` writes it")
    values = read_toml(path)
    must, may = set(kind._fields) - set(kind._field_defaults), set(kind._field_defaults)
    if not must <= set(values) <= must | may:
        names = ", ".join(name for name in kind._fields if name in must)
        raise ValueError(
            f"{path} must give {names}, and may give {', '.join(sorted(may))}; it gives {', '.join(values)}"
        )
    port = values.get("metrics_port", 0)
    if type(port) is not int or not 0 <= port < 65536:
        raise ValueError(f"{path}: metrics_port must be from 1 to 65535, or 0 for no metrics, not {port!r}")
    return values


def read_nodes(server: Path) -> dict[int, int]:
    """Return client -> the node under which its key is registered."""
    path = server / "nodes.json"
    return {int(u): int(node) for u, node in json.loads(path.read_text()).items()} if path.exists() else {}


def write_nodes(server: Path, nodes: dict[int, int], registered: dict[int, str]) -> None:
    """Write client -> its node, and client -> the key under which its node is registered."""
    keys = json.dumps({str(u): registered[u] for u in sorted(registered)}, indent=1)
    said = json.dumps({str(u): str(node) for u, node in sorted(nodes.items())}, indent=1)
    with private_files():
        write_atomically(server / "registered.json", keys.encode(), name="registered")
        write_atomically(server / "nodes.json", said.encode(), name="nodes")


def key_file(server: Path, u: int) -> Path:
    """Return the file with the public key of client u."""
    return server / "keys" / f"client-{u}.pub"


def read_keys(server: Path) -> dict[int, str]:
    """Return client -> its public key, of the clients that may connect."""
    found = {}
    for path in (server / "keys").glob("client-*.pub"):
        number = path.stem.removeprefix("client-")
        if not number.isdigit():
            raise ValueError(f"{path} is not named after a client; name it client-0.pub for client 0")
        found[int(number)] = path.read_text(encoding="utf-8").strip()
    return dict(sorted(found.items()))


def read_registered(server: Path) -> dict[int, str]:
    """Return client -> the public key under which its node was registered."""
    path = server / "registered.json"
    return {int(u): key for u, key in json.loads(path.read_text()).items()} if path.exists() else {}


# ---- Flower's own settings and commands -----------------------------------------------------------------


def environment(home: Path, **more: str) -> dict[str, str]:
    """Return variables that turn off telemetry, update checks and installs, and keep Flower's files in ``home``."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {
        **os.environ,
        "PATH": path,  # Flower starts its helpers by name
        "FLWR_HOME": str(home.absolute()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        **more,
    }


def _home(place: Path) -> Path:
    """Return the folder of Flower's files, with a secret that only the owner's processes know."""
    home = private_folder(place / "flower")
    if not (home / SECRET).exists():
        certificates.write_secret(home / SECRET, secrets.token_bytes(32))
    return home


def server_environment(server: Path) -> dict[str, str]:
    home = _home(server)
    settings = read_server_settings(server)
    text = (
        f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\n'
        f'address = "{reachable(settings)}"\nroot-certificates = {json.dumps(str((server / "ca.crt").absolute()))}\n'
        "insecure = false\n"
    )
    with private_files():
        (home / "config.toml").write_text(text, encoding="utf-8")
    return environment(home, **{SERVER_VARIABLE: str(server.absolute())})


def client_environment(client: Path) -> dict[str, str]:
    return environment(_home(client))


def reachable(settings: ServerSettings) -> str:
    """Return the address of Flower's server for this machine."""
    return f"127.0.0.1:{settings.inner_port}"


def server_commands(server: Path) -> list[list[str]]:
    """Return the commands of Flower's server, on the loopback interface, of its tasks, and of the gate in front."""
    settings, at = read_server_settings(server), server.absolute()
    superlink = [
        "flower-superlink",
        *("--host", "127.0.0.1", "--port", str(settings.inner_port)),
        *("--ssl-ca-certfile", f"{at}/ca.crt", "--ssl-certfile", f"{at}/server.crt"),
        *("--ssl-keyfile", f"{at}/server.key"),
        *("--enable-supernode-auth", "--database", f"{at}/flower/state.db"),
        *("--isolation", "process", "--superexec-auth-secret-file", f"{at}/flower/{SECRET}"),
        "--disable-runtime-dependency-installation",
    ]
    executor = _script("executor", f"{at}/flower/{WORKER}", "--runtime-api-address", reachable(settings))
    executor += ["--root-certificates", f"{at}/ca.crt", "--superexec-auth-secret-file", f"{at}/flower/{SECRET}"]
    gate = _script("gate", settings.host, str(settings.port), str(settings.inner_port), str(at))
    return [superlink, executor, gate, *_exposition(at, settings.metrics_port)]


def client_commands(client: Path) -> list[list[str]]:
    """Return the commands of a client's Flower node, and of the tasks that it gets."""
    settings, at = read_client_settings(client), client.absolute()
    own, secret = f"127.0.0.1:{settings.port}", ("--superexec-auth-secret-file", f"{at}/flower/{SECRET}")
    node = [
        *_script("node", f"{at}/flower/{HEARTBEAT}", f"{at}/flower/{WORKER}"),
        *("--superlink", settings.server, "--root-certificates", f"{at}/ca.crt"),
        *("--auth-supernode-private-key", f"{at}/node.key"),
        *("--host", "127.0.0.1", "--port", str(settings.port)),
        *("--isolation", "process", *secret),
        *(
            "--node-config",
            f"client={settings.client} folder={json.dumps(str(at))} device={json.dumps(settings.device)}",
        ),
    ]
    executor = _script("executor", f"{at}/flower/{WORKER}", "--runtime-api-address", own, "--insecure", *secret)
    return [node, executor, *_exposition(at, settings.metrics_port)]


def _exposition(part: Path, port: int) -> list[list[str]]:
    """Return the command that serves metrics on the loopback interface, if the part has a port for it."""
    return [_script("exposition", str(part), str(port))] if port else []


def client_watch(client: Path) -> Watch:
    """Return what shows that a client's node works."""
    at = client.absolute()
    files = (f"{at}/flower/{HEARTBEAT}", f"{at}/flower/{WORKER}")
    return Watch(read_client_settings(client).server, f"{at}/ca.crt", files)


def last_contact(client: Path) -> float | None:
    """Return when the client's node was last answered by the server, in seconds since 1970; None: never."""
    times = [path.stat().st_mtime for name in (HEARTBEAT, WORKER) if (path := client / "flower" / name).exists()]
    return max(times, default=None)


def _script(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", f"fedncv.flower.{name}", *arguments]
