"""Two clients over real SuperLink and SuperNode processes, with TLS and node authentication.

In `make test`: one run that equals the sequential engine, and in which a client is killed in mid-training.
"""

import signal

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")


from fedncv.cli import main
from fedncv.engine import evaluate
from fedncv.engine.problem import build, start
from fedncv.flower import audit, processes
from fedncv.flower.consent import RULES, ClientRules, write_client_rules
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
    for part, noted in (("server", 3), ("clients/0", 2), ("clients/1", 2)):
        assert audit.check(federation.folder / part)[1] >= noted  # whole, also after SIGKILL


@pytest.mark.slow
def test_scores_come_from_the_client_that_agrees_and_a_client_refuses_a_run_before_it_trains(federation, tools, capsys):
    """One federation, two runs; the second one stops while clients join."""
    place = federation.folder / "clients"
    (place / "0" / RULES).write_text(write_client_rules(ClientRules(evaluate=True)))
    name, short = "scored", {"method": "fedavg", "rounds": 1, "eval_every": 1, "after_every": 1}
    state = federation.run(name, seconds=400.0, **short)
    assert tools.compare(state, tools.sequential(tools.changed(federation.config, **short))) == "equal"
    problem = build(tools.changed(federation.config, **short))
    before = evaluate.before(problem, start(problem))["before_clients"][0]
    first, last = federation.rows(name)
    assert (first["before"], first["before_by"], first["scored_among"]) == (before, 1, 2)
    assert (last["before_by"], last["after_by"]) == (1, 1)
    (place / "1" / RULES).write_text(write_client_rules(ClientRules(max_rounds=1)))
    federation.begin("refused", method="fedavg", rounds=2)
    with pytest.raises(ValueError, match="run refused stopped at round"):
        federation.finish("refused", restarts=0)
    said = (federation.folder / "server" / "runs" / "refused" / "log.txt").read_text()
    assert "max_rounds is 1, and the run has 2" in said
    assert federation.rows("refused") == []
    (place / "1" / RULES).write_text(write_client_rules(ClientRules()))
    assert main(["federation", "audit", str(federation.folder)]) == 0
    assert capsys.readouterr().out.count(": whole, ") == 3


@pytest.mark.slow
@pytest.mark.parametrize("method", [m for m in ("fedavg", "scaffold", "fedper", "fedncv") if m in METHODS])
def test_two_clients_have_the_sequential_engine_s_bits(method, federation, tools):
    state = federation.run(f"two-{method}", method=method, model="lenet5")
    reference = tools.sequential(tools.changed(federation.config, method=method, model="lenet5"))
    assert tools.compare(state, reference) == "equal"
    assert tools.same(federation.kept(f"two-{method}"), reference.kept) == "equal"
