"""Who may send a request through the gate, and how much at a time. Decided by the headers, before a body is read.

    key          one of the clients' keys in the server's folder; removing a file shuts the key out at once
    signature    of the timestamp in the headers, not older than Flower accepts, and not used before
    address      a key is used from one address at a time, until it is silent for ``SILENT_SECONDS``
    bytes        bodies that are being read or forwarded: at most ``PER_KEY`` for a key and ``IN_TOTAL`` for all

A signature covers the timestamp only, as Flower's nodes make it, not the path and the body. TLS protects those in
transit. Flower then checks the signature again, and that the key belongs to the node that the request is for.
"""

import asyncio
import contextlib
import datetime
import ipaddress
import json
import os
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

OLDEST_SECONDS, NEWEST_SECONDS = 305.0, -5.0  # Flower's limits for the age of a signature
SILENT_SECONDS = 60.0  # after that Flower, too, takes a client as gone
SIGNATURES = 50_000  # of one key, remembered; more than 160 requests a second
PER_KEY = 64 * 2**20
IN_TOTAL = 512 * 2**20
WAIT_SECONDS = 30.0  # for room, before a client is told to try again


class RefusedError(Exception):
    """A request that is not let through."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Last(NamedTuple):
    """A client's last request."""

    address: str
    at: float  # monotonic
    time: float  # in seconds since 1970


class Admission:
    """Decides on requests. ``keys`` is the folder of client-0.pub, client-1.pub, ..."""

    def __init__(self, keys: Path) -> None:
        self._keys, self._read_at = keys, -1
        self._known: dict[bytes, tuple[int, ec.EllipticCurvePublicKey]] = {}
        self._used: dict[int, dict[int, float]] = {}  # client -> signature -> when it was used
        self.last: dict[int, Last] = {}
        self.told: set[tuple[int, str]] = set()  # second addresses that were reported

    def admit(self, headers: Mapping[bytes, bytes], address: str, *, now: float, time: float) -> int:
        """Return the client that sent these headers, or raise RefusedError. ``now`` is monotonic, ``time`` is not."""
        try:
            sent = b64decode(headers[b"flwr-public-key"], validate=True)
            signature = b64decode(headers[b"flwr-signature"], validate=True)
            signed = headers[b"flwr-timestamp"]
            age = time - datetime.datetime.fromisoformat(signed.decode("ascii")).timestamp()
            client, key = self._clients()[sent]
            if not NEWEST_SECONDS < age < OLDEST_SECONDS:
                raise ValueError("too old or too new")
            key.verify(signature, signed, ec.ECDSA(hashes.SHA256()))
            first, _ = decode_dss_signature(signature)  # a signature (r, s) is also valid as (r, -s)
        except (KeyError, ValueError, OverflowError, OSError, InvalidSignature):
            raise RefusedError(401, "no valid signature of a registered client") from None
        self._note_signature(client, first, now)
        self._note_address(client, _network(address), now, time)
        return client

    def release(self, client: int) -> None:
        """Let the client's key be used from another address: the client has signed off."""
        if client in self.last:
            self.last[client] = self.last[client]._replace(at=float("-inf"))

    def _clients(self) -> dict[bytes, tuple[int, ec.EllipticCurvePublicKey]]:
        """Return key, as it is sent -> its client. The files are read again when the folder changes."""
        try:
            changed = os.stat(self._keys).st_mtime_ns
        except FileNotFoundError:
            return {}
        if changed != self._read_at:
            self._known, self._read_at = _read_keys(self._keys), changed
        return self._known

    def _note_signature(self, client: int, signature: int, now: float) -> None:
        used = self._used.setdefault(client, {})
        while used and now - next(iter(used.values())) >= OLDEST_SECONDS - NEWEST_SECONDS:  # they are in order of time
            del used[next(iter(used))]
        if signature in used:
            raise RefusedError(403, "a signature that was used before")
        if len(used) >= SIGNATURES:
            raise RefusedError(503, "too many requests")
        used[signature] = now

    def _note_address(self, client: int, address: str, now: float, time: float) -> None:
        last = self.last.get(client)
        if last is not None and last.address != address and now - last.at < SILENT_SECONDS:
            if (client, address) not in self.told:
                self.told.add((client, address))
                print(
                    f"fedncv: the key of client {client} is used from {last.address} and from {address}; the second is "
                    "refused. If the client has not moved, its key was copied: fedncv federation rotate",
                    flush=True,
                )
            raise RefusedError(503, "this key is in use from another address")
        self.told.discard((client, address))
        self.last[client] = Last(address, now, time)

    def write_contacts(self, path: Path) -> None:
        """Write client -> its last request, for `fedncv federation status`."""
        said = {str(u): {"address": last.address, "time": last.time} for u, last in sorted(self.last.items())}
        new = path.with_name(path.name + ".new")
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(said, file)
        new.replace(path)


def _network(address: str) -> str:
    """Return the address; of IPv6 only the network, because machines change the rest on their own."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


def _read_keys(folder: Path) -> dict[bytes, tuple[int, ec.EllipticCurvePublicKey]]:
    form, encoding = serialization.PublicFormat.SubjectPublicKeyInfo, serialization.Encoding.PEM
    known = {}
    for path in sorted(folder.glob("client-*.pub")):
        try:
            key, client = serialization.load_ssh_public_key(path.read_bytes()), int(path.stem.removeprefix("client-"))
        except (OSError, ValueError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, ec.EllipticCurvePublicKey):
            print(f"fedncv: {path} is not the key of a client; it is left out", flush=True)
            continue
        known[key.public_bytes(encoding, form)] = (client, key)
    return known


class Room:
    """Bytes of bodies that are held at a time. ``most`` is the largest number that was held."""

    def __init__(self, *, per_key: int = PER_KEY, in_total: int = IN_TOTAL, seconds: float = WAIT_SECONDS) -> None:
        self._per_key, self._in_total, self._seconds = per_key, in_total, seconds
        self._changed = asyncio.Condition()
        self._of: dict[int, int] = {}
        self.held = self.most = 0

    @contextlib.asynccontextmanager
    async def take(self, client: int, size: int) -> AsyncIterator[None]:
        """Hold ``size`` bytes for the client; raise RefusedError if there is no room for some seconds."""

        def free() -> bool:
            return self._of.get(client, 0) + size <= self._per_key and self.held + size <= self._in_total

        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(free), self._seconds)
            except TimeoutError:
                raise RefusedError(503, "too many bytes at a time; try again") from None
            self._of[client] = self._of.get(client, 0) + size
            self.held += size
            self.most = max(self.most, self.held)
        try:
            yield
        finally:
            async with self._changed:
                self.held -= size
                self._of[client] -= size
                if not self._of[client]:
                    del self._of[client]
                self._changed.notify_all()
