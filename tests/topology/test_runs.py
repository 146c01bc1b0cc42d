"""Runs without a server: every engine, the disk, resuming, export, the command line."""

import json

import numpy as np
import pytest
import torch
from agreement import close
from federations import tiny
from torch.testing import assert_close

import fedncv
from fedncv import store
from fedncv.cli import main
from fedncv.engine import evaluate, stacked_scores
from fedncv.engine.problem import start
from fedncv.engine.processes import ProcessesEngine, can_fork
from fedncv.engine.sequential import run_round
from fedncv.engine.stacked import StackedEngine
from fedncv.results import read_rows

QUICK = {"model": "mlp", "clients": 5, "per_round": 5, "rounds": 4, "epochs": 1, "checkpoint_every": 2}
FILES = ("config.toml", "metrics.jsonl", "state.safetensors")
CASES = [("scaffold", "ring", 0.0), ("fedncv-sums", "random_regular:degree=2", 0.3), ("fedavg", "epidemic", 0.3),
         ("d2", "star", 0.0), ("relaysgd", "tree", 0.0), ("fedadam", "matching", 0.0)]  # fmt: skip
FEW = [CASES[1], CASES[4]]
cases = pytest.mark.parametrize(
    ("method", "topology", "dropout"),
    [case if case in FEW else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)


@cases
def test_the_stacked_engine_agrees_with_the_sequential_one(method, topology, dropout):
    problem = tiny(method, sizes=(20, 13, 9, 18, 12), topology=topology, dropout=dropout)
    engine, state = StackedEngine([problem]), start(problem)
    stacked = [state]
    for _ in range(3):
        state, row = run_round(problem, state)
        ((after, other),) = engine.run_rounds(stacked)
        stacked = [after]
        assert {k: v for k, v in other.items() if isinstance(v, int)} == {
            k: v for k, v in row.items() if isinstance(v, int)
        }
        assert other["consensus_distance"] == pytest.approx(row["consensus_distance"], rel=1e-9)
    close(stacked[0], state)
    assert stacked_scores.before(engine, stacked) == [evaluate.before(problem, state)]
    assert stacked_scores.after(engine, stacked) == [evaluate.after(problem, state)]


@pytest.mark.skipif(not can_fork(), reason="workers are forked")
def test_processes_give_the_bits_of_one_process():
    problem = tiny("fedncv-sums", topology="ring", dropout=0.2)
    state = start(problem)
    with ProcessesEngine([problem], workers=2) as engine:
        others = [start(problem)]
        for _ in range(2):
            state, row = run_round(problem, state)
            ((after, other),) = engine.run_rounds(others)
            others = [after]
            assert other == row
    assert_close(others[0].server, state.server, rtol=0, atol=0)


@cases
def test_a_run_that_was_stopped_and_resumed_ends_with_the_same_bytes(method, topology, dropout, tmp_path):
    config = {"method": method, "topology": topology, "dropout": dropout} | QUICK
    fedncv.simulate(out=tmp_path / "whole", **config)

    def stop(row, run):
        if row["round"] == 3:
            run.stop("enough")

    fedncv.simulate(out=tmp_path / "parts", on_round=stop, **config)
    fedncv.resume(tmp_path / "parts")
    for name in FILES:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes(), name


def test_a_run_scores_everyone_s_own_model_before_and_after_and_exports_it(tmp_path):
    result = fedncv.simulate(out=tmp_path / "run", topology="ring", **QUICK)
    last = read_rows(tmp_path / "run")[-1]
    assert len(last["before_clients"]) == len(last["after_clients"]) == 5
    assert "pooled" not in last
    own = [torch.cat([t.reshape(-1) for t in result.state_dict(client=u).values()]) for u in range(5)]
    assert not torch.equal(own[0], own[1])
    with pytest.raises(ValueError, match="no model that all clients share; name a client"):
        result.state_dict()
    assert result.problem.topology.text == "ring"


def test_runs_differ_by_their_topology_and_old_configs_mean_a_server(tmp_path):
    fedncv.simulate(out=tmp_path / "run", topology="ring", **QUICK | {"rounds": 1})
    text = (tmp_path / "run" / "config.toml").read_text()
    assert 'topology = "ring"' in text
    (tmp_path / "run" / "config.toml").write_text(text.replace('"ring"', '"chain"'))
    with pytest.raises(ValueError, match="topology 'ring', now 'chain'"):
        fedncv.resume(tmp_path / "run")
    fedncv.simulate(out=tmp_path / "old", **QUICK | {"rounds": 2})
    path = tmp_path / "old" / "config.toml"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("topology")]
    path.write_text("\n".join(lines) + "\n")
    assert fedncv.resume(tmp_path / "old", rounds=3).config.topology == "server"


def test_a_graph_from_a_file_is_named_in_full_and_must_stay_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "graph.txt"
    path.write_text("0 1\n1 2\n2 3\n3 4\n")
    result = fedncv.simulate(out="run", topology="edges:path=graph.txt", **QUICK | {"rounds": 1})
    assert result.config.topology == f"edges:path={path}"
    path.write_text("0 1\n1 2\n2 3\n3 4\n4 0\n")
    from fedncv.topology import network

    network.links_of.cache_clear()
    network._mixing.cache_clear()
    with pytest.raises(ValueError, match="was started with another graph than"):
        fedncv.resume("run", rounds=2)


def test_the_command_line_trains_on_a_graph(tmp_path, capsys):
    words = ["--model", "mlp", "--clients", "4", "--per-round", "4", "--rounds", "1", "--epochs", "1"]
    out = str(tmp_path / "run")
    assert main(["run", "--topology", "torus:rows=2", "--method", "scaffold", *words, "--out", out, "--quiet"]) == 0
    (folder,) = [path.parent for path in tmp_path.rglob("metrics.jsonl")]
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["messages"] == 8
    assert row["edge_bytes"] == row["bytes_up"] / 8
    assert {"spectral_gap", "consensus_distance", "mixed_update_variance"} <= set(row)
    assert main(["export", str(folder), "--client", "2"]) == 0
    assert main(["report", str(folder.parent)]) == 0
    assert main(["show", str(folder)]) == 0


def test_the_probe_measures_at_every_client_s_own_model():
    rows = fedncv.simulate(topology="ring", probe="every=1", **QUICK | {"rounds": 1}).rows
    assert rows[1]["variance_between"] > 0
    assert np.isfinite(rows[1]["variance_within"])


def test_the_folder_is_read_back_to_the_last_bit(tmp_path):
    result = fedncv.simulate(out=tmp_path / "run", method="relaysgd", topology="tree", **QUICK)
    state = store.read_state(tmp_path / "run", result.problem)
    assert_close(state.server, result.state.server, rtol=0, atol=0)
