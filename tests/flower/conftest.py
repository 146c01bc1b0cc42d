"""Federations for tests: one in this process, with a Grid made by hand, and one of real processes."""

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedncv.config import RunConfig
from fedncv.engine.problem import build, start
from fedncv.engine.round import Draw, draw
from fedncv.engine.sequential import run_round
from fedncv.tree import leaves

CONFIG = RunConfig(
    method="scaffold",
    model="mlp",
    partition="iid",
    clients=2,
    per_round=2,
    rounds=2,
    epochs=1,
    batch_size=64,
    eval_every=0,
    lr=0.05,
)


def sequential(config, *, absent=None, rounds=None):
    """The state of the sequential engine after ``rounds``; ``absent``: round -> the clients not counted in it."""
    problem = build(config)
    state = start(problem)
    for t in range(config.rounds if rounds is None else rounds):
        drawn = draw(problem, t)
        missing = (absent or {}).get(t + 1, [])
        answers = [u not in missing for u in drawn.ids.tolist()]
        state, _ = run_round(problem, state, Draw(drawn.ids, answers, drawn.shares))
    return state


def same(ours, theirs):
    """Equal bits in every tensor, equal numbers elsewhere; the path of the first difference otherwise."""
    left, right = dict(leaves(ours)), dict(leaves(theirs))
    if left.keys() != right.keys():
        return f"{sorted(left)} against {sorted(right)}"
    for path in left:
        a, b = left[path], right[path]
        equal = torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
        if not equal:
            return path
    return "equal"


def compare(state, reference):
    """What a federation must have in common with the sequential engine at the server."""
    ours = (state.round, state.server, state.buffers, state.totals.bytes_down, state.totals.bytes_up)
    totals = reference.totals
    theirs = (reference.round, reference.server, reference.buffers, totals.bytes_down, totals.bytes_up)
    return same(ours, theirs)


@pytest.fixture(scope="session")
def tools():
    """The functions above, for test modules (which cannot import a conftest)."""
    return Tools


class Tools:
    config = CONFIG
    sequential = staticmethod(sequential)
    same = staticmethod(same)
    compare = staticmethod(compare)
    changed = staticmethod(replace)


# ---- a grid in this process -----------------------------------------------------------------------------


class HandMade:
    """A Grid whose nodes are folders: a request is answered by the client's code at once, in this process.

    ``spoil(client, round, reply) -> replies`` may change, repeat, delay (by returning nothing) or break answers.
    """

    def __init__(self, folder, run, study, *, spoil=None, secure=""):
        self.folder, self.run, self.study, self.spoil, self.secure = folder, run, study, spoil, secure
        self.sent, self.waiting, self.number = [], [], 0
        self.activated = {}  # client -> when its node was activated

    def get_nodes(self):
        return [SimpleNamespace(node_id=1000 + u, last_activated_at=self.activated.get(u, "")) for u in self.clients()]

    def clients(self):
        return [int(path.name) for path in (self.folder / "clients").iterdir()]

    def push_messages(self, messages):
        from fedncv.flower.client import client_of, count_samples, train_round
        from fedncv.flower.client_app import respond
        from fedncv.flower.scoring import score_round
        from fedncv.flower.secure_client import Here, answer_stage

        ids = []
        for message in messages:
            self.number += 1
            message.metadata.__dict__["_message_id"] = str(self.number)
            u = message.metadata.dst_node_id - 1000
            handles = {"query": count_samples, "train": train_round, "evaluate": score_round}
            handle = handles[message.metadata.message_type.partition(".")[0]]
            mine = self.folder / "clients" / str(u)
            secure = message.metadata.message_type.endswith(".secure")

            def make(u=u, mine=mine, secure=secure):
                if secure:
                    return Here(u, self.run, mine, self.study, self.secure)
                return client_of(self.study, self.run, u, mine, self.secure)

            reply = respond(answer_stage if secure else handle, make, message, folder=mine, run=self.run)
            self.sent.append((u, message, reply))
            group = message.metadata.group_id
            replies = [reply] if self.spoil is None else self.spoil(u, group, message, reply)
            self.waiting += replies
            ids.append(str(self.number))
        return ids

    def pull_messages(self, message_ids):
        ready = [m for m in self.waiting if m.metadata.reply_to_message_id in message_ids]
        self.waiting = [m for m in self.waiting if m not in ready]
        return ready


@pytest.fixture
def as_a_task(monkeypatch):
    """As in a process that Flower has started: messages can be made."""
    from flwr.supercore.task_identity import TaskIdentity

    monkeypatch.setattr(TaskIdentity, "_run_id", 1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)


