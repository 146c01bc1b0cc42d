"""The only access to the server from outside: it forwards clients' requests and rejects all others.

Flower serves its clients (/v1/fleet/...) and its control interface on one port. The control interface has no
authentication and can start any code. So only this machine can reach that port, and in front of it runs

    python -m fedncv.flower.gate HOST PORT INNER_PORT FOLDER

with the server's FOLDER. It ends TLS and forwards POST /v1/fleet/NAME to the inner port (over TLS again), if the
headers have a valid signature of a client (see ``admission``). It rejects every other request before reading its body.

A client repeats a request whose answer was lost. Flower would act twice: a message that is pulled twice is lost, and
an object that is pushed twice is an error. So a request with a ``ONCE`` header that came before gets the same answer,
and is not forwarded again.

Strangers hold at most ``CONNECTIONS`` connections and a few KiB for each. When there are more, the oldest one that has
not sent a valid signature is closed. So they cannot keep a client out: its connections are young, or have signed.
"""

import asyncio
import contextlib
import re
import signal
import socket
import ssl
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import h11
import httpx

from fedncv.flower.admission import Admission, RefusedError, Room

LARGEST = 16 * 2**20  # Flower sends arrays in pieces of 5 MiB
ALLOWED = re.compile(rb"/v1/fleet/([a-z-]+)")
ONCE = b"fedncv-once"
REPEATABLE = {b"pull-object", b"get-fab", b"get-run", b"send-node-heartbeat"}  # may be acted on twice, and may be large
HOP = {b"host", b"connection", b"content-length", b"transfer-encoding", b"content-encoding", b"accept-encoding", ONCE}

HANDSHAKE_SECONDS = 10.0
HEADER_SECONDS = 10.0  # for all headers of a first request
IDLE_SECONDS = 60.0  # between two requests of a client
PIECE_SECONDS = 20.0  # for the next piece of a body
BODY_SECONDS = 300.0  # for a whole body
HEADER_BYTES = 16 * 2**10
CONNECTIONS, PER_ADDRESS = 256, 32  # connections without a valid signature
ANSWERS, ANSWER_BYTES = 64, 2**18  # answers that are remembered for each client, and the largest of them


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


Forward = Callable[[bytes, bytes, list[tuple[bytes, bytes]]], Coroutine[Any, Any, Answer]]


