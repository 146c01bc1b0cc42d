"""stop, Ctrl-C, rotate, revoke, add and down, while real processes train."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

from fedncv.cli import main
from fedncv.flower import coordinator, members, processes
from fedncv.flower import folder as folders
from fedncv.flower.node import REFUSED
from fedncv.flower.rules import Rules, write_rules

pytestmark = pytest.mark.slow

LONG = {"method": "scaffold", "epochs": 10, "rounds": 6}


@pytest.fixture(scope="module")
def federation(live):
    return live(3)


@pytest.fixture
def waiting(federation):
    """name -> a `fedncv federation resume` in a process of its own, without a terminal."""
    started = []

    def start(name):
        command = [sys.executable, "-m", "fedncv", "federation", "resume", str(federation.folder), "--name", name]
        started.append(
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def number(federation, name):
    return (coordinator.app_folder(federation.folder, name) / coordinator.NUMBER).read_text()


def assert_undisturbed(federation, tools, name, state):
    config = tools.changed(federation.config, **LONG)
    assert tools.compare(state, tools.sequential(config)) == "equal"


def test_a_run_that_was_stopped_ends_its_waiter_and_is_resumed(federation, tools, waiting, capsys):
    federation.begin("stopped", **LONG)
    waiter = waiting("stopped")
    federation.wait(lambda: federation.rounds("stopped") >= 1)
    assert main(["federation", "stop", str(federation.folder), "--name", "stopped"]) == 0
    assert "stopped after round" in capsys.readouterr().out
    _, said = waiter.communicate(timeout=60)
    assert waiter.returncode == 2
    assert "run stopped was stopped at round" in said
    assert federation.rounds("stopped") < LONG["rounds"]
    assert_undisturbed(federation, tools, "stopped", federation.finish("stopped", seconds=400.0))
    assert main(["federation", "stop", str(federation.folder), "--name", "stopped"]) == 2
    assert "has finished its 6 rounds; there is nothing to stop" in capsys.readouterr().err


def test_after_ctrl_c_a_run_goes_on_and_is_waited_for_again(federation, tools, waiting):
    federation.begin("left", **LONG)
    waiter = waiting("left")
    federation.wait(lambda: federation.rounds("left") >= 1)
    waiter.send_signal(signal.SIGINT)
    _, said = waiter.communicate(timeout=60)
    assert waiter.returncode == 130
    assert f"stop it with `fedncv federation stop {federation.folder} --name left`" in said
    before, first = federation.rounds("left"), number(federation, "left")
    federation.wait(lambda: federation.rounds("left") > before)
    assert_undisturbed(federation, tools, "left", federation.finish("left", seconds=400.0))
    assert number(federation, "left") == first  # the same run of Flower's


def test_a_client_with_a_new_key_comes_back(federation, tools, capsys):
    before = folders.read_nodes(federation.folder / "server")
    assert members.rotate(federation.folder, 1)
    after = folders.read_nodes(federation.folder / "server")
    assert {u: after[u] for u in (0, 2)} == {u: before[u] for u in (0, 2)}
    assert after[1] != before[1]
    assert processes.up(federation.folder) == [0, 1, 2]
    assert main(["federation", "status", str(federation.folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:4]] == [["client", str(u), "connected"] for u in range(3)]
    assert all("running here" in line and " s ago" in line for line in lines[1:4])
    short = LONG | {"rounds": 2, "epochs": 1}
    state = federation.run("rotated", seconds=400.0, **short)
    assert tools.compare(state, tools.sequential(tools.changed(federation.config, **short))) == "equal"


def test_a_client_that_is_revoked_in_mid_run_is_left_out_from_then_on(federation, tools, capsys):
    (federation.folder / "server" / "rules.toml").write_text(write_rules(Rules(round_seconds=20.0)))
    federation.begin("revoked", **LONG)
    first = federation.submit("revoked")
    federation.wait(lambda: federation.rounds("revoked") >= 1)
    assert members.revoke(federation.folder, 2)
    assert processes.group(federation.folder, "2") is None
    state = federation.finish("revoked", seconds=400.0, submitted=first)
    rows = federation.rows("revoked")[1:]
    assert rows[0]["counted"] == [0, 1, 2]
    assert rows[-1]["counted"] == [0, 1]
    absent = {line["round"]: [u for u in range(3) if u not in line["counted"]] for line in rows}
    reference = tools.sequential(tools.changed(federation.config, **LONG), absent=absent)
    assert tools.same((state.server, state.buffers), (reference.server, reference.buffers)) == "equal"
    assert main(["federation", "status", str(federation.folder)]) == 0
    assert "client 2    revoked          not started here" in capsys.readouterr().out
    processes.start(federation.folder, "2")  # it does not give in
    federation.wait(lambda: REFUSED in (federation.folder / "logs" / "2.log").read_text())
    assert processes.online(federation.folder / "server") == [0, 1]
    assert members.rotate(federation.folder, 2)
    assert processes.up(federation.folder) == [0, 1, 2]


def test_an_added_client_takes_part_in_the_next_run(federation):
    part, told = members.add(federation.folder)
    assert told
    shutil.copytree(federation.folder / "clients" / "0" / "data", part / "data")
    assert processes.up(federation.folder) == [0, 1, 2, 3]
    federation.run("added", seconds=400.0, rounds=1, clients=4, per_round=4)
    assert federation.rows("added")[1]["counted"] == [0, 1, 2, 3]


def test_down_ends_a_waiting_run_and_leaves_nothing(federation, waiting):
    federation.begin("down", rounds=50, clients=4, per_round=4)
    waiter = waiting("down")
    federation.wait(lambda: federation.rounds("down") >= 1)
    os.kill(processes.group(federation.folder, "1"), signal.SIGKILL)  # also what has lost its keeper
    assert main(["federation", "down", str(federation.folder)]) == 0
    _, said = waiter.communicate(timeout=120)
    assert waiter.returncode == 2
    assert "was stopped by `fedncv federation down`" in said
    federation.wait(lambda: not federation.left(), seconds=30.0)
    assert not list((federation.folder / "logs").glob("*.pid"))
