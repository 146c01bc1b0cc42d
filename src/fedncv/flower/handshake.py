"""What must be the same at the server and a client before they train together, and the mark of a client's data.

    record "server" of every request    version and code of fedncv, the method with all knobs, the user's own code,
                                        a digest of all other settings
    joining: the client's reply         samples, and the mark of its data file
    every round: the request            the samples and the mark that the client joined with

The client compares, and refuses by name. The mark of a data file is a keyed hash:

    mark = HMAC-SHA256(secret of the client, run, SHA-256 of samples.safetensors)

The secret is 32 random bytes that never leave the client. So the server can see that the file has changed during a run,
and nothing else: it cannot try out small datasets, nor compare the marks of clients, runs or federations.
"""

import hashlib
import hmac
import os
import secrets
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from flwr.app import ConfigRecord

from fedncv import machine
from fedncv.config import RunConfig, write_toml
from fedncv.flower.foreign import quoted
from fedncv.flower.refusals import RefusedError
from fedncv.flower.samples import FILE
from fedncv.flower.wire import WireError
from fedncv.methods import in_full
from fedncv.objects import code_of

SERVER = "server"  # the record of a request
NAMES = {
    "fedncv": "version of fedncv",
    "source": "code of fedncv",
    "method": "method",
    "code": "own code",
    "settings": "settings",
    "secure": "settings of secure sums",
}
OF_THE_CODE = ("fedncv", "source")  # these may differ after the operator has accepted another version


def installed() -> dict[str, str]:
    """Return what is installed here."""
    return {"fedncv": version("fedncv"), "source": machine.sources()}


def identity_of(config: RunConfig, secure: str = "") -> dict[str, str]:
    """Return name -> value of all that must be the same on both sides of the run."""
    of_others = write_toml(replace(config, method="", code="", code_dir=""))
    return installed() | {
        "method": in_full(config.method),
        "code": code_of(config, custom=("data",)),
        "settings": hashlib.sha256(of_others.encode()).hexdigest()[:16],
        "secure": secure,
    }


def check(theirs: object, ours: dict[str, str]) -> None:
    """Raise RefusedError, at the client, for the first of ``ours`` that is not the server's."""
    if not isinstance(theirs, ConfigRecord) or sorted(theirs) != sorted(NAMES):
        raise WireError(f"the server does not say {', '.join(NAMES.values())}: it runs another version of fedncv")
    for name, value in ours.items():
        if theirs[name] != value:
            text = f"the {NAMES[name]} here is {value!r}, and the server's is {quoted(theirs[name])}"
            raise RefusedError(name, text, value)


def compare(before: dict[str, str], now: dict[str, str], run: str) -> None:
    """Raise ValueError, at the server, if the run was begun with something else than what it would resume with."""
    for name in NAMES:
        if before.get(name, "" if name == "secure" else None) == now[name]:
            continue
        remedy = "install that again, or start a new run"
        if name in OF_THE_CODE:
            remedy = (
                "install that again; or install the new one on all machines and resume with --accept-version; "
                "or start a new run"
            )
        raise ValueError(
            f"{run} was begun with another {NAMES[name]} ({before.get(name, 'unknown')}, now {now[name]}); {remedy}"
        )


def data_mark(folder: Path, run: str) -> str:
    """Return the mark of the client's data file for this run."""
    with (folder / "data" / FILE).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    return hmac.new(_secret(folder), run.encode() + b"\0" + digest, hashlib.sha256).hexdigest()[:32]


def is_mark(value: object) -> bool:
    return isinstance(value, str) and len(value) == 32 and set(value) <= set("0123456789abcdef")


def _secret(folder: Path) -> bytes:
    """Return the client's secret; make it at the first time. Two processes that make it at once agree on one."""
    path = folder / "secret"
    if not path.exists():
        made = path.with_name(f"secret.{os.getpid()}")
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(32))
                file.flush()
                os.fsync(file.fileno())
            os.link(made, path)
        except FileExistsError:
            pass  # another process was first
        finally:
            made.unlink()
    found = path.read_bytes()
    if len(found) != 32:
        raise RefusedError("data", f"{path} is damaged: it must have 32 bytes, not {len(found)}; restore it")
    return found
