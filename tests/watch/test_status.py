"""What a process says of its run while it trains, and at its end, however that comes about."""

import os
import signal

import pytest
from federations import Tiny, tiny_dataset

import fedncv
from fedncv import heartbeat, store
from fedncv.results import STATUS, read_run
from fedncv.runner import Watch, run_group
from fedncv.watch.follow import FollowedFolder
from fedncv.watch.overview import overview

QUICK = {
    "data": tiny_dataset(80), "model": Tiny, "clients": 4, "per_round": 2, "rounds": 4, "epochs": 1, "batch_size": 8,
    "partition": "iid", "eval_every": 1, "engine": "sequential",
}  # fmt: skip


def seen(out):
    """What the page would call the run, and why."""
    folder = FollowedFolder(out)
    folder.look()
    (line,) = overview(folder).lines
    return line.condition.state, line.condition.why


def test_a_run_says_that_it_runs_and_that_it_has_finished(tmp_path):
    said = []
    fedncv.simulate(out=tmp_path / "run", on_round=lambda row: said.append(heartbeat.read(tmp_path / "run")), **QUICK)
    assert {beat.state for beat in said} == {"running"}
    assert {beat.pid for beat in said} == {os.getpid()}
    assert heartbeat.read(tmp_path / "run").state == "finished"
    assert seen(tmp_path / "run") == ("finished", "")


def interrupt(row):
    if row["round"] == 2:
        raise KeyboardInterrupt


def terminate(row):
    if row["round"] == 2:
        os.kill(os.getpid(), signal.SIGTERM)


def fail(row):
    if row["round"] == 2:
        raise RuntimeError("the disk of <somebody> is full")


def stop(row, run):
    if row["round"] == 2:
        run.stop("good enough")


@pytest.mark.parametrize(
    ("on_round", "state", "why"),
    [
        (interrupt, "stopped", "stopped by Ctrl-C"),
        (terminate, "stopped", "stopped by SIGTERM"),
        (fail, "failed", "RuntimeError: the disk of <somebody> is full"),
        (stop, "stopped", "good enough"),
    ],
)
def test_a_run_that_ends_early_says_why_and_resumes_to_the_same_bytes(tmp_path, capsys, on_round, state, why):
    if on_round is stop:
        fedncv.simulate(out=tmp_path / "run", on_round=on_round, **QUICK)
    else:
        with pytest.raises((KeyboardInterrupt, SystemExit, RuntimeError)):
            fedncv.simulate(out=tmp_path / "run", on_round=on_round, **QUICK)
    assert seen(tmp_path / "run") == (state, why)
    objects = {name: QUICK[name] for name in ("data", "model")}
    fedncv.resume(tmp_path / "run", **objects)
    assert seen(tmp_path / "run") == ("finished", "")
    fedncv.simulate(out=tmp_path / "whole", **QUICK)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_a_run_that_diverges_says_so(tmp_path):
    with pytest.raises(ArithmeticError):
        fedncv.simulate(out=tmp_path / "run", **QUICK | {"lr": 1e30})
    state, why = seen(tmp_path / "run")
    assert state == "failed"
    assert why == read_run(tmp_path / "run").rows[-1]["failed"]
    assert heartbeat.read(tmp_path / "run").reason == why


def test_a_run_that_cannot_begin_says_why(tmp_path):
    config = fedncv.RunConfig(model="mlp", clients=4, per_round=2, rounds=1, data="cifar10", data_dir=str(tmp_path))
    store.create(tmp_path / "run", config)
    run_group([tmp_path / "run"], Watch(*[lambda *_: None] * 4))
    state, why = seen(tmp_path / "run")
    assert state == "failed"
    assert "cifar10" in why


def test_a_repeated_run_has_no_old_status(tmp_path):
    config = fedncv.RunConfig(model="mlp", clients=4, per_round=2, rounds=1)
    store.create(tmp_path / "run", config)
    heartbeat.write(tmp_path / "run", "failed", "old")
    store.create(tmp_path / "run", config, overwrite=True)
    store.release(tmp_path / "run")
    assert not (tmp_path / "run" / STATUS).exists()
    assert seen(tmp_path / "run") == ("waiting", "")
