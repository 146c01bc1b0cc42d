"""Flower's SuperNode, made to survive a bad connection, and to say when it last reached the server.

    python -m fedncv.flower.node HEARTBEAT WORKER and the arguments of flower-supernode

Flower 1.41 gives up for good on some faults of a connection: its worker ends while its process lives on, or a reply is
dropped while the node stays connected. So here

    a broken TLS connection     is tried again, as Flower does without TLS; a wrong certificate is not
    a repeated request          has the same ``ONCE`` header, so that the gate repeats its answer and Flower acts once
    a lost message or reply     ends the process: the keeper starts a new one, and the server repeats its request
    a worker that has ended     ends the process
    each answered request       sets the time of one of two files: HEARTBEAT, or WORKER for all others

It imports only Flower, so that it starts fast.
"""

import logging
import os
import signal
import sys
import threading
import uuid
from pathlib import Path

import httpx
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supernode import fleet_http_connection
from flwr.supernode.cli import flower_supernode
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedncv.flower.keeper import touch

ONCE = "fedncv-once"
REFUSED = (
    "fedncv: the server refuses the key of this client: it was revoked, or is not registered yet, or this machine's "
    "clock is wrong by more than 5 minutes"
)
HEARTBEAT_CALL = "SendNodeHeartbeat"
LOST = ("Failed to receive message", "Failed to send message")  # Flower's words for a message that it drops


class Reaching(NodeAuthHttpInterceptor):
    """Signs requests as Flower does, notes those that are answered, and lets Flower repeat those that are not."""

    heartbeat: Path
    worker: Path

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers[ONCE] = _key(context)
        try:
            response = super().intercept(context, call_next)
        except httpx.TransportError as error:
            raise _retryable(error) from error
        if response.status_code == httpx.codes.UNAUTHORIZED:  # Flower ends the node, without a word
            print(REFUSED, file=sys.stderr, flush=True)
        if response.status_code < 500:  # the gate answers 503 while the server starts
            touch(self.heartbeat if context.rpc_method.endswith(HEARTBEAT_CALL) else self.worker)
        return response


_latest = threading.local()


def _key(context: ProtobufRequestContext) -> str:
    """Return a random key that repetitions of a request share: Flower repeats the same object, in the same thread."""
    if getattr(_latest, "message", None) is not context.message:
        _latest.message, _latest.key = context.message, uuid.uuid4().hex
    key: str = _latest.key
    return key


def _retryable(error: httpx.TransportError) -> httpx.TransportError:
    """Return an error that Flower retries, except for a certificate that is not trusted.

    Flower gives up on every error with the word "ssl" in it, also on a connection that was cut or disturbed.
    """
    return error if "CERTIFICATE_VERIFY_FAILED" in str(error) else httpx.ConnectError("the connection broke")


class Ending(logging.Handler):
    """Ends this process when Flower drops a message, which it only logs."""

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith(LOST):
            os.kill(os.getpid(), signal.SIGTERM)  # Flower signs off at the server


def main(heartbeat: str, worker: str, *arguments: str) -> None:
    Reaching.heartbeat, Reaching.worker = Path(heartbeat), Path(worker)
    fleet_http_connection.NodeAuthHttpInterceptor = Reaching  # type: ignore[attr-defined]  # the name that Flower looks up
    logging.getLogger("flwr").addHandler(Ending())
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()
    print("fedncv: the node's worker has ended", file=sys.stderr, flush=True)
    os._exit(1)  # the thread of Flower's local interface would keep the process


if __name__ == "__main__":
    main(*sys.argv[1:])
