"""The Flower ClientApp: makes a client from the settings of the node and the run, and returns its replies.

Every request and every answer is a line of the client's audit log. The request's is written first: if that fails,
because the log was changed or the disk is full, the client refuses before it does anything. An answer that cannot be
written does not leave.
"""

from collections.abc import Callable
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from fedncv.flower import audit, refusals
from fedncv.flower.client import C, Client, answer, count_samples, train_round
from fedncv.flower.handshake import OF_THE_CODE, SERVER
from fedncv.flower.record import PHASES, cut, summary
from fedncv.flower.refusals import RefusedError
from fedncv.flower.scoring import score_round
from fedncv.flower.secure_client import SECURE, Here, answer_stage

SHOWN = 300  # characters of a failure

app = ClientApp()


def respond(
    handle: Callable[[C, Message], Message],
    make: Callable[[], C],
    request: Message,
    *,
    folder: Path,
    run: str,
) -> Message:
    """Return the answer, after the request and the answer are in the audit log of the client's folder."""
    log, about = folder / audit.AUDIT, request.metadata
    said = {
        "run": run,
        "kind": PHASES.get(about.message_type.partition(".")[0], "other"),
        "group": cut(about.group_id, 20),
    }
    why: list[str] = []

    def failed(error: Exception) -> None:
        why.append(cut(str(error) or type(error).__name__, SHOWN))

    try:
        audit.append(log, "asked", **said, server=_version(request), **summary(request.content))
        reply = answer(handle, make, request, failed)
        audit.append(log, "answered", **said, **summary(reply.content), **({"why": why[0]} if why else {}))
    except ValueError as error:
        return refusals.write(RefusedError("audit", str(error)), request)
    except OSError as error:
        return refusals.write(error, request)
    return reply


def _version(request: Message) -> str:
    """Return the version and the code that the server says it has."""
    found = request.content.get(SERVER)
    values = dict(found) if isinstance(found, ConfigRecord) else {}
    return cut(" ".join(str(values.get(name, "unknown")) for name in OF_THE_CODE), 60)


def client_in(context: Context) -> Client:
    """Return the client: the node's settings give number, folder and device, the run's give name and study."""
    return here_in(context).client()


def here_in(context: Context) -> Here:
    """Return the client for a stage of secure sums, which needs its samples only if it trains."""
    node, run = context.node_config, context.run_config
    return Here(
        int(node["client"]),
        str(run["run"]),
        Path(str(node["folder"])),
        str(run["study"]),
        str(run.get("secure", "")),
        str(node.get("device", "cpu")),
    )


def _answer(handle: Callable[[Client, Message], Message], message: Message, context: Context) -> Message:
    folder, run = Path(str(context.node_config["folder"])), str(context.run_config["run"])
    return respond(handle, lambda: client_in(context), message, folder=folder, run=run)


def _answer_stage(message: Message, context: Context) -> Message:
    here = here_in(context)
    return respond(answer_stage, lambda: here, message, folder=here.folder, run=here.run)


@app.query()
def query(message: Message, context: Context) -> Message:
    return _answer(count_samples, message, context)


@app.query(SECURE)
def query_stage(message: Message, context: Context) -> Message:
    return _answer_stage(message, context)


@app.train(SECURE)
def train_stage(message: Message, context: Context) -> Message:
    return _answer_stage(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    return _answer(train_round, message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return _answer(score_round, message, context)
