"""A client's replies: its number of training samples (once per run), and a round's training.

    request of a round    down, running statistics; round, counted, keep, rollbacks (see ``own``); what must be the
                          same on both sides (see ``handshake``)
    reply                 up, running statistics: only the fields that the method declares; or a refusal

Loss and work of each round stay in history.jsonl of the client's folder, with the score and the metrics of the model
received for training. If a method has another model for inference, only the server can export it.
"""

import logging
import math
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fedncv.config import RunConfig, from_dict
from fedncv.engine.arithmetic import arithmetic
from fedncv.engine.evaluate import score_before
from fedncv.engine.local import Trained, train
from fedncv.engine.problem import Arrival, Problem, find_device
from fedncv.engine.sequential import one_thread
from fedncv.flower import audit, handshake, refusals
from fedncv.flower.consent import ClientRules, check_size, check_terms, read_client_rules, terms_of
from fedncv.flower.halves import Down, Up, arrival_of, check, check_constants, client_problem, down_template, travelling
from fedncv.flower.handshake import SERVER
from fedncv.flower.own import Own
from fedncv.flower.refusals import RefusedError
from fedncv.flower.samples import read
from fedncv.flower.wire import ARRAYS, ASK, WireError, arrays, decode, encode, records, whole_numbers
from fedncv.methods.base import field_of
from fedncv.metrics import value
from fedncv.store import append

HISTORY = "history.jsonl"
SAMPLES, DATA, KEEP = "samples", "data", "keep"
WHAT = "a request for a round"

C = TypeVar("C")

log = logging.getLogger("fedncv.flower.client")


class Client(NamedTuple):
    """Client u of a run, with its own folder."""

    u: int
    run: str
    folder: Path
    problem: Problem
    rules: ClientRules
    secure: str = ""  # the settings of secure sums; empty: the run has none


def client_of(study: str, run: str, number: int, folder: Path, secure: str = "", *, device: str = "cpu") -> Client:
    """Return client ``number`` of the run, with the data in its folder. Raise RefusedError if its rules forbid it."""
    config, rules = study_of(study), rules_of(folder)
    if not 0 <= number < config.clients:
        raise RefusedError("number", f"this is client {number}, but the run has clients 0 to {config.clients - 1}")
    if not run or not all(c.isalnum() or c in "._-" for c in run) or run.startswith("."):
        raise ValueError(f"{run!r} is not a valid name of a run")  # it is used as a folder's name
    check_terms(rules, terms_of(config, secure))
    _check_device(device)
    problem = client_problem(config, read(folder / "data"), number, device=device)
    check_size(rules, problem.model.layout.num_parameters)
    return Client(number, run, folder, problem, rules, secure)


def rules_of(folder: Path) -> ClientRules:
    try:
        return read_client_rules(folder)
    except ValueError as error:
        raise RefusedError("consent", str(error), "the file cannot be read") from None


def _check_device(device: str) -> None:
    try:
        find_device(device)
    except ValueError as error:
        raise RefusedError("device", str(error), device) from None


def study_of(text: str, *, is_ours: bool = False) -> RunConfig:
    """Return the study's config from the TOML text that comes with a run.

    Unless the run ``is_ours``, modules are imported from what is installed here and from the current folder, and never
    from a folder that the run names.
    """
    config = from_dict(tomllib.loads(text), where="the run's study")
    config = config if is_ours else replace(config, code_dir="")
    check(config)
    return config


def answer(
    handle: Callable[[C, Message], Message],
    make: Callable[[], C],
    request: Message,
    failed: Callable[[Exception], None] = lambda _: None,
) -> Message:
    """Return the reply of ``handle``, or a refusal: a code, and no text of this machine. The text goes to the log.

    ``failed`` is told of the error too.
    """
    try:
        if request.content.get(SERVER) is not None:  # before the study is read, which another version may not know
            handshake.check(request.content[SERVER], handshake.installed())
        return handle(make(), request)
    except Exception as error:
        if isinstance(error, RefusedError):
            log.warning("refused: %s", error)
        else:
            log.exception("cannot answer")
        failed(error)
        return refusals.write(error, request)


def count_samples(client: Client, request: Message) -> Message:
    """Reply with the number of training samples, which estimators need in advance, and the mark of the data file."""
    check_plain(client)
    content = records(request, SERVER, what="a request for the sample count")
    handshake.check(content[SERVER], handshake.identity_of(client.problem.config))
    found: dict[str, Any] = {SAMPLES: _samples(client), DATA: handshake.data_mark(client.folder, client.run)}
    return Message(RecordDict({ASK: ConfigRecord(found)}), reply_to=request)