@pytest.fixture
def by_hand(tmp_path, monkeypatch, as_a_task):
    """config, spoil, rules, secure -> (state of the server, grid), without processes."""
    from fedncv import store
    from fedncv.config import write_toml
    from fedncv.flower import asking, server
    from fedncv.flower import folder as folders
    from fedncv.flower.rules import Rules

    monkeypatch.setattr(asking, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(asking, "RETRY_SECONDS", 0.0)

    def run(
        config, *, spoil=None, rules=Rules(round_seconds=20.0, join_seconds=20.0, attempts=2), name="run", secure=""
    ):
        from fedncv.flower.secure_server import Secure

        place = tmp_path / "federation"
        if not place.exists():
            folders.init(place, config, host="127.0.0.1", port=0, listen="127.0.0.1")
        run_folder = place / "server" / "runs" / name
        if not run_folder.exists():
            store.create(run_folder, config)
        grid = run.grid = HandMade(place, name, write_toml(config), spoil=spoil, secure=secure)
        nodes = {u: 1000 + u for u in range(config.clients)}
        form = folders.read_form(place / "server")
        summing = Secure(place / "server", name, secure, config, rules) if secure else None
        return server.serve(grid, run_folder, config, form, nodes, rules, summing), grid

    run.folder = tmp_path / "federation"
    return run


# ---- real processes -------------------------------------------------------------------------------------


class Live:
    """A federation of real processes on this machine."""

    def __init__(self, folder, config):
        self.folder, self.config = folder, config

    def run(self, name, *, seconds=600.0, **changes):
        """Begin a run and wait for it: the server's state at its end."""
        self.begin(name, **changes)
        return self.finish(name, seconds=seconds)

    def begin(self, name, *, secure="", **changes):
        from fedncv.flower import coordinator

        coordinator.create(self.folder, name, replace(self.config, **changes), secure)

    def finish(self, name, *, seconds=600.0, **options):
        from fedncv.flower import coordinator

        coordinator.follow(self.folder, name, seconds=seconds, **options)
        return self.state(name)

    def submit(self, name):
        from fedncv.flower import coordinator

        return coordinator.submit(self.folder, name)

    def rounds(self, name):
        return max((line["round"] for line in self.rows(name)), default=-1)

    def training(self, name, *, client, round):
        """Whether the client is at work on that round: it holds its lock, and has not written what it keeps."""
        import fcntl

        places = list((self.folder / "clients" / str(client) / "runs").glob(f"{name}-*"))
        if self.rounds(name) != round - 1 or not places or not (places[0] / "lock").exists():
            return False
        (place,) = places
        with (place / "lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            except BlockingIOError:
                return not (place / f"round-{round:06d}.safetensors").exists()

    def state(self, name):
        from fedncv.flower.folder import read_form
        from fedncv.flower.halves import server_problem
        from fedncv.flower.joining import read_joined
        from fedncv.results import read_config
        from fedncv.store import read_state

        run = self.folder / "server" / "runs" / name
        sizes = list(read_joined(run).sizes.values()) or [1] * self.config.clients  # with secure sums nobody knows
        return read_state(run, server_problem(read_config(run), read_form(self.folder / "server"), sizes))

    def kept(self, name):
        """Client -> what it keeps on its disk after the round that the server counted last."""
        import tomllib

        from fedncv.flower.client import client_of
        from fedncv.flower.own import Own
        from fedncv.flower.server import last_counted

        app = tomllib.loads((self.folder / "server" / "apps" / name / "pyproject.toml").read_text())
        run = app["tool"]["flwr"]["app"]["config"]
        kept = {}
        for u, counted in last_counted(self.rows(name)).items():
            client = client_of(run["study"], run["run"], u, self.folder / "clients" / str(u))
            own = Own(client.folder / "runs", client.run)
            kept[u] = own.begin(client.problem, u, round=counted + 1, counted=counted, keep=own._rounds())
        return dict(sorted(kept.items()))

    def rows(self, name):
        from fedncv.results import read_rows

        return read_rows(self.folder / "server" / "runs" / name)

    def wait(self, what, *, seconds=600.0, every=0.1):
        """Until ``what()`` is true."""
        deadline = time.monotonic() + seconds
        while not (value := what()):
            assert time.monotonic() < deadline, f"not within {seconds} s; {self.logs()}"
            time.sleep(every)
        return value

    def logs(self):
        return "\n".join(f"== {p}\n{p.read_text()[-3000:]}" for p in sorted((self.folder / "logs").glob("*.log")))

    def left(self):
        """Process id -> command line, of processes that still mention the folder."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(self.folder) in line and int(path.parent.name) != os.getpid():
                found[int(path.parent.name)] = line
        return found

    def node(self, client):
        """The process id of a client's Flower node; None while there is none."""
        part = f"-m fedncv.flower.node {self.folder}/clients/{client}/"
        found = [pid for pid, line in self.left().items() if part in line and "keeper.py" not in line]
        return found[0] if found else None


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """clients -> a federation that is up; at the end everything is down, whatever happened."""
    from fedncv.flower import folder as folders
    from fedncv.flower import processes

    made = []

    def start(clients=2, **changes):
        folder = tmp_path_factory.mktemp("live") / "federation"
        config = replace(CONFIG, clients=clients, per_round=clients, **changes)
        folders.init(folder, config, host="127.0.0.1", port=0, listen="127.0.0.1")
        federation = Live(folder, config)
        made.append(federation)
        processes.up(folder, seconds=600.0)
        return federation

    yield start
    for federation in made:
        processes.down(federation.folder)
    for federation in made:
        deadline = time.monotonic() + 15
        while federation.left() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert federation.left() == {}
