"""The gate lets requests with a client's signature through and nothing else, and reads nothing of all others."""

import asyncio
import base64
import datetime
import socket
import ssl

import h11
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

import httpx
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supernode.cli.flower_supernode import load_ssh_private_key

from fedncv.flower import certificates, gate
from fedncv.flower.admission import Admission, RefusedError, Room
from fedncv.flower.gate import CONNECTIONS, LARGEST, ONCE, PER_ADDRESS, Answer, Gate, inside, listen, run

ORDER = int(  # of the group of P-384
    "ffffffffffffffffffffffffffffffffffffffffffffffffc7634d81f4372ddf581a0db248b0a77aecec196accc52973", 16
)


@pytest.fixture
def keys(tmp_path):
    """Private keys of two clients, whose public ones the gate knows, and of a stranger."""
    made, known = [], tmp_path / "keys"
    known.mkdir()
    for u in range(3):
        part = tmp_path / str(u)
        part.mkdir()
        public = certificates.write_node(part)
        if u < 2:
            (known / f"client-{u}.pub").write_bytes(public)
        made.append(load_ssh_private_key((part / "node.key").read_bytes(), None))
    return made


class Inside:
    """Flower's server: records what arrives, and answers with ``answer``."""

    def __init__(self, answer=None, wait=None):
        self.arrived, self.answer, self.wait = [], answer or Answer(200, b"inside", ((b"x-flower", b"yes"),)), wait

    async def __call__(self, path, body, headers):
        self.arrived.append((path, body, dict(headers)))
        if self.wait is not None:
            await self.wait.wait()
        return self.answer


def signed(key, *, seconds_ago=0.0):
    """Headers as Flower's node makes them."""
    at = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds_ago)).isoformat()
    return {
        "flwr-public-key": base64.b64encode(public_key_to_bytes(key.public_key())).decode(),
        "flwr-timestamp": at,
        "flwr-signature": base64.b64encode(sign_message(key, at.encode("ascii"))).decode(),
    }


