"""The gate lets clients' requests through and nothing else, and bounds them before it reads them."""

import asyncio

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

import httpx

from fedncv.flower.gate import LARGEST, Gate


def ask(method, path, *, body=b"", headers=None, inner=None):
    """(status, what came back, the requests that arrived inside)."""
    arrived = []

    def answer(request):
        arrived.append(request)
        if inner is not None:
            raise inner
        return httpx.Response(200, content=b"inside", headers={"x-flower": "yes"})

    async def go():
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as behind:
            gate = Gate(behind, "https://127.0.0.1:1")
            async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="https://server") as client:
                return await client.request(method, path, content=body, headers=headers)

    reply = asyncio.run(go())
    return reply, arrived


def test_a_client_s_request_goes_through_with_its_signature():
    reply, arrived = ask("POST", "/v1/fleet/pull-messages", body=b"signed", headers={"flwr-signature": "s"})
    assert (reply.status_code, reply.content, reply.headers["x-flower"]) == (200, b"inside", "yes")
    (request,) = arrived
    assert str(request.url) == "https://127.0.0.1:1/v1/fleet/pull-messages"
    assert (request.content, request.headers["flwr-signature"]) == (b"signed", "s")


@pytest.mark.parametrize(
    ("method", "path"),
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
        ("GET", "/docs"),
        ("GET", "/"),
    ],
)
def test_nothing_else_does(method, path):
    reply, arrived = ask(method, path)
    assert reply.status_code == 403
    assert arrived == []


def test_a_request_that_is_too_large_is_refused_before_it_is_read():
    pulled = []

    async def pieces():
        for _ in range(100):
            pulled.append(1)
            yield bytes(2**20)

    reply, arrived = ask("POST", "/v1/fleet/push-object", body=pieces())  # does not say how long it is
    assert reply.status_code == 413
    assert len(pulled) <= LARGEST // 2**20 + 2
    reply, _ = ask("POST", "/v1/fleet/push-object", body=b"x", headers={"content-length": str(LARGEST + 1)})
    assert reply.status_code == 413
    assert arrived == []


def test_while_the_server_starts_clients_are_told_to_try_again():
    reply, _ = ask("POST", "/v1/fleet/pull-messages", inner=httpx.ConnectError("not yet"))
    assert reply.status_code == 503
