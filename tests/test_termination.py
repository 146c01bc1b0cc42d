"""SIGTERM leaves a checkpoint: in commands, in Python, with worker processes; other handlers are left alone."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import fedncv
from fedncv.cli import main
from fedncv.results import read_rows, read_run
from fedncv.termination import Terminated, saving_on_sigterm

QUICK = {"model": "mlp", "clients": 4, "per_round": 2, "epochs": 1, "eval_every": 0, "engine": "sequential"}


def kill_at(round):
    """A callback that sends SIGTERM to this process, in the middle of a run."""

    def on_round(row):
        if row["round"] == round:
            os.kill(os.getpid(), signal.SIGTERM)

    return on_round


def test_from_python_a_saved_run_is_left_with_a_checkpoint(tmp_path, capsys, monkeypatch):
    """The signal arrives again while the checkpoint is written, as `timeout` sends it twice."""

    def write_point(name):
        if name.startswith("state") and len(read_rows(tmp_path / "run")) > 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("fedncv.store.write_point", write_point)
    with pytest.raises(Terminated) as why:
        fedncv.simulate(out=tmp_path / "run", rounds=5, checkpoint_every=100, on_round=kill_at(3), **QUICK)
    monkeypatch.undo()
    assert why.value.code == 143
    assert f"Resume with:  fedncv.resume('{tmp_path / 'run'}')" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert len(read_rows(tmp_path / "run")) == 4
    resumed = fedncv.resume(tmp_path / "run")
    assert resumed.rows == fedncv.simulate(rounds=5, **QUICK).rows
    assert len((tmp_path / "run" / "timing.jsonl").read_text().splitlines()) == 6  # no round was repeated


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_signal_is_not_lost_where_python_drops_what_is_raised(tmp_path):
    """As in the hooks of a fork, or in __del__: the round ends, and then the run stops."""

    class Dropped:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            sum(range(1000))  # the handler is called here

    def on_round(row):
        if row["round"] == 2:
            Dropped()

    with pytest.raises(Terminated):
        fedncv.simulate(out=tmp_path / "run", rounds=5, on_round=on_round, **QUICK)
    assert len(read_rows(tmp_path / "run")) == 3


def test_a_handler_of_the_program_itself_is_left_alone(tmp_path):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    try:
        result = fedncv.simulate(out=tmp_path / "run", rounds=2, on_round=kill_at(1), **QUICK)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(result.rows) == 3
    assert seen == [1]


def test_other_threads_and_runs_without_a_folder_leave_the_signal_as_it_is(tmp_path):
    found = []

    def look(_row):
        found.append(signal.getsignal(signal.SIGTERM))

    fedncv.simulate(rounds=0, on_round=look, **QUICK)
    settings = QUICK | {"out": tmp_path / "run", "rounds": 0, "on_round": look}
    thread = threading.Thread(target=fedncv.simulate, kwargs=settings)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL] * 2
    with saving_on_sigterm():
        handler = signal.getsignal(signal.SIGTERM)
        with saving_on_sigterm():
            assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.getsignal(signal.SIGTERM) is handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_command_ends_with_143_and_says_how_to_resume(tmp_path, capsys, monkeypatch):
    out = tmp_path / 'my run, "é" =1'
    words = ["--model", "mlp", "--clients", "4", "--per-round", "2", "--epochs", "1", "--engine", "sequential"]
    monkeypatch.setattr("fedncv.runner.measure", lambda _engine, _config, states: [_stop(states[0].round)])
    assert main(["run", *words, "--rounds", "4", "--out", str(out)]) == 143
    assert capsys.readouterr().err.strip().endswith(f"Resume with:  fedncv resume '{out}'")
    monkeypatch.undo()
    assert main(["resume", str(out)]) == 0
    assert read_run(out / "fedavg-seed0").status == "finished"


def _stop(round):
    if round == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_group_of_processes_is_stopped_together(jobs, tmp_path):
    """As a batch system does it: parent, jobs and workers get the signal at once, and no round is lost."""
    words = ["--model", "mlp", "--clients", "5", "--per-round", "2", "--rounds", "400", "--epochs", "1"]
    words += ["--methods", "fedavg", "scaffold", "--seeds", "1", "--engine", "processes", "--eval-every", "0"]
    command = [sys.executable, "-m", "fedncv", "study", "smoke", *words, "--jobs", str(jobs), "--out", str(tmp_path)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
    run = tmp_path / "digits" / "fedavg-seed0"
    deadline = time.monotonic() + 120
    while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_bytes().count(b"\n") > 15):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143, error
    assert "stopped; nothing is lost. Resume with the same command." in error
    rows = len(read_rows(run))
    fedncv.resume(run, rounds=rows + 1)
    timing = (run / "timing.jsonl").read_text().splitlines()
    assert len([line for line in timing if "extended" not in line]) == rows + 2  # no round was repeated