def request(headers=(), body=b"", *, target="/v1/fleet/pull-messages", method="POST", length=None):
    lines = [
        f"{method} {target} HTTP/1.1",
        "host: server",
        f"content-length: {len(body) if length is None else length}",
    ]
    lines += [f"{name}: {value}" for name, value in dict(headers).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def open_to(gate, address="192.0.2.1"):
    """A connection to the gate, and the task that serves it."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    inner_reader, inner_writer = await asyncio.open_connection(sock=theirs)

    async def serve():
        try:
            await gate.serve(inner_reader, inner_writer, address)
        except (TimeoutError, OSError):
            pass
        finally:
            inner_writer.close()

    return reader, writer, asyncio.create_task(serve())


async def answer_to(reader):
    """The status and the body of the next answer; None if the connection ends instead."""
    http, body, status = h11.Connection(h11.CLIENT), b"", None
    http.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
    http.send(h11.EndOfMessage())
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            piece = await reader.read(2**16)
            if not piece and status is None:
                return None
            http.receive_data(piece)
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return status, body


async def ask(gate, *requests, address="192.0.2.1"):
    """The answers to requests, each over a connection of its own."""
    answers = []
    for text in requests:
        reader, writer, task = await open_to(gate, address)
        writer.write(text)
        answers.append(await answer_to(reader))
        writer.close()
        await task
    return answers


def gate_to(tmp_path, behind, **options):
    return Gate(Admission(tmp_path / "keys"), behind, **options)


def test_a_client_s_request_goes_through_with_its_signature(tmp_path, keys):
    behind, headers = Inside(), signed(keys[0])

    async def go():
        gate = gate_to(tmp_path, behind)
        reader, writer, task = await open_to(gate)
        writer.write(request(headers, b"body"))
        first = await answer_to(reader)
        writer.write(request(signed(keys[0]), b"again", target="/v1/fleet/push-object"))  # the same connection
        second = await answer_to(reader)
        writer.close()
        await task
        assert gate.room.held == 0
        return first, second

    assert asyncio.run(go()) == ((200, b"inside"), (200, b"inside"))
    (path, body, sent), (other, _, _) = behind.arrived
    assert (path, body, other) == (b"/v1/fleet/pull-messages", b"body", b"/v1/fleet/push-object")
    assert sent[b"flwr-signature"].decode() == headers["flwr-signature"]


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/v1/control/start-run"),
        ("POST", "/v1/runtime/push-messages"),
        ("GET", "/v1/fleet/pull-messages"),
        ("POST", "/v1/fleet/../control/start-run"),
        ("POST", "/v1/fleet/%2e%2e/control/start-run"),
        ("POST", "/v1/fleet//control/start-run"),
        ("POST", "/v1/fleet/"),
        ("POST", "/v1/fleet/pull-messages?next=/v1/control"),
        ("POST", "//v1/fleet/pull-messages"),
        ("POST", "https://server/v1/control/start-run"),
        ("GET", "/docs"),
        ("GET", "/"),
    ],
)
def test_nothing_else_does(method, target, tmp_path, keys):
    """Not even with a client's signature."""
    behind = Inside()
    ((status, _),) = asyncio.run(ask(gate_to(tmp_path, behind), request(signed(keys[0]), method=method, target=target)))
    assert (status, behind.arrived) == (403, [])


def test_what_is_not_signed_by_a_client_is_refused(tmp_path, keys):
    good = signed(keys[0])
    text = good["flwr-signature"]
    wrong = [
        {},
        signed(keys[2]),  # a stranger's key
        good | {"flwr-signature": signed(keys[1])["flwr-signature"]},
        good | {"flwr-timestamp": signed(keys[0])["flwr-timestamp"]},
        good | {"flwr-signature": "?"},
        good | {"flwr-signature": base64.b64encode(b"x" * 100).decode()},
        {name: value for name, value in good.items() if name != "flwr-public-key"},
        signed(keys[0], seconds_ago=310),
        signed(keys[0], seconds_ago=-60),
        good | {"flwr-timestamp": "yesterday"},
        good | {"flwr-signature": text[: len(text) // 2]},
    ]
    behind = Inside()
    answers = asyncio.run(ask(gate_to(tmp_path, behind), *(request(headers) for headers in wrong)))
    assert [status for status, _ in answers] == [401] * len(wrong)
    assert behind.arrived == []


def test_a_header_that_is_there_twice_is_refused(tmp_path, keys):
    """Flower reads the first one, others the last one."""
    behind = Inside()
    text = request(signed(keys[0])).replace(b"host: server", b"host: server\r\nflwr-signature: MEQ=")
    assert [status for status, _ in asyncio.run(ask(gate_to(tmp_path, behind), text))] == [400]
    assert behind.arrived == []


def test_a_signature_is_good_for_one_request(tmp_path, keys):
    """Also in its other form: (r, s) and (r, order - s) sign the same."""
    behind, headers = Inside(), signed(keys[0])
    r, s = decode_dss_signature(base64.b64decode(headers["flwr-signature"]))
    other = headers | {"flwr-signature": base64.b64encode(encode_dss_signature(r, ORDER - s)).decode()}
    keys[0].public_key().verify(
        base64.b64decode(other["flwr-signature"]), headers["flwr-timestamp"].encode(), ec.ECDSA(hashes.SHA256())
    )
    answers = asyncio.run(ask(gate_to(tmp_path, behind), request(headers), request(headers), request(other)))
    assert [status for status, _ in answers] == [200, 403, 403]
    assert len(behind.arrived) == 1


def test_a_key_is_used_from_one_address_until_it_signs_off_or_falls_silent(tmp_path, keys, capsys):
    admission, behind = Admission(tmp_path / "keys"), Inside()

    async def go():
        gate = Gate(admission, behind)
        said = []
        for address, target in [
            ("192.0.2.1", "send-node-heartbeat"),
            ("192.0.2.2", "pull-messages"),  # a copied key
            ("192.0.2.2", "deactivate-node"),
            ("192.0.2.1", "deactivate-node"),  # the client signs off
            ("192.0.2.2", "activate-node"),  # and comes back from elsewhere
            ("192.0.2.1", "pull-messages"),
        ]:
            text = request(signed(keys[0]), target=f"/v1/fleet/{target}")
            ((status, _),) = await ask(gate, text, address=address)
            said.append(status)
        ((other, _),) = await ask(gate, request(signed(keys[1])), address="192.0.2.1")
        return said, other

    assert asyncio.run(go()) == ([200, 503, 503, 200, 200, 503], 200)
    assert "its key was copied" in capsys.readouterr().out
    assert len(behind.arrived) == 4

    now, time = 1e6, datetime.datetime.now(datetime.UTC).timestamp()
    headers = {name.encode(): value.encode() for name, value in signed(keys[1]).items()}
    assert admission.admit(headers, "192.0.2.9", now=now, time=time) == 1  # 192.0.2.1 is long silent


@pytest.mark.parametrize(
    ("one", "other", "status"),
    [
        ("2001:db8::1", "2001:db8::ffff", 200),  # the same network: machines change the rest by themselves
        ("2001:db8::1", "2001:db8:0:1::1", 503),
        ("::ffff:192.0.2.1", "192.0.2.1", 200),
    ],
)
def test_of_ipv6_the_network_counts(one, other, status, tmp_path, keys):
    async def go():
        gate = gate_to(tmp_path, Inside())
        await ask(gate, request(signed(keys[0])), address=one)
        return await ask(gate, request(signed(keys[0])), address=other)

    ((said, _),) = asyncio.run(go())
    assert said == status


def test_a_removed_key_is_shut_out_at_once(tmp_path, keys):
    async def go():
        gate = gate_to(tmp_path, Inside())
        before = await ask(gate, request(signed(keys[0])))
        (tmp_path / "keys" / "client-0.pub").unlink()
        return before + await ask(gate, request(signed(keys[0])), request(signed(keys[1])))

    assert [status for status, _ in asyncio.run(go())] == [200, 401, 200]


def test_a_request_that_is_too_large_is_refused_before_it_is_read(tmp_path, keys):
    behind = Inside()

    async def go():
        gate = gate_to(tmp_path, behind)
        answers = await ask(gate, request(signed(keys[0]), length=LARGEST + 1))
        chunked = request(signed(keys[0])).replace(b"content-length: 0", b"transfer-encoding: chunked")
        reader, writer, task = await open_to(gate)
        writer.write(chunked)
        for _ in range(LARGEST // 2**20 + 1):
            writer.write(b"100000\r\n" + bytes(2**20) + b"\r\n")
            await asyncio.sleep(0)
        answers.append(await answer_to(reader))
        writer.close()
        await task
        return answers, gate.room

    answers, room = asyncio.run(go())
    assert [status for status, _ in answers] == [413, 413]
    assert (room.held, room.most) == (0, LARGEST)
    assert behind.arrived == []


def test_forty_half_requests_of_strangers_hold_no_byte_and_a_client_gets_through(tmp_path, keys):
    size, behind = 15_900_000, Inside()

    async def go():
        gate = gate_to(tmp_path, behind)
        opened = [await open_to(gate) for _ in range(40)]
        for _, writer, _ in opened:
            writer.write(request(signed(keys[2]), bytes(2**16), target="/v1/fleet/push-object", length=size))
        said = [await answer_to(reader) for reader, _, _ in opened]
        honest = await ask(gate, request(signed(keys[0]), b"x"))
        for _, writer, task in opened:
            writer.close()
            await task
        return said, honest, gate.room

    said, honest, room = asyncio.run(go())
    assert {status for status, _ in said} == {401}
    assert honest == [(200, b"inside")]
    assert (room.held, room.most) == (0, 1)


def test_half_requests_of_a_client_hold_no_more_than_its_share_and_another_client_gets_through(tmp_path, keys):
    size, behind = 1000, Inside()

    async def go():
        room = Room(per_key=4 * size, in_total=6 * size, seconds=0.05)
        gate = gate_to(tmp_path, behind, room=room)
        opened = [await open_to(gate) for _ in range(10)]
        for _, writer, _ in opened:
            writer.write(request(signed(keys[0]), bytes(size // 2), length=size))
        said = await asyncio.gather(*(asyncio.wait_for(answer_to(reader), 20) for reader, _, _ in opened[4:]))
        honest = await ask(gate, request(signed(keys[1]), bytes(size)))
        held = room.held
        for _, writer, _ in opened:
            writer.close()
        await asyncio.gather(*(task for _, _, task in opened))
        return said, honest, held, room

    said, honest, held, room = asyncio.run(go())
    assert {status for status, _ in said} == {503}  # Flower's nodes try again
    assert honest == [(200, b"inside")]
    assert (held, room.most, room.held) == (4 * size, 5 * size, 0)


def test_clients_together_hold_no_more_than_there_is_room_for():
    async def go():
        room = Room(per_key=4, in_total=6, seconds=0.01)
        async with room.take(0, 4), room.take(1, 2):
            with pytest.raises(RefusedError, match="too many bytes"):
                async with room.take(1, 1):
                    pass
        async with room.take(1, 4):  # it is free again
            return room.most

    assert asyncio.run(go()) == 6


@pytest.mark.parametrize("part", [b"", b"POST /v1/fl", "body"])
def test_who_is_slow_is_cut_off(part, tmp_path, keys, monkeypatch):
    for name in ("HEADER_SECONDS", "PIECE_SECONDS"):
        monkeypatch.setattr(gate, name, 0.05)
    text = request(signed(keys[0]), b"half", length=8) if part == "body" else part

    async def go():
        reader, writer, task = await open_to(gate_to(tmp_path, Inside()))
        writer.write(text)
        said = await asyncio.wait_for(answer_to(reader), 20)
        writer.close()
        await task
        return said

    assert asyncio.run(go()) is None


def test_headers_without_end_are_refused(tmp_path, keys):
    ((status, _),) = asyncio.run(
        ask(gate_to(tmp_path, Inside()), b"POST /v1/fleet/get-run HTTP/1.1\r\nx: " + b"y" * 2**15)
    )
    assert status == 431


# ---- repeated requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "times"), [("push-object", 1), ("pull-messages", 1), ("pull-object", 2)])
def test_a_repeated_request_gets_the_first_answer_and_flower_acts_once(name, times, tmp_path, keys):
    behind = Inside()

    def repeated(key):
        return request(signed(key) | {ONCE.decode(): "a"}, b"same", target=f"/v1/fleet/{name}")

    async def go():
        gate = gate_to(tmp_path, behind)
        answers = await ask(gate, repeated(keys[0]), repeated(keys[0]))
        assert len(behind.arrived) == times
        return answers + await ask(gate, repeated(keys[1]))  # another client's

    assert asyncio.run(go()) == [(200, b"inside")] * 3
    assert len(behind.arrived) == times + 1


def test_a_request_that_is_repeated_while_flower_acts_waits_for_the_answer(tmp_path, keys):
    async def go():
        behind = Inside(wait=asyncio.Event())
        gate = gate_to(tmp_path, behind)
        headers = {ONCE.decode(): "a"}
        _, writer, task = await open_to(gate)
        writer.write(request(signed(keys[0]) | headers))
        while not behind.arrived:
            await asyncio.sleep(0)
        task.cancel()  # the connection breaks
        await asyncio.gather(task, return_exceptions=True)
        writer.close()
        second = asyncio.create_task(ask(gate, request(signed(keys[0]) | headers)))
        await asyncio.sleep(0)
        behind.wait.set()
        return await second, len(behind.arrived)

    assert asyncio.run(go()) == ([(200, b"inside")], 1)


def test_an_answer_that_flower_did_not_give_is_not_remembered(tmp_path, keys):
    behind = Inside(answer=Answer(503, b"the server is starting"))

    async def go():
        gate = gate_to(tmp_path, behind)
        text = {ONCE.decode(): "a"}
        first = await ask(gate, request(signed(keys[0]) | text))
        behind.answer = Answer(200, b"now")
        return first + await ask(gate, request(signed(keys[0]) | text))

    assert asyncio.run(go()) == [(503, b"the server is starting"), (200, b"now")]


# ---- over TLS ---------------------------------------------------------------------------------------------


@pytest.fixture
def tls(tmp_path):
    certificates.write_authority(tmp_path)
    (tmp_path / "server").mkdir()
    certificates.write_server(tmp_path, tmp_path / "server", ["127.0.0.1"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "server" / "server.crt", tmp_path / "server" / "server.key")
    return context, ssl.create_default_context(cafile=tmp_path / "ca.crt")


def test_strangers_connections_keep_no_client_out(tmp_path, keys, tls, monkeypatch):
    """More than the gate holds, none of which says a word: the oldest are closed, and no client's."""
    context, trusted = tls
    monkeypatch.setattr(gate, "HANDSHAKE_SECONDS", 600.0)
    assert PER_ADDRESS < CONNECTIONS

    async def go():
        sockets = listen("127.0.0.1", 0)
        port = sockets[0].getsockname()[1]
        serving = asyncio.create_task(run(gate_to(tmp_path, Inside()), sockets, context))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted)
        writer.write(request(signed(keys[0])))
        answers = [await answer_to(reader)]
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(PER_ADDRESS + 5)]
        await asyncio.gather(*(asyncio.wait_for(reader.read(), 20) for reader, _ in silent[:5]))
        writer.write(request(signed(keys[0])))  # over the connection that is older than all of them
        answers.append(await answer_to(reader))
        other, second = await asyncio.open_connection("127.0.0.1", port, ssl=trusted)
        second.write(request(signed(keys[1])))
        answers.append(await answer_to(other))
        for each in (writer, second, *(writer for _, writer in silent)):
            each.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        for listening in sockets:
            listening.close()
        return answers

    assert asyncio.run(go()) == [(200, b"inside")] * 3


def test_while_the_server_starts_clients_are_told_to_try_again():
    async def go():
        def refuse(_request):
            raise httpx.ConnectError("not yet")

        async with httpx.AsyncClient(transport=httpx.MockTransport(refuse)) as behind:
            return await inside(behind, "https://127.0.0.1:1")(b"/v1/fleet/pull-messages", b"", [])

    assert asyncio.run(go()).status == 503
