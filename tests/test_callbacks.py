"""Callbacks see every row and the run, and may stop it; loggers of others work in three lines."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from federations import Tiny, tiny_dataset

import fedncv
from fedncv.cli import main
from fedncv.results import read_rows, read_run

TEXT = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
QUICK = {
    "data": tiny_dataset(80), "model": Tiny, "clients": 4, "per_round": 2, "rounds": 4, "epochs": 1, "batch_size": 8,
    "partition": "iid", "eval_every": 1,
}  # fmt: skip


def stop_at(round):
    return lambda row, run: run.stop("enough") if row["round"] == round else None


def blocks(section):
    return re.findall(r"```python\n(.*?)```", TEXT.partition(f"\n## {section}\n")[2].partition("\n## ")[0], re.DOTALL)


# ---- who is called with what ---------------------------------------------------------------------------


class Object:
    def __init__(self):
        self.seen = []

    def on_round(self, row, run):
        self.seen.append((run.config.seed, row["round"], run.rows[-1] == row))


def test_a_function_with_two_arguments_and_an_object_get_the_run():
    seen, it = [], Object()
    fedncv.simulate(on_round=lambda row, run: seen.append((row["round"], run.config.seed)), **QUICK)
    assert seen == [(t, 0) for t in range(5)]
    fedncv.simulate(on_round=it, **QUICK)
    assert it.seen == [(0, t, True) for t in range(5)]


def test_other_functions_get_the_row_alone():
    """A default, a list's method, a function of C and any number of arguments are not a wish for the run."""
    rows = []
    fedncv.simulate(on_round=rows.append, **QUICK)

    def with_default(row, every=10):
        rows.append((row, every))

    def with_any(*arguments):
        rows.append(arguments)

    fedncv.simulate(on_round=with_default, **QUICK)
    fedncv.simulate(on_round=with_any, **QUICK)
    assert rows[0] == rows[5][0] == rows[10][0]
    assert (rows[5][1], len(rows[10])) == (10, 1)


@pytest.mark.parametrize(
    ("on_round", "words"),
    [
        (3, r"on_round must be a function of \(row\) or \(row, run\), or an object .*; it is 3"),
        (lambda: 1, r"it takes \(\)"),
        (lambda a, b, c: 1, r"it takes \(a, b, c\)"),
        (type("Watcher", (), {"on_round": lambda self, row: None})(), r"it takes \(row\)"),
    ],
)
def test_a_callback_that_cannot_be_called_is_refused_before_training(on_round, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        fedncv.simulate(on_round=on_round, out=tmp_path / "run", **QUICK)
    assert not (tmp_path / "run").exists()


def test_several_seeds_follow_the_same_scheme():
    pairs, triples, it = [], [], Object()
    many = {"seeds": [3, 4], **QUICK, "rounds": 1}
    fedncv.simulate_many(on_round=lambda seed, row: pairs.append((seed, row["round"])), **many)
    fedncv.simulate_many(on_round=lambda seed, row, run: triples.append((seed, row["round"], run.config.seed)), **many)
    fedncv.simulate_many(on_round=it, **many)
    assert pairs == [(3, 0), (4, 0), (3, 1), (4, 1)]
    assert triples == [(seed, t, seed) for seed, t in pairs]
    assert [each[:2] for each in it.seen] == pairs


def test_several_seeds_need_the_seed():
    with pytest.raises(ValueError, match=r"a function of \(seed, row\) or \(seed, row, run\).*it takes \(row\)"):
        fedncv.simulate_many(seeds=[0], on_round=lambda row: None, **QUICK)


def test_the_model_after_a_round_can_be_read():
    models = []
    result = fedncv.simulate(on_round=lambda row, run: models.append(run.state_dict()), **QUICK)
    assert all(torch.equal(value, result.state_dict()[name]) for name, value in models[-1].items())
    assert not torch.equal(models[0]["head.weight"], models[-1]["head.weight"])


# ---- stopping ------------------------------------------------------------------------------------------


def test_a_stopped_run_says_where_and_why_and_is_resumed_to_the_same_bytes(tmp_path, capsys):
    result = fedncv.simulate(on_round=stop_at(2), out=tmp_path / "run", **QUICK)
    assert (result.stopped, result.last["round"], len(result.rows)) == ("enough", 2, 3)
    assert read_rows(tmp_path / "run")[-1] == {"round": 2, "stopped": "enough"}
    run = read_run(tmp_path / "run")
    assert (run.status, run.rounds, run.stopped) == ("unfinished", 2, "enough")
    assert main(["show", str(tmp_path / "run")]) == 0
    assert "after round 2 of 4 (enough)" in capsys.readouterr().out
    resumed = fedncv.resume(tmp_path / "run", data=QUICK["data"], model=Tiny)
    whole = fedncv.simulate(out=tmp_path / "whole", **QUICK)
    assert resumed.stopped == ""
    assert resumed.rows == whole.rows
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_one_stopped_run_of_a_stack_leaves_the_others_alone(engine):
    def stop_seed_one(seed, row, run):
        if (seed, row["round"]) == (1, 2):
            run.stop("seed one")

    many = {"seeds": [0, 1, 2], "engine": engine, **QUICK}
    stopped, whole = (fedncv.simulate_many(on_round=f, **many) for f in (stop_seed_one, None))
    assert [result.stopped for result in stopped] == ["", "seed one", ""]
    assert [len(result.rows) for result in stopped] == [5, 3, 5]
    for ours, theirs in zip(stopped, whole, strict=True):
        assert [row["before"] for row in ours.rows] == [row["before"] for row in theirs.rows[: len(ours.rows)]]


def test_a_run_can_be_stopped_before_its_first_round_and_not_after_its_last(tmp_path):
    assert [row["round"] for row in fedncv.simulate(on_round=stop_at(0), **QUICK).rows] == [0]
    result = fedncv.simulate(on_round=stop_at(4), out=tmp_path / "run", **QUICK)
    assert result.stopped == ""
    assert read_run(tmp_path / "run").status == "finished"


def test_a_reason_is_always_there():
    assert fedncv.simulate(on_round=lambda row, run: run.stop(""), **QUICK).stopped == "no reason given"


# ---- the page ------------------------------------------------------------------------------------------


def test_early_stopping_as_on_the_page():
    (code,) = blocks("Callbacks")
    there = {}
    exec(code, there)
    result = there["result"]
    assert result.stopped.startswith("no better than")
    scores = [row["before"] for row in result.rows]
    assert max(scores[-3:]) <= max(scores[:-3])


@pytest.mark.filterwarnings("default")  # those of the loggers are not ours
@pytest.mark.parametrize("code", blocks("Loggers"), ids=["tensorboard", "mlflow", "wandb"])
def test_loggers_as_on_the_page(code, tmp_path, monkeypatch):
    name = next(node.names[0].name for node in ast.parse(code).body if isinstance(node, ast.Import)).rpartition(".")[2]
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    for variable, value in {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db", "WANDB_SILENT": "true", "WANDB_MODE": "offline",
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    exec(code, {"fedncv": fedncv, "settings": QUICK})
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator("events/fedavg").Reload()
        assert [each.step for each in events.Scalars("before")] == [0, 1, 2, 3, 4]
        assert "before_clients" not in events.Tags()["scalars"]
    elif name == "mlflow":
        import mlflow

        history = mlflow.MlflowClient().get_metric_history(mlflow.last_active_run().info.run_id, "before")
        assert [each.step for each in history] == [0, 1, 2, 3, 4]
    else:
        assert list((tmp_path / "wandb").glob("offline-run-*"))
