"""fedncv study and fedncv report as a person meets them."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedncv.cli import main
from fedncv.cli.arguments import parse
from fedncv.cli.study import Arguments, _asked
from fedncv.results import LOCK, METRICS, STATE, read_config, read_run
from fedncv.studies import STUDIES, robustness
from fedncv.study import FILE, read_study

QUICK = ["--model", "mlp", "--clients", "5", "--per-round", "2", "--rounds", "3", "--epochs", "1", "--eval-every", "1"]


def study(out, *words):
    return main(["study", "smoke", *QUICK, "--methods", "fedavg", "fedper", "--out", str(out), *words])


def test_a_study_is_a_folder_of_runs_and_its_page(tmp_path, capsys):
    out = tmp_path / "study"
    assert study(out, "--seeds", "2") == 0
    said = capsys.readouterr()
    start, *lines = said.err.splitlines()
    assert re.fullmatch(r"run: 4 runs, 0 ended, 4 to do, on cpu \(\d+ cores\), engine auto", start)
    assert [line.partition("  begins")[0] for line in lines if "begins" in line] == [
        "run 0/4  digits  fedavg 2 runs",
        "run 2/4  digits  fedper 2 runs",
    ]
    ends = [line for line in lines if "ended" in line]
    assert re.fullmatch(
        r"run 2/4  digits  fedavg 2 runs  ended  before 0\.\d{3}  after 0\.\d{3}  [\d,.]+ rounds/min  \d+ s left",
        ends[0],
    )
    mean = sum(read_run(out / f"digits/fedper-seed{seed}").last("before") for seed in (0, 1)) / 2
    assert f"run 4/4  digits  fedper 2 runs  ended  before {mean:.3f}" in ends[1]
    assert f"fedncv report {out}" in said.out
    assert sorted(p.name for p in (out / "digits").iterdir()) == [
        "fedavg-seed0", "fedavg-seed1", "fedper-seed0", "fedper-seed1", "partition.json",
    ]  # fmt: skip
    assert read_study(out).settings.rounds == 3
    assert main(["report", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert "4 of 4 runs finished" in page
    assert "fedncv study smoke --methods fedavg fedper --seeds 2 --clients" in page
    assert "Which client holds which classes" in page


def test_the_same_command_runs_nothing_twice_and_more_seeds_only_the_new_ones(tmp_path, capsys):
    out = tmp_path / "study"
    assert study(out, "--seeds", "1") == 0
    before = (out / "digits/fedavg-seed0/timing.jsonl").read_bytes()
    capsys.readouterr()
    assert study(out, "--seeds", "2") == 0
    text = capsys.readouterr().err
    assert text.startswith("run: 4 runs, 2 ended, 2 to do, ")
    assert "seed 0" not in text
    assert "run 3/4" in text
    assert (out / "digits/fedavg-seed0/timing.jsonl").read_bytes() == before
    assert read_study(out).seeds == (0, 1)


def test_tuning_is_frozen_before_the_reported_seeds_begin(tmp_path, capsys):
    out = tmp_path / "study"
    words = ["--seeds", "1", "--tune", "--tuning-lr", "0.05", "1e30", "--tuning-seeds", "1"]
    assert study(out, *words) == 0
    text = capsys.readouterr().err
    assert text.index("tuning 4/4") < text.index("run 0/2")
    assert read_study(out).lr == {"digits": {"fedavg": 0.05, "fedper": 0.05}}  # 1e30 diverged
    assert read_run(out / "digits/fedavg-seed0").config.lr == 0.05
    assert study(out, *words) == 0
    assert "tuning 1/" not in capsys.readouterr().err
    assert study(out, "--seeds", "1", "--tune") == 2  # another grid after the fact
    assert "another protocol (tuning" in capsys.readouterr().err
    assert main(["report", str(out)]) == 0
    assert "All 4 trials" in (out / "report.html").read_text()


@pytest.mark.parametrize(("words", "rates"), [([], {"fedper": 0.03}), (["--lr", "0.2"], {}), (["--tune"], {})])
def test_a_learning_rate_that_is_asked_for_and_a_grid_are_for_every_method(words, rates):
    """robustness brings rates of its own: without this fedper would keep 0.03, and only fedncv be tuned."""
    named = robustness()
    settings = vars(named.settings) | {"clients": (100,), "data": ""}
    default = Arguments(**settings, name="robustness", datasets=("cifar10",), methods=("fedper", "fedncv"))
    asked = _asked(named, parse(Arguments, ["robustness", *words], command="study", default=default))
    chosen = {method: lr for method, lr in asked.lr.get("cifar10/alpha-1", {}).items() if method in asked.methods}
    assert chosen == rates
    assert len(asked.untuned()) == (2 * 7 if "--tune" in words else 0)


def test_a_diverged_run_stops_no_other_and_is_on_the_page(tmp_path, capsys):
    out = tmp_path / "study"
    assert study(out, "--seeds", "1", "--methods", "fedprox:mu=1e30", "fedavg") == 2
    assert "diverged in round 1" in capsys.readouterr().err
    assert main(["report", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert "1 of 2 runs finished, 1 failed" in page
    assert "diverged in round 1" in page


def test_a_dry_run_says_what_it_costs_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDNCV_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ["--methods", "fedavg", "--seeds", "2", "--dry-run", "--tune", "--tuning-trials", "3"]
    words += ["--tuning-seeds", "1"]
    assert main(["study", "smoke", *QUICK, *words]) == 0
    text = capsys.readouterr().out
    assert "2 runs, 3 more for tuning" in text
    assert " 8,086 " in text  # 5 runs of 3 rounds, 2 of 5 clients, 1 epoch, of 1,797 · 0.75
    assert "total" in text
    assert not (tmp_path / "runs").exists()


def test_help_names_every_study(capsys):
    with pytest.raises(SystemExit):
        main(["study", "--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in STUDIES)


def test_table_2_is_about_the_datasets(tmp_path, capsys):
    assert main(["study", "table2", "--out", str(tmp_path)]) == 0
    assert "| `mnist` |" in capsys.readouterr().out
    assert "| `mnist` |" in (tmp_path / "table2.md").read_text()


MISTAKES = [
    (["study", "tabel1"], "unknown study 'tabel1'; did you mean 'table1'"),
    (["study"], "name"),
    (["study", "smoke", "--seeds", "0"], "at least 1, not 0"),
    (["study", "smoke", "--methods", "fedavgg"], "did you mean 'fedavg'"),
    (["study", "smoke", "--datasets", "digts"], "did you mean 'digits'"),
    (["study", "smoke", "--clients", "3", "--per-round", "9"], "per_round"),
    (["study", "smoke", "--device", "cuda"], "torch sees no GPU"),
    (["study", "smoke", "--tune", "--tuning-seeds", "0"], "--tune needs at least one"),
    (
        ["study", "smoke", "--tune", "--tuning-lr", "0.1", "-1"],
        "--tuning-lr must be above 0 and finite",
    ),
    (["study", "smoke", "--tune", "--tuning-lr", "0.1", "0.1"], "--tuning-lr repeats a value: 0.1 0.1"),
    (
        ["study", "smoke", "--seeds", "0", "1"],
        "--seeds 0 1: a study takes the number of seeds; --seeds 3 means 0, 1 and 2",
    ),
    (
        ["study", "smoke", "--methods", "fedavg,fedper"],
        "separate several names with spaces: --methods fedavg fedper",
    ),
    (["study", "smoke", "--datasets", "digits,mnist"], "--datasets digits mnist"),
    (["study", "smoke", "--methods"], "nothing to run: give at least one value to --methods"),
    (["study", "smoke", "--data", "mnist"], "a study takes --datasets"),
    (["study", "smoke", "--jobs", "0", "--dry-run"], "--jobs must be at least 1, not 0"),
    (["report", "nowhere"], "there is no folder nowhere"),
    (["report", "."], "holds no run (no config.toml in or below it); make some with fedncv run or study"),
    (["report", ".", "--target", "80"], "from 0 to 1, not 80"),
    (["report", ".", "--allow", "lrr"], "--allow: unknown setting 'lrr'; did you mean 'lr'?"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_a_mistake_gets_one_line_and_leaves_nothing_behind(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("fedncv: ")
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_stopped_study_goes_on_to_the_same_bytes(tmp_path):
    words = ["smoke", "--model", "mlp", "--clients", "5", "--per-round", "2", "--rounds", "60", "--epochs", "1"]
    words += ["--methods", "fedavg", "scaffold", "--seeds", "2", "--out"]

    def run(out):
        command = [sys.executable, "-m", "fedncv", "study", *words, str(out)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    stopped = run(tmp_path / "stopped")
    metrics = tmp_path / "stopped/digits/fedavg-seed1/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 5):
        assert stopped.poll() is None, stopped.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stopped.send_signal(signal.SIGINT)
    _, error = stopped.communicate(timeout=60)
    assert stopped.returncode == 130
    assert error.strip() == "stopped; nothing is lost. Resume with the same command."
    assert main(["report", str(tmp_path / "stopped")]) == 0  # a page while it is under way
    assert "not started" in (tmp_path / "stopped/report.html").read_text()
    for out in ("stopped", "whole"):
        process = run(tmp_path / out)
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
    for name in ("fedavg-seed0", "fedavg-seed1", "scaffold-seed0", "scaffold-seed1"):
        a, b = (tmp_path / out / "digits" / name / "metrics.jsonl" for out in ("stopped", "whole"))
        assert a.read_bytes() == b.read_bytes()


@pytest.mark.slow
def test_of_several_processes_one_that_fails_leaves_its_runs_named(tmp_path, capsys):
    """All of fedper is set back, and the checkpoint of its first seed is damaged: no run of it goes on."""
    out = tmp_path / "study"
    assert study(out, "--seeds", "2") == 0
    for folder in (out / "digits/fedper-seed0", out / "digits/fedper-seed1"):
        rows = (folder / METRICS).read_text().splitlines(keepends=True)
        (folder / METRICS).write_text("".join(rows[:2]))
        (folder / STATE).write_text("damaged")
    capsys.readouterr()
    assert study(out, "--seeds", "2", "--jobs", "2") == 2
    error = capsys.readouterr().err
    assert "fedper-seed0: " in error
    assert "2 of 2 runs are unfinished: " in error
    assert f"{out}/digits/fedper-seed0 after round 1 of 3, {out}/digits/fedper-seed1 after round 1 of 3; " in error
    assert "the same command resumes them" in error
    assert "are done" not in error


@pytest.mark.slow
def test_a_killed_process_is_named_and_the_same_command_goes_on(tmp_path):
    out = tmp_path / "study"
    words = ["smoke", *QUICK, "--rounds", "200", "--methods", "fedavg", "scaffold", "--seeds", "1", "--jobs", "2"]

    def run():
        command = [sys.executable, "-m", "fedncv", "study", *words, "--out", str(out)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    process = run()
    metrics = out / "digits/fedavg-seed0" / METRICS
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 5):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(_who_holds(out / "digits/fedavg-seed0"), signal.SIGKILL)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "the process that ran fedavg-seed0 ended with code -9 (-9 means killed, usually out of memory" in error
    assert f"1 of 2 runs are unfinished: {out}/digits/fedavg-seed0 after round " in error
    again = run()
    _, error = again.communicate(timeout=300)
    assert again.returncode == 0, error
    assert read_run(out / "digits/fedavg-seed0").status == "finished"


def _who_holds(folder):
    """The process that trains the run: it alone has its lock open."""
    lock = (folder / LOCK).resolve()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if link.resolve() == lock:
                return int(link.parts[2])
    raise AssertionError(f"nobody trains {folder}")


def test_a_run_with_other_settings_in_a_studys_place_is_refused(tmp_path, capsys):
    out = tmp_path / "study"
    assert study(out, "--seeds", "1") == 0
    shutil.copy(out / FILE, tmp_path / "kept")
    config = out / "digits/fedavg-seed0/config.toml"
    config.write_text(config.read_text().replace("rounds = 3", "rounds = 4"))
    capsys.readouterr()
    assert study(out, "--seeds", "1") == 2
    assert "holds a run whose settings differ from the study's" in capsys.readouterr().err


def test_a_study_goes_on_with_rows_elsewhere(tmp_path):
    out = tmp_path / "study"
    assert study(out, "--seeds", "1") == 0
    assert study(out, "--seeds", "2", "--rows", "disk") == 0
    assert read_study(out).settings.rows == "disk"
    assert [read_config(out / f"digits/fedavg-seed{seed}").rows for seed in (0, 1)] == ["auto", "disk"]


def test_tensorboards_events_lie_in_the_runs(tmp_path):
    pytest.importorskip("tensorboard")
    assert study(tmp_path / "study", "--seeds", "1", "--tensorboard") == 0
    assert list((tmp_path / "study/digits/fedavg-seed0/tensorboard").glob("events*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tuned-on", "digits"], "--tuned-on digits needs --tune"),
        (["--tune", "--tuning-lr", "0.1", "--tuning-trials", "4"], "leave it or --tuning-trials out"),
        (["--tune", "--tuning-trials", "0"], "--tuning-trials must be at least 1, not 0"),
        (
            ["--tune", "--tuning-rounds", "-1"],
            "--tuning-rounds must be at least 1, or 0 for the study's rounds, not -1",
        ),
        (["--tune", "--tuning-seeds", "0"], "--tune needs at least one trial"),
        (["--tune", "--tuned-on", "digit"], "unknown column in --tuned-on 'digit'; did you mean 'digits'"),
        (["--seeds", "0"], "--seeds, the number of seeds, must be at least 1, not 0"),
    ],
)
def test_a_budget_that_cannot_be_is_refused_in_one_line(tmp_path, capsys, words, said):
    assert study(tmp_path / "study", *words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "study").exists()


def test_table_1_has_its_own_seeds_and_transfers_unless_seeds_are_asked_for():
    named = STUDIES["table1"]()
    default = Arguments(**vars(named.settings) | {"clients": (100,), "data": ""}, name="table1", seeds=0,
                        datasets=("cifar10", "fashion_mnist", "mnist"), methods=("fedavg",))  # fmt: skip

    def asked(*words):
        return _asked(named, parse(Arguments, ["table1", *words], command="study", default=default))

    plain = asked("--tune")
    assert {data: len(plain.seeds_of(data)) for data in plain.datasets} == {
        "cifar10": 10, "fashion_mnist": 5, "mnist": 5,
    }  # fmt: skip
    assert plain.tuning.on == ("mnist=fashion_mnist",)  # CIFAR-100 is not among these
    assert (plain.tuning.trials, plain.tuning.grid) == (8, ())
    assert asked("--tune", "--tuned-on", "cifar10").tuning.on == ("cifar10",)
    assert len(asked("--seeds", "10").seeds_of("mnist")) == 10
    assert asked("--tune", "--tuning-lr", "0.1").tuning.names == ["lr-0.1"]
