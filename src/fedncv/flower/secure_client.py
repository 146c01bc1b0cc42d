"""A client's part in secure sums over Flower: the messages, what it stores between them, and its own checks.

    record "secure" of a request    stage, and the stage's message as JSON (see ``fedncv.secure.client``)
    stages keys, shares, confirm, unmask     nothing else, beside what must be equal on both sides
    stage masked of round 0                  the vector is the number of training samples: joining
    stage masked of a round                  beside it the request of a round, as without secure sums; the vector is the
                                             reply's whole numbers and the number of samples
    reply                                    the stage's reply as JSON, or the masked vector; nothing else, ever

    runs/RUN/secure.json, secure.bin         what the client remembers (``Memory``), and the masked vector

The client itself knows the study, so it checks the cohort: it must be the one that the study's seed draws. The server
cannot choose who is summed with whom.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from fedncv.config import RunConfig
from fedncv.engine.round import is_finite
from fedncv.engine.sampling import draw_uniform
from fedncv.flower import client as plain
from fedncv.flower import handshake
from fedncv.flower.client import Client, study_of, trained_for
from fedncv.flower.consent import check_terms, terms_of
from fedncv.flower.halves import Up, travelling
from fedncv.flower.handshake import SERVER
from fedncv.flower.own import Own
from fedncv.flower.private import private_files
from fedncv.flower.refusals import RefusedError
from fedncv.flower.roster import read_roster
from fedncv.flower.wire import ARRAYS, ASK, WireError, arrays, records
from fedncv.keys import generator
from fedncv.methods import find_method
from fedncv.methods.base import Grid, Method
from fedncv.secure import client as secure
from fedncv.secure import session as sessions
from fedncv.secure import signatures
from fedncv.secure.fixed_point import STATISTICS, Part, Words, to_words
from fedncv.secure.session import Session, mark
from fedncv.secure.settings import Settings, read_settings
from fedncv.store import write_atomically
from fedncv.tree import leaves

SECURE = "secure"  # the record, and the action of its messages
STORE, VECTOR = "secure.json", "secure.bin"
JOINING = 0  # the round in which samples are summed


class Stage(NamedTuple):
    """A request of a stage."""

    name: str
    message: dict[str, Any]


def stage_of(content: RecordDict) -> Stage:
    found = content.get(SECURE)
    values = dict(found) if isinstance(found, ConfigRecord) else {}
    name, text = values.get("stage"), values.get("message")
    if sorted(values) != ["message", "stage"] or not isinstance(name, str) or not isinstance(text, str):
        raise WireError("a request of secure sums has another form")
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise WireError("a request of secure sums has another form")
    return Stage(name, message)


def whole_of(content: RecordDict, name: str) -> object:
    found = content[ASK]
    return found.get(name) if isinstance(found, ConfigRecord) else None


def record_of(stage: str, message: Any) -> ConfigRecord:
    return ConfigRecord({"stage": stage, "message": json.dumps(message)})


# ---- the vector -------------------------------------------------------------------------------------------


def parts_of(method: Method, reply: Up) -> list[tuple[Part, Tensor]]:
    """Return the fields of a reply in the order of the vector; the running statistics, if they are sent, are last."""
    found = []
    for path, leaf in leaves(reply.up):
        name = path.rpartition(".")[2]
        by_samples = method.weights.get(name, "samples") == "samples"
        found.append((Part(name, tuple(leaf.shape), by_samples), leaf))
    if reply.buffers_R.numel():
        found.append((Part(STATISTICS, tuple(reply.buffers_R.shape), True), reply.buffers_R))
    return found


def layout_of(grid: Grid, parts: list[Part]) -> str:
    """Return the hash of all that gives the numbers of a vector their meaning."""
    fields = [[p.name, list(p.shape), p.by_samples, grid.step_of(p.name), grid.largest_of(p.name)] for p in parts]
    return mark({"fields": fields, "samples": grid.samples, "bits": grid.bits})


def cohort_of(config: RunConfig, round: int) -> list[int]:
    """Return the clients of a round: all for joining, later those that the study's seed draws."""
    if round == JOINING:
        return list(range(config.clients))
    rng = generator(config.seed, "clients", round - 1)
    return [int(u) for u in draw_uniform(rng, config.clients, config.per_round)]


def task_of(content: ArrayRecord) -> str:
    """Return the hash of the server's message to one client, which binds the vector to it."""
    digest = hashlib.sha256()
    for name in sorted(content):
        array = content[name]
        digest.update(f"{name}\0{array.dtype}\0{list(array.shape)}\0".encode() + array.data)
    return digest.hexdigest()


# ---- what the client remembers ----------------------------------------------------------------------------


