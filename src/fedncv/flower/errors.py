"""What the server is told of a failure at a client: one of a few fixed texts.

The text of an exception can name paths, files and values of the client's machine. It goes to the client's own log
only. Flower would send it to the server.
"""

import contextlib
import errno
import logging
from collections.abc import Iterator

from fedncv.flower.own import OwnError
from fedncv.flower.samples import SamplesError
from fedncv.flower.wire import WireError

log = logging.getLogger("fedncv.flower")

TEXTS = {
    "samples": "the client's samples cannot be used",
    "state": "the client's state of the last counted round is missing or damaged, or the request is an old one",
    "message": "the request has another form than this client expects",
    "disk-full": "no space left on the client's disk",
    "disk": "the client cannot read or write its files",
    "memory": "the client has not enough memory",
    "value": "the client refuses the request",
    "failed": "the client failed",
}


class FailedError(Exception):
    """A failure of the client, in words that may leave its machine."""

    def __init__(self, code: str) -> None:
        super().__init__(f"{code}: {TEXTS[code]}; the client's log says more")


def code_of(error: BaseException) -> str:
    """Return the code of an exception."""
    if isinstance(error, OSError):
        return "disk-full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "disk"
    kinds = {
        SamplesError: "samples",
        OwnError: "state",
        WireError: "message",
        MemoryError: "memory",
        ValueError: "value",
    }
    return next((code for kind, code in kinds.items() if isinstance(error, kind)), "failed")


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Log what goes wrong inside here, and raise FailedError with its code instead."""
    try:
        yield
    except Exception as error:
        log.exception("the client failed")
        raise FailedError(code_of(error)) from None