def train_round(client: Client, request: Message) -> Message:
    """Train for one round; store the client's state on disk before the reply is sent."""
    check_plain(client)
    content = records(request, ARRAYS, ASK, SERVER, what=WHAT)
    with Own(client.folder / "runs", client.run).locked():
        trained = trained_for(client, content)
    reply = Up(trained.up, travelling(client.problem, trained.buffers_R))
    return Message(RecordDict({ARRAYS: encode(reply)}), reply_to=request)


def check_plain(client: Client) -> None:
    """Raise RefusedError if the run has secure sums: then no reply of this client leaves it as it is."""
    if client.secure:
        raise RefusedError("plain", "the run has secure sums, and the server asks for the client's own reply")


def trained_for(client: Client, content: RecordDict, joined: str | None = None) -> Trained:
    """Train as a request for a round says, and store the client's state; the caller holds the lock of ``Own``.

    ``joined`` is the mark of the data with which the client joined, if the client itself remembers it: with secure sums
    the server knows neither the mark nor the number of samples.
    """
    what, problem, u = WHAT, client.problem, client.u
    handshake.check(content[SERVER], handshake.identity_of(problem.config, client.secure))
    asked = content[ASK]
    if not isinstance(asked, ConfigRecord):
        raise WireError(f"{what}: record {ASK!r} is a {type(asked).__name__}")
    check_constants(problem, asked.get("constants", 0.0))
    keep = rounds_to_keep(asked.get(KEEP))
    plain = [SAMPLES] if joined is None else []
    beside = ["constants", KEEP, *([DATA] if joined is None else [])]
    round, counted, rollbacks, *held = whole_numbers(
        content, "round", "counted", "rollbacks", *plain, beside=beside, what=what
    )
    if not 1 <= round <= problem.config.rounds:
        raise WireError(f"the server asks for round {round} of {problem.config.rounds}")
    data_of(client, asked.get(DATA) if joined is None else joined, held[0] if held else None)
    message: Down = decode(arrays(content), down_template(problem), what="the server's message")
    own = Own(client.folder / "runs", client.run)
    with one_thread(), arithmetic(problem.config):
        kept = own.begin(problem, u, round=round, counted=counted, keep=keep, rollbacks=rollbacks)
        arrival = arrival_of(problem, u, message, kept)
        trained = train(problem, round - 1, arrival)
        if trained is None:
            raise RefusedError("few", f"client {u} has too few samples for one training step; leave it out")
        own.write(round, trained.kept)
        history = _history(client, round, arrival, trained)
    append(client.folder / "runs" / client.run, HISTORY, history)
    return trained


def _samples(client: Client) -> int:
    return len(client.problem.clients.train[client.u])


def data_of(client: Client, mark: object, held: int | None) -> None:
    """Raise RefusedError unless the client still has the data with which it joined."""
    if mark != handshake.data_mark(client.folder, client.run):
        raise RefusedError("data", f"the data file in {client.folder} is not the one with which the client joined")
    if held is not None and held != _samples(client):
        text = f"the server holds {held} training samples of this client, which has {_samples(client)}"
        raise RefusedError("samples", text, f"{_samples(client)}, not {held}")


def rounds_to_keep(given: object) -> list[int]:
    if not isinstance(given, list) or not all(type(round) is int and round > 0 for round in given):
        raise WireError("a request for a round must list the rounds to keep")
    return [int(round) for round in given]


def _history(client: Client, round: int, arrival: Arrival, trained: Trained) -> dict[str, Any]:
    """Return a line of the client's own history, with the score of the received model if the study measures it."""
    problem, loss = client.problem, float(trained.loss)
    line: dict[str, Any] = {
        "round": round,
        "loss": loss if math.isfinite(loss) else None,
        "samples": trained.samples,
        "gradients": trained.gradients,
        "forwards": trained.forwards,
    }
    if problem.method.grid is not None:
        line["beyond_bound"] = int(field_of(trained.up, "beyond_bound"))
    if head := audit.head_of(client.folder / audit.AUDIT):  # so that a log whose end was cut is recognised
        line[audit.HEAD] = head
    tested, every = len(problem.clients.test[client.u]), problem.config.eval_every
    if tested and every and (round - 1) % every == 0:
        scored, _ = score_before(problem, round - 1, arrival, None)
        line["before"] = scored.total / tested if math.isfinite(scored.total) else None
        targets = problem.dataset.y[torch.from_numpy(problem.clients.test[client.u])].cpu().numpy()
        for metric in problem.metrics:
            assert scored.outputs is not None
            line[f"before_{metric.name}"] = value(metric, scored.outputs, targets, of=f"client {client.u}")
    return line