def read_memory(folder: Path, *, joined: bool) -> tuple[secure.Memory, str]:
    """Return what the client remembers of the run, and the mark of the data with which it joined."""
    path = folder / STORE
    if not path.exists():
        if joined:
            raise RefusedError("record", f"there is no {path}: without it, rounds could be summed a second time")
        return secure.Memory(), ""
    try:
        said = json.loads(path.read_bytes())
        vector = (folder / VECTOR).read_bytes() if said["vector"] else None
        if vector is not None and hashlib.sha256(vector).hexdigest() != said["vector"]:
            raise ValueError(f"{VECTOR} is not the one that belongs to it")
        return secure.memory_of(said["memory"], vector), str(said["data"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RefusedError("record", f"{path} is damaged ({error}); restore it") from None


def write_memory(folder: Path, memory: secure.Memory, data: str) -> None:
    """Store it before the reply is sent: what is said once is never said differently."""
    vector = memory.vector
    said = {
        "memory": memory.to_json(),
        "data": data,
        "vector": "" if vector is None else hashlib.sha256(vector).hexdigest(),
    }
    with private_files():
        if vector is not None:
            write_atomically(folder / VECTOR, vector, name="own vector")
        write_atomically(folder / STORE, json.dumps(said).encode(), name="own secure")
        if vector is None:
            (folder / VECTOR).unlink(missing_ok=True)


# ---- the answer -------------------------------------------------------------------------------------------


class Here(NamedTuple):
    """A client of a run with secure sums, without its samples: only one stage needs them."""

    u: int
    run: str
    folder: Path
    study: str
    secure: str
    device: str = "cpu"

    def client(self) -> Client:
        return plain.client_of(self.study, self.run, self.u, self.folder, self.secure, device=self.device)


def answer_stage(here: Here, request: Message) -> Message:
    """Return the reply to a stage's request."""
    stage = stage_of(request.content)
    names = [SECURE, SERVER]
    if stage.name == "masked" and session_in(stage).round != JOINING:
        names += [ARRAYS, ASK]
    content = records(request, *names, what=f"a request of stage {stage.name}")
    config = study_of(here.study)
    handshake.check(content[SERVER], handshake.identity_of(config, here.secure))
    check_terms(plain.rules_of(here.folder), terms_of(config, here.secure))
    settings = read_settings(here.secure) if here.secure else None
    grid = find_method(config.method).grid
    if settings is None or grid is None:
        raise RefusedError("secure", "the run has no secure sums", "the run has no secure sums")
    _check_session(here, config, settings, grid, session_in(stage))
    own = Own(here.folder / "runs", here.run)
    folder = here.folder / "runs" / here.run
    with own.locked():
        memory, data = read_memory(folder, joined=session_in(stage).round != JOINING)
        if stage.name == "keys":
            now = handshake.data_mark(here.folder, here.run)
            if data and now != data:
                raise RefusedError("data", f"the data file in {here.folder} is not the one with which it joined")
            data = now
        try:
            vector = _vector_of(here, content, data)
            memory, reply = secure.answer(_member(here), memory, stage.name, stage.message, vector)
        except sessions.RefusedError as error:
            raise RefusedError("secure", f"{error.code}: {error}", f"{error.code}: {error}") from None
        write_memory(folder, memory, data)
    if stage.name == "masked":
        return Message(RecordDict({SECURE: ConfigRecord({"vector": reply["vector"]})}), reply_to=request)
    return Message(RecordDict({SECURE: record_of(stage.name, reply)}), reply_to=request)


def session_in(stage: Stage) -> Session:
    try:
        return sessions.session_of(stage.message.get("session"))
    except sessions.RefusedError as error:
        raise WireError(str(error)) from None


def _member(here: Here) -> secure.Member:
    known = read_roster(here.folder)
    key = (here.folder / "node.key").read_bytes()

    def sign(session: Session, kind: str, data: bytes) -> bytes:
        return signatures.sign(key, session, kind, data)

    return secure.Member(here.u, sign, known.roster, known.minimum)


def _check_session(here: Here, config: RunConfig, settings: Settings, grid: Grid, session: Session) -> None:
    """Raise RefusedError unless the session is that of the study and the settings that this client was given."""
    cohort = cohort_of(config, session.round) if session.round <= config.rounds else []
    expected = {
        "run": here.run,
        "cohort": tuple(cohort),
        "threshold": settings.threshold_of(len(cohort)),
        "neighbours": settings.neighbours_of(len(cohort)),
        "bits": grid.bits,
    }
    for name, value in expected.items():
        if getattr(session, name) != value:
            text = f"{name} of round {session.round} is {getattr(session, name)}, and the study's is {value}"
            raise RefusedError("secure", text, f"the study has another {name} in round {session.round}")


def _vector_of(here: Here, content: RecordDict, data: str) -> Any:
    """Return the function that makes this client's vector for a session."""

    def vector(session: Session) -> Words:
        client = here.client()
        method = client.problem.method
        assert method.grid is not None
        samples = len(client.problem.clients.train[here.u])
        parts: list[tuple[Part, Tensor]] = []
        if session.round != JOINING:
            if (task := stage_of(content).message.get("task")) != task_of(arrays(content)):
                raise sessions.RefusedError("message", f"the message of the round is not the one of the task {task!r}")
            if whole_of(content, "round") != session.round or whole_of(content, "rollbacks"):
                raise sessions.RefusedError(
                    "replay", "the request is of another round than its session, or rolled back"
                )
            trained = trained_for(client, content, data)
            if not is_finite(trained):
                raise RefusedError("not finite", "the update or the statistics of this client are not finite")
            parts = parts_of(method, Up(trained.up, travelling(client.problem, trained.buffers_R)))
        if session.layout != layout_of(method.grid, [part for part, _ in parts]):
            raise sessions.RefusedError("layout", "the fields, steps or bounds here are not the server's")
        return to_words(method.grid, parts, samples)

    return vector
