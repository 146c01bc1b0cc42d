"""Federations of very many clients: what a run records, what a report draws, a million of them killed and resumed."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

import fedncv
from fedncv import keys
from fedncv.cli import main
from fedncv.cli.run import scores_note
from fedncv.config import RunConfig
from fedncv.data import divide, from_arrays, split
from fedncv.engine.problem import build
from fedncv.flower.halves import check

RUN = """
import json, os, resource, signal, sys
import fedncv

def on_round(row, run):
    if row["round"] == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

folder, settings = sys.argv[1], json.loads(sys.argv[2])
if os.path.exists(folder):
    fedncv.resume(folder, progress=False, on_round=on_round)
else:
    fedncv.simulate(out=folder, progress=False, on_round=on_round, **settings)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def population(clients, **more):
    return {
        "data": f"synthetic:clients={clients},samples=2,features=4,classes=3", "partition": "natural",
        "clients": clients, "per_round": 20, "rounds": 8, "epochs": 1, "model": "mlp", "method": "fedncv",
        "rows": "disk", "eval_clients": 50, "eval_every": 4, "checkpoint_every": 3, **more,
    }  # fmt: skip


def in_a_process(folder, settings, killed_at=-1):
    command = [sys.executable, "-c", RUN, str(folder), json.dumps(settings), str(killed_at)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_million_clients_are_killed_resumed_with_the_same_bytes_and_reported(tmp_path, capsys):
    settings = population(1_000_000)
    whole = in_a_process(tmp_path / "whole", settings)
    assert whole.returncode == 0, whole.stderr
    assert int(whole.stdout) < 4e9
    assert in_a_process(tmp_path / "killed", settings, killed_at=5).returncode == -signal.SIGKILL
    resumed = in_a_process(tmp_path / "killed", settings)
    assert resumed.returncode == 0, resumed.stderr
    for name in ("metrics.jsonl", "state.safetensors", "partition.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert (tmp_path / "whole" / "metrics.jsonl").stat().st_size < 50_000
    assert main(["show", str(tmp_path / "whole")]) == 0
    assert "scored on 50 of 1,000,000 clients" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "whole")]) == 0
    assert "1,000,000 clients, sorted by size, 2,000 of them drawn" in (tmp_path / "whole" / "report.html").read_text()


def test_a_report_of_very_many_clients_draws_some_of_them_and_says_so(tmp_path):
    fedncv.simulate(out=tmp_path, **population(40, per_round=4, rounds=1, eval_clients=10), progress=False)
    small = (tmp_path / "partition.json").read_text()
    assert main(["report", str(tmp_path)]) == 0
    before = len((tmp_path / "report.html").read_text())
    held = {"clients_of_size": [[2, 5], [900_000, 100_000]]}
    (tmp_path / "partition.json").write_text(json.dumps({"partition": "natural", "seed": 0} | held))
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "1,000,000 clients, sorted by size, 2,000 of them drawn" in page
    assert "1,000,000 clients hold 2 to 5 samples, 2,300,000 in all." in page
    assert len(page) < before + 100_000
    assert "counts" in json.loads(small)


def test_natural_clients_of_a_hundred_thousand_owners_are_those_of_a_loop():
    """Owners in random order, a few samples each; every part and every split as owner by owner."""
    owners = np.random.default_rng(0).integers(0, 100_000, 250_000)
    data = from_arrays(np.zeros((len(owners), 1), np.float32), owners % 3, owners=owners)
    num_clients = len(np.unique(owners))
    parts = divide(data, "natural", num_clients=num_clients, seed=0)
    clients = split(parts, 0.25, seed=0)
    names = np.unique(owners)
    for u in (0, 1, 777, num_clients - 1):
        mine = np.flatnonzero(owners == names[u])
        assert parts[u].tolist() == mine.tolist()
        assert sorted([*clients.train[u], *clients.test[u]]) == mine.tolist()
        order = keys.permutation(keys.key_for(0, "split", 0, u), len(mine)).numpy()
        assert clients.test[u].tolist() == sorted(mine[order[: len(clients.test[u])]])
    assert clients.sizes.sum() + clients.test_sizes.sum() == len(owners)


def test_a_note_says_when_very_many_clients_are_scored():
    settings = population(10_000, rows="auto")
    assert scores_note(build(RunConfig(**settings))) == ""
    assert "all 10,000 clients are scored" in scores_note(build(RunConfig(**settings | {"eval_clients": 0})))


def test_a_federation_of_real_machines_refuses_a_sample():
    with pytest.raises(
        ValueError, match=r"eval_clients is 5: every client decides by its own rules.toml .*; leave it at 0"
    ):
        check(RunConfig(eval_clients=5))
