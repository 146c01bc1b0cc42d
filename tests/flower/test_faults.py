"""Faults between real processes: the server killed, clients absent, lying, late, or out of disk.

Whatever happens, the server's state and what every client keeps are those of the sequential engine on just the
answers that the rows say were counted; and where every answer was counted, those of the undisturbed run.
"""

import signal
import subprocess
import sys

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")


from fedncv.flower import processes
from fedncv.flower.rules import Rules, write_rules

pytestmark = pytest.mark.slow

CLIENTS = 3


@pytest.fixture(scope="module")
def federation(live):
    return live(CLIENTS)


def rule(federation, **changes):
    (federation.folder / "server" / "rules.toml").write_text(write_rules(Rules(**changes)))


def assert_as_counted(federation, tools, name, **changes):
    """Equal to the sequential engine on the answers that were counted; the clients' disks too."""
    rows = federation.rows(name)[1:]
    absent = {line["round"]: [u for u in range(CLIENTS) if u not in line["counted"]] for line in rows}
    reference = tools.sequential(tools.changed(federation.config, **changes), absent=absent)
    state = federation.state(name)
    ours, theirs = (state.server, state.buffers), (reference.server, reference.buffers)
    assert tools.same(ours, theirs) == "equal"
    assert tools.same(federation.kept(name), reference.kept) == "equal"
    assert [line["round"] for line in rows] == list(range(1, len(rows) + 1))
    return absent


def test_the_server_killed_and_restarted_ends_with_the_undisturbed_bits(federation, tools):
    changes = {"rounds": 4, "epochs": 5}
    rule(federation)
    federation.begin("server", **changes)
    number = federation.submit("server")
    federation.wait(lambda: federation.rounds("server") == 2)
    processes.end(federation.folder, "server", how=signal.SIGKILL)
    processes.start(federation.folder, "server")
    processes.register(federation.folder / "server")
    federation.finish("server", seconds=400.0, submitted=number)
    absent = assert_as_counted(federation, tools, "server", **changes)
    assert set(map(tuple, absent.values())) == {()}  # every answer counted: nothing differs from a quiet run


def test_a_client_absent_for_rounds_comes_back_with_what_it_kept(federation, tools):
    changes = {"rounds": 5}
    rule(federation, round_seconds=30.0)
    federation.begin("absent", **changes)
    number = federation.submit("absent")
    federation.wait(lambda: federation.rounds("absent") >= 1)
    processes.end(federation.folder, "2")
    federation.wait(lambda: federation.rounds("absent") >= 3)
    processes.start(federation.folder, "2")
    federation.finish("absent", seconds=400.0, submitted=number)
    absent = assert_as_counted(federation, tools, "absent", **changes)
    assert sum(2 in missing for missing in absent.values()) >= 1
    assert 2 not in absent[5]


MISBEHAVING = """
import time

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supernode.runtime import run_clientapp

from fedncv.flower.client import count_samples, train_round
from fedncv.flower.client_app import client_in

app = ClientApp()


@app.query()
def query(message, context):
    client = client_in(context)
    if client.u == 2 and {inflated}:
        return Message(RecordDict({{"ask": ConfigRecord({{"samples": 10**12, "data": "0" * 32}})}}), reply_to=message)
    return count_samples(client, message)


@app.train()
def train(message, context):
    client = client_in(context)
    reply = train_round(client, message)
    fault = {faults}.get(message.content["ask"]["round"]) if client.u == 2 else None
    if fault is None:
        return reply
    record = dict(reply.content["arrays"].items())
    array = record["up.delta_P"]
    values = np.frombuffer(array.data, dtype=np.float32)
    if fault == "nan":
        values = np.full_like(values, np.nan)
    if fault == "shape":
        values = values[:-1]
    if fault == "norm":
        values = values * 1e6
    if fault == "huge":
        values = np.full_like(values, 1e30)
    if fault == "field":
        record["up.extra"] = array
    if fault == "late":
        time.sleep({late})
    if fault == "twice":
        push = run_clientapp.push_message

        def twice(*arguments):
            push(*arguments)
            push(*arguments)

        run_clientapp.push_message = twice
    record["up.delta_P"] = Array(array.dtype, values.shape, array.stype, values.tobytes())
    return Message(RecordDict({{"arrays": ArrayRecord(record)}}), reply_to=message)
"""


