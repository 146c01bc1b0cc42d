"""The scripts that time peers side by side: the same work for all, and no failure left out. No peer is needed."""

import json
import sys
from pathlib import Path

import pytest

from fedncv.engine.round import draw

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture(autouse=True)
def _bench_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def tiny(name: str):
    from peers.settings import SETTINGS, of_setting
    from study import images

    setting = SETTINGS[name].small()._replace(partition="iid")
    return of_setting(setting, images(240, shape=(3, 16, 16)))


@pytest.mark.parametrize("name", ["a", "b"])
def test_peers_get_the_clients_that_fedncv_draws_and_no_batch_of_one_sample(name):
    federation = tiny(name)
    problem = federation.problem(rounds=3, device="cpu")
    assert all(federation.ids(t) == draw(problem, t).ids.tolist() for t in range(3))
    assert all(len(part) % federation.setting.batch_size != 1 for part in federation.clients.train)


def test_each_user_of_pfls_benchmark_has_50_training_and_10_test_samples():
    from peers.settings import SETTINGS, of_setting
    from study import images

    federation = of_setting(SETTINGS["b"], images(60_000, shape=(1, 1, 1)))
    assert {(len(a), len(b)) for a, b in zip(*federation.clients, strict=True)} == {(50, 10)}


def test_the_plain_loop_and_ours_train_the_same_samples():
    from peers import ours, plain
    from peers.timing import WARM_UP, Clock

    federation = tiny("a")
    clocks = [Clock(2, "cpu") for _ in range(2)]
    plain.fedavg(federation, clocks[0], "cpu")
    ours.run([federation], clocks[1], "cpu")
    assert [clock.samples for clock in clocks] == [federation.samples(WARM_UP, WARM_UP + 2)] * 2
    assert all(clock.seconds > 0 for clock in clocks)


def test_a_peer_that_fails_is_listed_with_its_reason(monkeypatch, tmp_path, capsys):
    from peers import run_all

    monkeypatch.setitem(run_all.PEERS, "pfl", ("no_such_script.py",))
    out = tmp_path / "results.jsonl"
    monkeypatch.setattr(sys, "argv", ["run_all", "--settings", "a", "--peers", "pfl", "--out", str(out)])
    run_all.main()
    (line,) = map(json.loads, out.read_text().splitlines())
    assert (line["peer"], line["setting"]) == ("pfl", "a")
    assert "no_such_script.py" in line["failed"]
    assert f"| a | pfl | | | | | | | failed: {line['failed']} |" in capsys.readouterr().out


def test_ratios_are_to_the_plain_loop_of_the_same_setting():
    from peers.run_all import PLAIN, table

    shared = {"version": "1", "rounds_per_s": 1.0, "runs": 1, "accuracy": 0.5, "gpu_gib": None, "note": ""}
    lines = [
        {"setting": setting, "peer": peer, "samples_per_s": rate, **shared}
        for setting, peer, rate in [("a", PLAIN, 10.0), ("a", "ours", 40.0), ("b", PLAIN, 20.0), ("b", "ours", 60.0)]
    ]
    ratios = [row.split("|")[6].strip() for row in table(lines).splitlines()[2:]]
    assert ratios == ["1.00", "4.00", "1.00", "3.00"]
