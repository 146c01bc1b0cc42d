"""A client whose connection is cut or disturbed in mid-round ends the run with the undisturbed bits."""

import json
import os
import signal
import time

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

from proxy import Proxy

from fedncv.flower import folder as folders
from fedncv.flower import processes

pytestmark = pytest.mark.slow

CHANGES = {"method": "scaffold", "epochs": 20, "rounds": 3}


@pytest.fixture(scope="module")
def federation(live):
    """Client 1 reaches the server through a proxy."""
    made = live(2)
    client = made.folder / "clients" / "1"
    settings = folders.read_client_settings(client)
    host, _, port = settings.server.rpartition(":")
    made.proxy = Proxy((host, int(port)))
    folders.write_client_settings(client, settings._replace(server=f"127.0.0.1:{made.proxy.port}"))
    processes.end(made.folder, "1")
    processes.up(made.folder)
    yield made
    processes.end(made.folder, "1")
    made.proxy.stop()


@pytest.mark.parametrize("fault", ["close", "flip", "silent", "answers"])
@pytest.mark.parametrize("during", ["training", "push"])
def test_eight_bad_seconds_in_mid_round_change_no_bit(fault, during, federation, tools):
    name = f"{fault}-{during}"
    federation.begin(name, **CHANGES)
    number = federation.submit(name)
    federation.wait(lambda: federation.training(name, client=1, round=2))
    if during == "push":  # trained, and about to send its reply
        (place,) = (federation.folder / "clients" / "1" / "runs").glob(f"{name}-*")
        federation.wait((place / "round-000002.safetensors").exists)
    federation.proxy.fault, before = fault, federation.proxy.damaged
    until = time.monotonic() + 8  # as long as the fault lasts
    while time.monotonic() < until:
        time.sleep(0.1)
    assert federation.proxy.damaged > before
    federation.proxy.fault = None
    state = federation.finish(name, submitted=number)
    config = tools.changed(federation.config, **CHANGES)
    assert tools.compare(state, tools.sequential(config)) == "equal"
    assert [line["counted"] for line in federation.rows(name)[1:]] == [[0, 1]] * 3


def test_a_keeper_that_was_killed_is_started_again_by_up(federation):
    pid = processes.group(federation.folder, "1")
    os.kill(pid, signal.SIGKILL)
    federation.wait(lambda: not processes.keeper_lives(federation.folder, "1"))
    assert processes.up(federation.folder) == [0, 1]
    assert processes.group(federation.folder, "1") != pid
    assert processes.keeper_lives(federation.folder, "1")


def test_a_node_that_hangs_is_restarted(federation):
    """Stopped with SIGSTOP: it lives, and does nothing."""
    before = federation.node(1)
    os.kill(before, signal.SIGSTOP)
    federation.wait(lambda: federation.node(1) not in (before, None), seconds=150.0)
    assert "no contact with 127.0.0.1" in (federation.folder / "logs" / "1.log").read_text()
    began = time.time()

    def contact():
        contacts = json.loads((federation.folder / "server" / "flower" / "contacts.json").read_text())
        return contacts["1"]["time"] > began

    federation.wait(contact, seconds=150.0)