class Gate:
    """Answers the requests of connections. ``forward(path, body, headers)`` returns the answer from inside."""

    def __init__(self, admission: Admission, forward: Forward, room: Room | None = None) -> None:
        self._admission, self._forward = admission, forward
        self.room = room or Room()
        self._answers: dict[int, OrderedDict[tuple[bytes, bytes], asyncio.Task[Answer]]] = {}
        self._strangers: dict[asyncio.Task[None], str] = {}  # in order of age; the value is the address

    # ---- connections ----------------------------------------------------------------------------------

    def accept(self, connection: socket.socket, address: str, context: ssl.SSLContext) -> asyncio.Task[None]:
        """Serve a connection in a task of its own; close the oldest of the strangers' if there are too many."""
        same = [task for task, its in self._strangers.items() if its == address]
        for task in same[: max(0, len(same) - PER_ADDRESS + 1)]:
            self._strangers.pop(task)
            task.cancel()
        while len(self._strangers) >= CONNECTIONS:
            task = next(iter(self._strangers))
            self._strangers.pop(task)
            task.cancel()
        task = asyncio.get_running_loop().create_task(self._connected(connection, address, context))
        self._strangers[task] = address
        task.add_done_callback(lambda done: self._strangers.pop(done, None))
        task.add_done_callback(lambda _: connection.close())
        return task

    async def _connected(self, connection: socket.socket, address: str, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=HEADER_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        with contextlib.suppress(OSError, TimeoutError):
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            try:
                await self.serve(reader, writer, address)
                async with asyncio.timeout(PIECE_SECONDS):
                    writer.close()
                    await writer.wait_closed()
            finally:
                transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        """Answer requests until the connection ends, or a request is rejected."""
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_BYTES)
        seconds = HEADER_SECONDS
        while True:
            try:
                async with asyncio.timeout(seconds):
                    request = await _next(http, reader)
                if not isinstance(request, h11.Request):
                    return
                answer = await self._answer(http, reader, writer, request, address)
            except RefusedError as refused:
                answer = Answer(refused.status, refused.reason.encode())
            except h11.RemoteProtocolError as error:
                answer = Answer(error.error_status_hint, b"not a request of HTTP/1.1")
            async with asyncio.timeout(BODY_SECONDS):
                alive = await _send(http, writer, answer)
            if not alive:
                return
            http.start_next_cycle()
            seconds = IDLE_SECONDS

    # ---- requests -------------------------------------------------------------------------------------

    async def _answer(
        self,
        http: h11.Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        request: h11.Request,
        address: str,
    ) -> Answer:
        allowed = ALLOWED.fullmatch(request.target)
        if request.method != b"POST" or allowed is None:
            raise RefusedError(403, "only clients' requests are let through here")
        headers = dict(request.headers)
        if len(headers) < len(request.headers):  # Flower might read the other one
            raise RefusedError(400, "a header is there twice")
        unknown = LARGEST if b"transfer-encoding" in headers else 0
        declared = int(headers.get(b"content-length", unknown))  # h11 lets only digits through
        if declared > LARGEST:
            raise RefusedError(413, "a request of more bytes than are let through here")
        client = self._admission.admit(headers, address, now=time.monotonic(), time=time.time())
        self._strangers.pop(asyncio.current_task(), None)  # type: ignore[arg-type]  # there is one
        async with self.room.take(client, declared):
            if http.they_are_waiting_for_100_continue:
                writer.write(http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            async with asyncio.timeout(BODY_SECONDS):
                body = await _body(http, reader, declared)
            kept = [(name, value) for name, value in request.headers if name not in HOP]
            answer = await self._once(client, allowed[1], headers.get(ONCE), request.target, body, kept)
        if allowed[1] == b"deactivate-node" and answer.status == 200:
            self._admission.release(client)
        return answer

    async def _once(
        self,
        client: int,
        name: bytes,
        once: bytes | None,
        path: bytes,
        body: bytes,
        headers: list[tuple[bytes, bytes]],
    ) -> Answer:
        """Forward the request, or return the answer to the same request if it came before."""
        if once is None or name in REPEATABLE:
            return await self._forward(path, body, headers)
        answers = self._answers.setdefault(client, OrderedDict())
        key = (name, once)
        if (task := answers.get(key)) is None:
            # a task of its own: it goes on when the client's connection ends
            task = answers[key] = asyncio.get_running_loop().create_task(self._forward(path, body, headers))
            while len(answers) > ANSWERS:
                answers.popitem(last=False)
        answer = await asyncio.shield(task)
        if answer.status >= 300 or len(answer.body) > ANSWER_BYTES:
            answers.pop(key, None)  # only what Flower has acted on
        return answer


async def _next(http: h11.Connection, reader: asyncio.StreamReader) -> h11.Event | type[h11.PAUSED]:
    while True:
        event = http.next_event()
        if event is not h11.NEED_DATA:
            assert not isinstance(event, type) or event is h11.PAUSED
            return event
        http.receive_data(await reader.read(HEADER_BYTES))


async def _body(http: h11.Connection, reader: asyncio.StreamReader, largest: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        async with asyncio.timeout(PIECE_SECONDS):
            event = await _next(http, reader)
        if isinstance(event, h11.EndOfMessage):
            return b"".join(parts)
        if not isinstance(event, h11.Data):
            raise RefusedError(400, "the body ends too early")
        size += len(event.data)
        if size > largest:  # a request without a stated length
            raise RefusedError(413, "a request of more bytes than are let through here")
        parts.append(bytes(event.data))


async def _send(http: h11.Connection, writer: asyncio.StreamWriter, answer: Answer) -> bool:
    """Send the answer; return whether the connection can have another request."""
    if http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return False
    headers = [*answer.headers, (b"content-length", str(len(answer.body)).encode())]
    if http.their_state is not h11.DONE:  # we do not read the rest
        headers.append((b"connection", b"close"))
    events = (h11.Response(status_code=answer.status, headers=headers), h11.Data(answer.body), h11.EndOfMessage())
    for event in events:
        writer.write(http.send(event) or b"")
    await writer.drain()
    return {http.our_state, http.their_state} == {h11.DONE}


# ---- inside -----------------------------------------------------------------------------------------------


def inside(client: httpx.AsyncClient, address: str) -> Forward:
    """Return a function that forwards requests to Flower's server."""

    async def forward(path: bytes, body: bytes, headers: list[tuple[bytes, bytes]]) -> Answer:
        try:
            reply = await client.post(address + path.decode("ascii"), content=body, headers=headers)
        except httpx.HTTPError:
            return Answer(503, b"the server is starting")  # clients retry
        kept = tuple((name, value) for name, value in reply.headers.raw if name.lower() not in HOP)
        return Answer(reply.status_code, reply.content, kept)

    return forward


def listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on the addresses of ``host``."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets = []
    for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
        sockets.append(socket.create_server(address[:2], family=family, backlog=128))
        sockets[-1].setblocking(False)
    return sockets


async def run(gate: Gate, sockets: list[socket.socket], context: ssl.SSLContext) -> None:
    """Serve the connections of all sockets until this is cancelled."""
    loop = asyncio.get_running_loop()
    serving: set[asyncio.Task[None]] = set()

    async def accept(listening: socket.socket) -> None:
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except OSError:  # no file is free for it
                await asyncio.sleep(0.1)
                continue
            task = gate.accept(connection, address[0], context)
            serving.add(task)
            task.add_done_callback(serving.discard)

    try:
        async with asyncio.TaskGroup() as group:
            for listening in sockets:
                group.create_task(accept(listening))
    finally:
        for task in list(serving):
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def main(host: str, port: str, inner_port: str, folder: str) -> None:
    server = Path(folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(server / "server.crt", server / "server.key")
    trusted = ssl.create_default_context(cafile=server / "ca.crt")
    admission = Admission(server / "keys")

    async def note() -> None:
        before: dict[int, object] = {}
        while True:
            await asyncio.sleep(1.0)
            if before != admission.last:
                before = dict(admission.last)
                with contextlib.suppress(OSError):  # a full disk: `status` shows older times
                    admission.write_contacts(server / "flower" / "contacts.json")

    sockets = listen(host, int(port))
    limits = httpx.Limits(max_connections=100, max_keepalive_connections=20)
    async with httpx.AsyncClient(verify=trusted, timeout=60.0, trust_env=False, limits=limits) as client:
        gate = Gate(admission, inside(client, f"https://127.0.0.1:{inner_port}"))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(note()), group.create_task(run(gate, sockets, context))]
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, lambda: [task.cancel() for task in tasks])
    for listening in sockets:
        listening.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5]))
