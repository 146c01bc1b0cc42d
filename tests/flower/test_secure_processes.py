"""Secure sums over real processes: the simulation's bits, drop-outs, kills, and FedNCV in its sums form.

In `make test`: one run of two rounds, the second of which a client drops out of after it has dealt its shares.
"""

import signal

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

from fedncv.flower import processes, roster
from fedncv.flower.rules import Rules, write_rules

CLIENTS = 3
SECURE = "threshold=2"


@pytest.fixture(scope="module")
def federation(live):
    found = live(CLIENTS)
    for path in found.folder.glob("clients/*/roster.toml"):  # two of three may stay, so a sum of two may be seen
        path.write_text(path.read_text().replace("minimum_cohort = 3", "minimum_cohort = 2"))
        assert roster.read_roster(path.parent).minimum == 2
    return found


def rule(federation, **changes):
    (federation.folder / "server" / "rules.toml").write_text(write_rules(Rules(**changes)))


def assert_as_counted(federation, tools, name, **changes):
    """The server's state and what every client keeps are those of a simulation with the clients that were counted."""
    rows = federation.rows(name)[1:]
    absent = {line["round"]: [u for u in range(CLIENTS) if u not in line["counted"]] for line in rows}
    reference = tools.sequential(tools.changed(federation.config, **changes), absent=absent)
    assert tools.compare(federation.state(name), reference) == "equal"
    assert tools.same(federation.kept(name), reference.kept) == "equal"
    return absent


def test_a_secure_round_and_one_with_a_drop_out_have_the_simulation_s_bits(federation, tools):
    """In round 2 client 2 cannot write what it keeps, so it sends no vector; its masks are taken out of the others'."""
    changes = {"method": "scaffold+fixed_point"}
    rule(federation, attempts=1, round_seconds=600.0, stage_seconds=600.0)
    federation.begin("secure", secure=SECURE, **changes)
    number = federation.submit("secure")
    federation.wait(lambda: federation.rounds("secure") >= 1, seconds=600.0)
    (place,) = (federation.folder / "clients" / "2" / "runs").glob("secure-*")
    (place / "round-000002.safetensors").mkdir()
    federation.finish("secure", seconds=900.0, submitted=number)
    (place / "round-000002.safetensors").rmdir()
    assert assert_as_counted(federation, tools, "secure", **changes) == {1: [], 2: [2]}
    log = (federation.folder / "server" / "runs" / "secure" / "log.txt").read_text()
    assert "2: clients [2] dropped out at stage masked" in log
    assert "no single reply" in log


@pytest.mark.slow
def test_fedncv_in_its_sums_form(federation, tools):
    """Control variates, momentum, averages and running statistics, with the memory at the clients."""
    changes = {"method": "fedncv-sums+fixed_point", "model": "lenet5", "rounds": 3}
    rule(federation)
    federation.begin("fedncv", secure=SECURE, **changes)
    federation.finish("fedncv", seconds=900.0)
    assert assert_as_counted(federation, tools, "fedncv", **changes) == {1: [], 2: [], 3: []}


@pytest.mark.slow
def test_a_client_killed_in_mid_training_and_a_server_killed_in_the_next_round(federation, tools):
    """Client 1 comes back in time with its record, and answers the same request; the server goes on with its stage."""
    changes = {"method": "scaffold+fixed_point", "rounds": 4, "epochs": 100}
    rule(federation, round_seconds=600.0, stage_seconds=600.0)
    federation.begin("killed", secure=SECURE, **changes)
    number = federation.submit("killed")
    federation.wait(lambda: federation.training("killed", client=1, round=2), every=0.01, seconds=600.0)
    processes.end(federation.folder, "1", how=signal.SIGKILL)
    processes.start(federation.folder, "1")
    federation.wait(lambda: federation.training("killed", client=0, round=3), every=0.01, seconds=600.0)
    processes.end(federation.folder, "server", how=signal.SIGKILL)
    processes.start(federation.folder, "server")
    processes.register(federation.folder / "server")
    federation.finish("killed", seconds=1200.0, submitted=number)
    absent = assert_as_counted(federation, tools, "killed", **changes)
    assert set(map(tuple, absent.values())) == {()}


@pytest.mark.slow
def test_a_client_that_stays_away_is_left_out_and_comes_back_with_what_it_kept(federation, tools):
    changes = {"method": "scaffold+fixed_point", "rounds": 4}
    rule(federation, round_seconds=60.0, stage_seconds=60.0)
    federation.begin("away", secure=SECURE, **changes)
    number = federation.submit("away")
    federation.wait(lambda: federation.rounds("away") >= 1, seconds=600.0)
    processes.end(federation.folder, "2")
    federation.wait(lambda: federation.rounds("away") >= 2, seconds=600.0)
    processes.start(federation.folder, "2")
    federation.finish("away", seconds=1200.0, submitted=number)
    absent = assert_as_counted(federation, tools, "away", **changes)
    assert any(2 in missing for missing in absent.values())
