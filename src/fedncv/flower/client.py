"""A client's replies: its number of training samples (once per run), and a round's training.

    request of a round    down, running statistics; round, counted (see ``own``)
    reply                 up, running statistics: only the fields that the method declares

Loss and work of each round stay in history.jsonl of the client's folder, with the score and the metrics of the model
received for training. If a method has another model for inference, only the server can export it.
"""

import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fedncv.config import RunConfig, from_dict
from fedncv.engine.evaluate import score_before
from fedncv.engine.local import Trained, train
from fedncv.engine.problem import Arrival, Problem
from fedncv.engine.sequential import one_thread
from fedncv.flower.halves import Down, Up, arrival_of, check, check_constants, client_problem, down_template, travelling
from fedncv.flower.own import Own
from fedncv.flower.samples import read
from fedncv.flower.wire import ARRAYS, ASK, arrays, decode, encode, records, whole_numbers
from fedncv.metrics import value
from fedncv.store import append

HISTORY = "history.jsonl"
SAMPLES = "samples"


class Client(NamedTuple):
    """Client u of a run, with its own folder."""

    u: int
    run: str
    folder: Path
    problem: Problem


def client_of(study: str, run: str, number: int, folder: Path) -> Client:
    """Return client ``number`` of the run, with the data in its folder."""
    config = study_of(study)
    if not 0 <= number < config.clients:
        raise ValueError(f"this is client {number}, but the run has clients 0 to {config.clients - 1}")
    if not run or not all(c.isalnum() or c in "._-" for c in run) or run.startswith("."):
        raise ValueError(f"{run!r} is not a valid name of a run")  # it is used as a folder's name
    return Client(number, run, folder, client_problem(config, read(folder / "data"), number))


def study_of(text: str, *, is_ours: bool = False) -> RunConfig:
    """Return the study's config from the TOML text that comes with a run.

    Unless the run ``is_ours``, modules are imported from what is installed here and from the current folder, and never
    from a folder that the run names.
    """
    config = from_dict(tomllib.loads(text), where="the run's study")
    config = config if is_ours else replace(config, code_dir="")
    check(config)
    return config


def count_samples(client: Client, request: Message) -> Message:
    """Reply with the number of training samples, which estimators need in advance."""
    records(request, what="a request for the sample count")
    count = len(client.problem.clients.train[client.u])
    return Message(RecordDict({ASK: ConfigRecord({SAMPLES: count})}), reply_to=request)


def train_round(client: Client, request: Message) -> Message:
    """Train for one round; store the client's state on disk before the reply is sent."""
    content = records(request, ARRAYS, ASK, what="a request for a round")
    problem, u = client.problem, client.u
    asked = content[ASK]
    check_constants(problem, asked.pop("constants", 0.0) if isinstance(asked, ConfigRecord) else 0.0)
    round, counted = whole_numbers(content, "round", "counted", what="a request for a round")
    if not 1 <= round <= problem.config.rounds:
        raise ValueError(f"the server asks for round {round} of {problem.config.rounds}")
    message: Down = decode(arrays(content), down_template(problem), what="the server's message")
    own = Own(client.folder / "runs", client.run)
    with own.locked(), one_thread():
        kept = own.begin(problem, u, round=round, counted=counted)
        arrival = arrival_of(problem, u, message, kept)
        trained = train(problem, round - 1, arrival)
        if trained is None:
            raise ValueError(f"client {u} has too few samples for one training step; leave it out")
        own.write(round, trained.kept)
        history = _history(client, round, arrival, trained)
    append(client.folder / "runs" / client.run, HISTORY, history)
    reply = Up(trained.up, travelling(problem, trained.buffers_R))
    return Message(RecordDict({ARRAYS: encode(reply)}), reply_to=request)


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
    tested, every = len(problem.clients.test[client.u]), problem.config.eval_every
    if tested and every and (round - 1) % every == 0:
        scored, _ = score_before(problem, round - 1, arrival, None)
        line["before"] = scored.total / tested if math.isfinite(scored.total) else None
        targets = problem.dataset.y[torch.from_numpy(problem.clients.test[client.u])].numpy()
        for metric in problem.metrics:
            assert scored.outputs is not None
            line[f"before_{metric.name}"] = value(metric, scored.outputs, targets, of=f"client {client.u}")
    return line
