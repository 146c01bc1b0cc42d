"""What a log says of runs under way, by a clock that the test moves."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from fedncv import simulate, store
from fedncv.cli import progress
from fedncv.cli.progress import Log, RunProgress, start_line, unfinished
from fedncv.config import RunConfig
from fedncv.results import STATE


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "num_cores", lambda: 8)
    return clock


@pytest.fixture
def said(capsys):
    def lines():
        return capsys.readouterr().err.splitlines()

    return lines


def test_the_first_line_says_how_much_is_to_do_and_on_what(clock, monkeypatch):
    monkeypatch.setattr(progress.torch.cuda, "get_device_name", lambda name: "a GPU")
    cpu, gpu = RunConfig(), RunConfig(device="cuda:1", engine="stacked")
    assert start_line(5, [cpu, cpu]) == "5 runs, 3 ended, 2 to do, on cpu (8 cores), engine auto"
    assert start_line(2, [cpu, gpu]).endswith("on cpu (8 cores), engine auto; cuda:1 (a GPU), engine stacked")
    assert start_line(5, []) == "5 runs, nothing to do"


@pytest.fixture
def shown(tmp_path):
    """Progress of some of so many runs with these settings: its watch, and the folders of all runs."""

    def make(total, left, **settings):
        folders = [tmp_path / str(seed) for seed in range(total)]
        for seed, folder in enumerate(folders):
            store.create(folder, RunConfig(seed=seed, **settings))
        return RunProgress("run", folders, folders[:left]).watch, folders

    return make


def test_a_run_alone_has_a_line_for_a_measurement_and_after_ten_seconds(clock, said, shown):
    """Five rounds in 10 s; 15 of the 20 rounds of two runs are left, at 2 s each."""
    watch, (folder, _) = shown(2, 2, rounds=10)
    watch.begin([folder], [0])
    watch.row(folder, {"round": 0, "before": 0.1})
    for t in range(1, 6):
        clock.now = 2.0 * t
        watch.row(folder, {"round": t})
    clock.now = 12.0
    watch.row(folder, {"round": 6, "before": 0.5, "after": 0.625})
    assert said() == [
        "run 0/2  digits  fedavg lr 0.01 seed 0  begins at round 0/10",
        "run 0/2  digits  fedavg lr 0.01 seed 0  round 0/10  before 0.100",
        "run 0/2  digits  fedavg lr 0.01 seed 0  round 5/10  before 0.100  30.0 rounds/min  30 s left",
        "run 0/2  digits  fedavg lr 0.01 seed 0  round 6/10  before 0.500  after 0.625  30.0 rounds/min  28 s left",
    ]


def test_rounds_of_an_earlier_sitting_are_not_in_the_rate(clock, said, shown):
    """One of two was finished long ago, the other one stood at round 7."""
    watch, (folder, _) = shown(2, 1, rounds=10)
    watch.begin([folder], [7])
    clock.now = 10.0
    watch.row(folder, {"round": 8})
    assert said()[1:] == ["run 1/2  digits  fedavg lr 0.01 seed 0  round 8/10  6.0 rounds/min  20 s left"]


def test_runs_that_are_left_are_those_without_a_checkpoint_of_the_last_round(tmp_path):
    config = RunConfig(model="mlp", clients=5, per_round=2, epochs=1, rounds=2)
    simulate(config=config, out=tmp_path / "finished")
    store.create(tmp_path / "new", config)
    folders = [tmp_path / name for name in ("finished", "new")]
    assert unfinished(folders) == folders[1:]
    (tmp_path / "finished" / STATE).unlink()  # it will begin anew
    assert unfinished(folders) == folders


def test_a_run_whose_last_row_is_newer_than_its_checkpoint_is_shown_too(clock, said, shown):
    watch, (folder,) = shown(1, 0, rounds=4)
    watch.begin([folder], [3])
    clock.now = 10.0
    watch.row(folder, {"round": 4})
    assert said()[-1] == "run 1/1  digits  fedavg lr 0.01 seed 0  round 4/4  6.0 rounds/min  0 s left"


def test_a_run_that_diverged_has_no_part_in_the_score_of_its_group(clock, said, shown):
    watch, folders = shown(2, 2, rounds=1)
    watch.begin(folders, [0, 0])
    for folder in folders:
        watch.row(folder, {"round": 0, "before": 0.1})
    clock.now = 1.0
    watch.row(folders[1], {"round": 1, "before": 0.9, "after": 0.9})
    watch.fail(folders[0], "it diverged")
    watch.end(folders)
    assert said()[-2:] == [
        f"failed: {folders[0]}: it diverged",
        "run 2/2  digits  fedavg 2 runs  ended  before 0.900  after 0.900  60.0 rounds/min  0 s left",
    ]


def test_a_group_says_what_it_has_reached_and_one_line_for_its_end(clock, said, shown):
    """Two of four runs together, 4 rounds each: after round 2 of both a quarter is done, after 10 s 30 s are left."""
    watch, folders = shown(5, 4, rounds=4)
    watch.begin(folders[:2], [0, 0])
    for folder in folders[:2]:
        watch.row(folder, {"round": 0, "before": 0.1})
        watch.row(folder, {"round": 1})
    watch.row(folders[0], {"round": 2, "before": 0.25})
    clock.now = 10.0
    watch.row(folders[1], {"round": 2, "before": 0.5})
    for folder, score in zip(folders[:2], (0.5, 0.75), strict=True):
        watch.row(folder, {"round": 3})
        watch.row(folder, {"round": 4, "before": score, "after": 1.0})
    watch.end(folders[:2])
    assert said() == [
        "run 1/5  digits  fedavg 2 runs  begins at round 0/4",
        "run 1/5  digits  fedavg lr 0.01 seed 1  round 2/4  before 0.500  24.0 rounds/min  30 s left",
        "run 3/5  digits  fedavg 2 runs  ended  before 0.625  after 1.000  48.0 rounds/min  10 s left",
    ]


def test_a_run_that_diverged_is_no_work_that_is_left(clock, said, shown):
    """One of two diverges after a round of four; the other one needs 10 s, and then nothing is left."""
    watch, folders = shown(2, 2, rounds=4)
    watch.begin(folders, [0, 0])
    watch.row(folders[0], {"round": 1})
    for t in range(1, 5):
        watch.row(folders[1], {"round": t})
    clock.now = 10.0
    watch.fail(folders[0], "it diverged")
    watch.end(folders)
    assert said()[-1] == "run 2/2  digits  fedavg 2 runs  ended  30.0 rounds/min  0 s left"


def test_a_resumed_run_has_less_left(clock, said, shown):
    """From round 3 of 4: one round in 10 s, and three quarters were done before."""
    watch, folders = shown(2, 2, rounds=4)
    watch.begin(folders[:1], [3])
    clock.now = 10.0
    watch.row(folders[0], {"round": 4})
    assert said()[-1] == "run 1/2  digits  fedavg lr 0.01 seed 0  round 4/4  6.0 rounds/min  40 s left"


def test_a_dataset_of_ones_own_has_a_time_left_as_well(clock, said, shown):
    watch, folders = shown(1, 1, rounds=4, data="folder:path=pictures")
    watch.begin(folders, [0])
    clock.now = 10.0
    for t in (1, 2):
        watch.row(folders[0], {"round": t})
    assert said()[-1].endswith("round 1/4  6.0 rounds/min  30 s left")


def test_a_log_says_that_it_is_at_work_where_nothing_happens(monkeypatch, said):
    monkeypatch.setattr(progress, "QUIET", 0.05)
    log = Log()
    log.say("round 1")
    log.start()
    time.sleep(0.5)
    log.stop()
    first, *others = said()
    assert first == "round 1"
    assert others
    assert all(re.fullmatch(r"still running, \d+ s since: round 1", line) for line in others)
    time.sleep(0.2)
    assert said() == []


def test_a_bar_needs_no_log(monkeypatch, said, tmp_path):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    store.create(tmp_path / "a", RunConfig(rounds=1))
    made = RunProgress("run", [tmp_path / "a"], [tmp_path / "a"])
    monkeypatch.setattr(made, "_bar", SimpleNamespace(disable=False, update=lambda *_, **__: None))
    watch = made.watch
    watch.begin([tmp_path / "a"], [0])
    watch.row(tmp_path / "a", {"round": 1, "before": 0.5})
    watch.end([tmp_path / "a"])
    assert said() == []


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "study"])
def test_the_first_lines_are_in_the_log_while_the_runs_go_on(command, tmp_path):
    """A pipe is buffered as a file is: lines that are not flushed would come at the end."""
    words = ["run", "--method", "fedavg"] if command == "run" else ["study", "smoke", "--methods", "fedavg"]
    sizes = {"model": "mlp", "clients": 5, "per-round": 2, "epochs": 1, "rounds": 100_000, "eval-every": 100_000}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedncv", *words, *options, "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    too_late = threading.Timer(60, process.kill)
    too_late.start()
    lines = [process.stderr.readline() for _ in range(2)]
    too_late.cancel()
    assert process.poll() is None, lines
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert " to do, on cpu (" in lines[0]
    assert "round 0/100000" in lines[1]
