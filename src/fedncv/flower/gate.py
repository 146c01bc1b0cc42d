"""The only access to the server from outside: it forwards clients' requests and rejects all others.

Flower serves its clients (/v1/fleet/...) and its control interface on one port. The control interface has no
authentication and can start any code. So only this machine can reach that port, and in front of it runs

    python gate.py HOST PORT INNER_PORT CERTIFICATE KEY AUTHORITY

which ends TLS and forwards POST /v1/fleet/NAME to the inner port (over TLS again). It rejects every other path, and
every request of more than ``LARGEST`` bytes before reading it. Flower then authenticates the client by its key.

It imports nothing of fedncv, so that it starts fast and stays small.
"""

import re
import ssl
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import httpx
import uvicorn

LARGEST = 16 * 2**20  # Flower sends arrays in pieces of 5 MiB
ALLOWED = re.compile(r"/v1/fleet/[a-z-]+")
HOP = {"host", "connection", "content-length", "transfer-encoding", "content-encoding", "accept-encoding"}

Message = MutableMapping[str, Any]


class TooLargeError(Exception):
    pass


class Gate:
    """An ASGI application."""

    def __init__(self, client: httpx.AsyncClient, inner: str) -> None:
        self._client, self._inner = client, inner

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if scope["method"] != "POST" or not ALLOWED.fullmatch(path) or scope["query_string"]:
            await _answer(send, 403, b"only clients' requests are let through here")
            return
        try:
            body = await _read(scope, receive)
        except TooLargeError:
            await _answer(send, 413, b"a request of more bytes than are let through here")
            return
        headers = [(name, value) for name, value in scope["headers"] if name.decode("latin-1").lower() not in HOP]
        try:
            reply = await self._client.post(self._inner + path, content=body, headers=headers)
        except httpx.TransportError:
            await _answer(send, 503, b"the server is starting")  # clients retry
            return
        kept = [(name, value) for name, value in reply.headers.raw if name.decode("latin-1").lower() not in HOP]
        await _answer(send, reply.status_code, reply.content, kept)


async def _read(scope: Message, receive: Callable[[], Awaitable[Message]]) -> bytes:
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if not declared.isdigit() or int(declared) > LARGEST:
        raise TooLargeError
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b""
        part = message.get("body", b"")
        size += len(part)
        if size > LARGEST:  # a request without a stated length
            raise TooLargeError
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(
    send: Callable[[Message], Awaitable[None]],
    status: int,
    body: bytes,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*(headers or []), length]})
    await send({"type": "http.response.body", "body": body})


def main(host: str, port: str, inner_port: str, certificate: str, key: str, authority: str) -> None:
    trusted = ssl.create_default_context(cafile=authority)
    client = httpx.AsyncClient(verify=trusted, timeout=60.0, trust_env=False)
    gate = Gate(client, f"https://127.0.0.1:{inner_port}")
    uvicorn.run(
        gate,
        host=host,
        port=int(port),
        ssl_certfile=certificate,
        ssl_keyfile=key,
        access_log=False,
        lifespan="off",
        log_level="warning",
    )


if __name__ == "__main__":
    main(*sys.argv[1:7])
