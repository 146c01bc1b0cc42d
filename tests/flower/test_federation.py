"""Two clients over real SuperLink and SuperNode processes, with TLS and node authentication.

In `make test`: one run that equals the sequential engine, and in which a client is killed in mid-training.
"""

import signal

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")


from fedncv.flower import processes
from fedncv.methods import METHODS

CHANGES = {"method": "scaffold", "epochs": 150}  # long enough to be caught at it


@pytest.fixture(scope="module")
def federation(live):
    return live(2)


def test_equal_bits_and_a_client_killed_in_mid_training(federation, tools):
    """Round 1 undisturbed; client 1 killed with all its processes in round 2, and started again."""
    config = tools.changed(federation.config, **CHANGES)
    federation.begin("killed", **CHANGES)
    number = federation.submit("killed")

    federation.wait(lambda: federation.training("killed", client=1, round=2), every=0.01)
    processes.end(federation.folder, "1", how=signal.SIGKILL)
    assert processes.group(federation.folder, "1") is None
    assert federation.rounds("killed") == 1
    first = tools.sequential(config, rounds=1)
    assert tools.compare(federation.state("killed"), first) == "equal"
    processes.start(federation.folder, "1")

    state = federation.finish("killed", submitted=number)
    reference = tools.sequential(config)
    assert tools.compare(state, reference) == "equal"
    assert tools.same(federation.kept("killed"), reference.kept) == "equal"
    assert [line["counted"] for line in federation.rows("killed")[1:]] == [[0, 1], [0, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("method", [m for m in ("fedavg", "scaffold", "fedper", "fedncv") if m in METHODS])
def test_two_clients_have_the_sequential_engine_s_bits(method, federation, tools):
    state = federation.run(f"two-{method}", method=method, model="lenet5")
    reference = tools.sequential(tools.changed(federation.config, method=method, model="lenet5"))
    assert tools.compare(state, reference) == "equal"
    assert tools.same(federation.kept(f"two-{method}"), reference.kept) == "equal"
