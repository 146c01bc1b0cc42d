"""Change who takes part in a federation: add a client, give one a new key, shut one out, renew the certificates.

The folder server/keys is what counts. The gate reads it at every change. Flower is told at once if its server runs on
this machine, and otherwise when it starts.
"""

import contextlib
import datetime
from pathlib import Path

from cryptography import x509

from fedncv.flower import certificates
from fedncv.flower.audit import AUDIT, append
from fedncv.flower.folder import (
    ClientSettings,
    free_ports,
    key_file,
    reachable,
    read_client_settings,
    read_keys,
    read_server_settings,
    write_client,
    write_server_settings,
)
from fedncv.flower.private import private_files
from fedncv.flower.processes import end, keeper_lives, register, start, wait_for_port
from fedncv.flower.record import fingerprint
from fedncv.flower.roster import write_rosters
from fedncv.store import write_atomically

HERE_SECONDS = 2.0  # a server on this machine takes connections within this time
PUBLIC = b"ecdsa-sha2-nistp384 "  # how the only kind of key begins that Flower takes


def revoke(folder: Path, u: int) -> bool:
    """Shut client u out; return whether Flower's server knows already."""
    server = folder / "server"
    _check_client(server, u)
    keys = read_keys(server)
    if u not in keys:
        raise ValueError(f"client {u} has no key in {server / 'keys'}; clients with a key: {_listed(keys)}")
    key_file(server, u).unlink()
    write_rosters(folder, read_keys(server))
    append(server / AUDIT, "revoked", client=u, key=fingerprint(keys[u]))
    end(folder, str(u))  # it would ask again and again
    return _tell(server)


def rotate_here(client: Path) -> Path:
    """Give a client's part a new key; return the file with the public key, which the server must get."""
    _new_key(client)
    return client / "node.pub"


def rotate(folder: Path, u: int, key: Path | None = None) -> bool:
    """Accept a new key of client u, in place of its old one; return whether Flower's server knows already.

    ``key`` is the file with the public key; None: the client's part is in ``folder``, and gets a new key here.
    """
    server, part = folder / "server", folder / "clients" / str(u)
    _check_client(server, u)
    if key is None and not (part / "client.toml").is_file():
        raise ValueError(
            f"there is no {part / 'client.toml'}: the part of client {u} is on another machine. Run "
            f"`fedncv federation rotate` there on its folder, copy its node.pub here, and name it with --key"
        )
    if key is None:
        _new_key(part)
    public = _read_public(key or part / "node.pub")
    known = {text.split()[1]: other for other, text in read_keys(server).items()}
    if (other := known.get(public.split()[1].decode())) is not None:
        raise ValueError(f"{key} is already the key of client {other}; make a new one with `fedncv federation rotate`")
    with private_files():
        write_atomically(key_file(server, u), public, name="key")
        write_rosters(folder, read_keys(server))
        append(server / AUDIT, "rotated", client=u, key=fingerprint(public.decode()))
    told = _tell(server)
    if keeper_lives(folder, str(u)):
        end(folder, str(u))
        start(folder, str(u))
    return told


def add(folder: Path, *, host: str = "") -> tuple[Path, bool]:
    """Write the part of one more client, without samples; return it, and whether Flower's server knows already.

    ``host`` is where it reaches the server; empty: where the clients in ``folder`` do.
    """
    server = folder / "server"
    settings = read_server_settings(server)
    others = [read_client_settings(path.parent).server for path in sorted((folder / "clients").glob("*/client.toml"))]
    if not host and not others:
        raise ValueError(f"no part of a client is in {folder}; name the server's address with --host")
    if any(c.isspace() for c in host):
        raise ValueError(f"{host!r} is not a host name or address; give one, for example fed.example.org")
    u = settings.clients
    address = f"{host}:{settings.port}" if host else others[0]
    part = write_client(folder, ClientSettings(u, address, free_ports(1)[0]))
    write_server_settings(server, settings._replace(clients=u + 1))
    write_rosters(folder, read_keys(server))
    append(server / AUDIT, "added", client=u, key=fingerprint(read_keys(server)[u]))
    return part, _tell(server)


def renew(folder: Path) -> datetime.datetime:
    """Renew the certificates of the authority and the server, for the same keys and names.

    Return when the authority's old certificate expires: until then clients that have it trust the server.
    """
    authority, server = folder / "authority", folder / "server"
    if not (authority / "ca.key").is_file():
        raise ValueError(f"there is no {authority / 'ca.key'}; renew on the machine where `init` ran, with its folder")
    old = expires(authority / "ca.crt")
    certificates.renew_authority(authority)
    certificates.renew_server(authority, server)
    for part in sorted((folder / "clients").glob("*/client.toml")):
        write_atomically(part.with_name("ca.crt"), (authority / "ca.crt").read_bytes(), name="certificate")
    return old


def expires(certificate: Path) -> datetime.datetime:
    """Return until when a certificate is valid."""
    return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc


def _new_key(part: Path) -> None:
    read_client_settings(part)  # raise for a wrong folder
    for name in ("node.key", "node.pub"):
        with contextlib.suppress(FileNotFoundError):
            (part / name).replace(part / f"{name}.old")
    certificates.write_node(part)


def _read_public(path: Path) -> bytes:
    try:
        text = path.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; copy node.pub from the client's part") from None
    if not text.startswith(PUBLIC) or len(text.splitlines()) != 1 or len(text.split()) < 2:
        raise ValueError(f"{path} is not the public key of a client; copy node.pub from the client's part")
    return text


def _check_client(server: Path, u: int) -> None:
    clients = read_server_settings(server).clients
    if not 0 <= u < clients:
        raise ValueError(f"client must be from 0 to {clients - 1}, not {u}")


def _tell(server: Path) -> bool:
    try:
        wait_for_port(reachable(read_server_settings(server)), HERE_SECONDS)
    except ValueError:
        return False
    register(server)
    return True


def _listed(clients: dict[int, str]) -> str:
    return ", ".join(map(str, sorted(clients))) or "none"