def misbehave(federation, name, *, faults, inflated=False, late=0.0):
    package = federation.folder / "server" / "apps" / name / "fedncv_run"
    (package / "client.py").write_text(MISBEHAVING.format(faults=faults, inflated=inflated, late=late))


def test_a_client_that_answers_wrongly_twice_or_late_changes_nothing_but_its_own_share(federation, tools):
    faults = {1: "nan", 2: "shape", 3: "norm", 4: "field", 5: "twice", 6: "late"}
    changes = {"rounds": 7}
    rule(federation, round_seconds=45.0, attempts=1, norms={"delta_P": 100.0})
    federation.begin("lying", **changes)
    misbehave(federation, "lying", faults=faults, late=55.0)
    federation.finish("lying", seconds=500.0)
    absent = assert_as_counted(federation, tools, "lying", **changes)
    assert absent == {1: [2], 2: [2], 3: [2], 4: [2], 5: [], 6: [2], 7: []}
    rows = federation.rows("lying")
    reasons = [rows[t]["refused"]["2"] for t in (1, 2, 3, 4)]
    for reason, word in zip(reasons, ("NaN", "float32", "norm", "undeclared"), strict=True):
        assert word in reason
    log = (federation.folder / "server" / "runs" / "lying" / "log.txt").read_text()
    assert log.count("rejected") == 4


def test_a_huge_reply_is_left_out_and_a_rolled_back_run_ends_as_if_nothing_was_dropped(federation, tools):
    """By default, without norms; the roll-back and the exit code by the command."""
    changes = {"rounds": 4}
    rule(federation)
    federation.begin("huge", **changes)
    misbehave(federation, "huge", faults={2: "huge"})
    federation.finish("huge", seconds=400.0)
    assert assert_as_counted(federation, tools, "huge", **changes) == {1: [], 2: [2], 3: [], 4: []}
    rows, kept = federation.rows("huge"), federation.kept("huge")
    command = [sys.executable, "-m", "fedncv", "federation", "resume", str(federation.folder), "--name", "huge"]
    done = subprocess.run([*command, "--from-round", "3"], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 3, done.stderr
    assert "client 2 was not counted in 1 of 4 rounds: refused in 2 (norm of delta_P" in done.stdout
    assert federation.rows("huge") == rows
    assert assert_as_counted(federation, tools, "huge", **changes)
    assert tools.same(federation.kept("huge"), kept) == "equal"


def test_an_inflated_sample_count_bars_the_client(federation, tools):
    rule(federation)
    federation.begin("inflated", rounds=2)
    misbehave(federation, "inflated", faults={}, inflated=True)
    federation.finish("inflated", seconds=300.0)
    rows = federation.rows("inflated")
    assert "1000000000000" in rows[0]["barred"]["2"]
    assert [line["counted"] for line in rows[1:]] == [[0, 1], [0, 1]]


def test_a_client_that_cannot_write_is_absent_until_it_can(federation, tools):
    """A folder is where its file for round 2 belongs: an error from the kernel, as of a full disk."""
    changes = {"rounds": 3}
    rule(federation, attempts=2)
    federation.begin("full", **changes)
    number = federation.submit("full")
    client = federation.folder / "clients" / "2" / "runs"
    place = federation.wait(lambda: next(client.glob("full-*"), None))
    in_the_way = place / "round-000002.safetensors"
    in_the_way.mkdir()
    federation.wait(lambda: federation.rounds("full") >= 2, seconds=200.0)
    in_the_way.rmdir()
    federation.finish("full", seconds=300.0, submitted=number)
    absent = assert_as_counted(federation, tools, "full", **changes)
    assert absent == {1: [], 2: [2], 3: []}
    log = (federation.folder / "server" / "runs" / "full" / "log.txt").read_text()
    assert "Is a directory" in log
    assert str(federation.folder) not in log
