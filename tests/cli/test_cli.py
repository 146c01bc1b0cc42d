"""The commands as a person meets them: tables, pictures, one line for a mistake, and Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.progress import TextColumn

from fedncv import store
from fedncv.cli import COMMANDS, main
from fedncv.cli.progress import bar
from fedncv.cli.run import folder_name
from fedncv.config import CUSTOM, RunConfig
from fedncv.engine.choose import engine_for
from fedncv.engine.problem import DivergedError
from fedncv.engine.sequential import SequentialEngine
from fedncv.notes import at
from fedncv.recipes import RECIPES
from fedncv.results import CONFIG, METRICS, read_rows, read_run
from fedncv.simulation import resume
from fedncv.study import FILE

QUICK = ["--model", "mlp", "--clients", "5", "--per-round", "2", "--rounds", "3", "--epochs", "1"]


def fedncv(*words, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "fedncv", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_every_command_helps(capsys):
    assert main([]) == main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, meaning in COMMANDS.items():
        assert meaning in out
        with pytest.raises(SystemExit) as left:
            main([name, "--help"])
        assert left.value.code == 0
        assert f"fedncv {name}" in capsys.readouterr().out


def test_help_explains_every_setting(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = re.sub(r"\W+", " ", capsys.readouterr().out)
    for words in ("Local learning rate above 0", "Clients drawn per round from 1 to all", "default 100"):
        assert words in text


def test_a_run_ends_with_a_table_a_picture_and_where_they_are(tmp_path, capsys):
    out = tmp_path / "demo"
    assert main(["run", *QUICK, "--method", "fedavg", "fedprox:mu=0.1", "--seeds", "0", "1", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    for word in (
        "before %",
        "after %",
        "samples",
        "down",
        "fedprox:mu=0.1",
        "label prior alone",
        str(out / "curves.png"),
    ):
        assert word in text
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in out.iterdir()} == {
        "fedavg-seed0", "fedavg-seed1", "fedprox-mu-0.1-seed0", "fedprox-mu-0.1-seed1", "curves.png",
    }  # fmt: skip
    assert main(["show", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "a fedavg" in shown
    assert "b fedprox:mu=0.1" in shown


def test_the_same_command_prints_the_same_digits(tmp_path, capsys):
    command = ["run", *QUICK, "--out", str(tmp_path / "demo"), "--overwrite"]
    tables = []
    for _ in range(2):
        assert main(command) == 0
        tables.append(
            [line for line in capsys.readouterr().out.splitlines() if " ± " in line or line.startswith(" fedavg")]
        )
    assert tables[0] == tables[1]
    assert tables[0]


def test_settings_come_from_recipe_then_file_then_options(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('method = ["fedper"]\nseeds = [3]\nlr = 1\nclients = 6\nper_round = 2\nrounds = 1\nmodel = "mlp"\n')
    out = tmp_path / "out"
    assert main(["run", "--recipe", "smoke", "--config", str(file), "--clients", "7", "--out", str(out)]) == 0
    config = read_run(out / "fedper-seed3").config
    assert (config.clients, config.per_round, config.lr, config.eval_every) == (
        7,
        2,
        1.0,
        RECIPES["smoke"]().settings.eval_every,
    )


def test_a_runs_own_config_repeats_its_seed(tmp_path):
    assert main(["run", *QUICK, "--seeds", "5", "--out", str(tmp_path / "a")]) == 0
    assert (
        main(["run", "--config", str(tmp_path / "a" / "fedavg-seed5" / "config.toml"), "--out", str(tmp_path / "b")])
        == 0
    )
    assert read_rows(tmp_path / "b" / "fedavg-seed5") == read_rows(tmp_path / "a" / "fedavg-seed5")


def test_folders_are_named_after_method_and_seed():
    assert folder_name(RunConfig(method="fedprox:mu=0.1", seed=3)) == "fedprox-mu-0.1-seed3"


MISTAKES = [
    (["runn"], "unknown command 'runn'; did you mean 'run'"),
    (["run", "--rouds", "3"], "--rouds, 3; perhaps you meant --rounds"),
    (["run", "--rounds", "many"], "--rounds must be a whole number, not 'many'"),
    (["run", "--lr", "abc"], "--lr must be a number, not 'abc'"),
    (["run", "--seeds", "0", "a"], "--seeds takes numbers separated by spaces, not '0', 'a'"),
    (["run", "--method", "fedavgg"], "unknown method 'fedavgg'; did you mean 'fedavg'"),
    (["run", "--lr", "-1"], "lr must be above 0"),
    (["run", "--partition", "dirichlet:alpha=0"], "alpha"),
    (["run", "--clients", "0"], "clients must be at least 1, not 0"),
    (["run", "--clients", "5000"], "5000 clients for 1797 samples"),
    (["run", "--clients", "5", "--per-round", "6"], "per_round is 6, but there are 5 clients"),
    (["run", "--recipe", "smok"], "did you mean 'smoke'"),
    (["run", "--config", "nowhere.toml"], "cannot read nowhere.toml: No such file"),
    (["run", "--method", "fedavg", "fedper+momentum"], "needs a model that all clients share"),
    (["run", "--device", "toaster"], "unknown device 'toaster'"),
    (
        ["run", "--device", "mps"],
        "device 'mps' is not supported: scores are sums in float64, which Apple's",
    ),
    (["run", "--device", "mpss"], "unknown device 'mpss'; use cpu, cuda, or one of several GPUs, such as cuda:0"),
    (["run", "--device", "tpu"], "unknown device 'tpu'; use cpu, cuda, or one of several GPUs, such as cuda:0"),
    (["run", "--device", "cpu:7"], "unknown device 'cpu:7'; use cpu, cuda, or one of several GPUs, such as cuda:0"),
    (
        ["run", "--method", "fedavg,fedprox:mu=0.1"],
        "separate several names with spaces: --method fedavg fedprox:mu=0.1",
    ),
    (["run", "--device", "cuda:x"], "unknown device 'cuda:x'; use cpu, cuda, or one of several GPUs, such as cuda:0"),
    (["run", "--method", "fedavg,fedprox:mu=1,"], "--method fedavg fedprox"),
    (["run", "fedavg"], "unexpected value: fedavg; write each value after its option"),
    (["run", "--rounds"], "--rounds needs a value"),
    (["run", "--seeds", "0,1"], "--seeds takes numbers separated by spaces, not '0,1'"),
    (["variance", "fedavg,fedvarp"], "separate several names with spaces: fedncv variance fedavg fedvarp"),
    (
        ["run", "--task", "regression"],
        "cannot compare outputs of shape (2, 10) with targets of shape (2,)",
    ),
    (["run", "--method", "fedprox:mu=0.01", "fedprox"], "fedprox:mu=0.01 and fedprox are the same method"),
    (["run", "--method", "fedavg", "fedavg"], "fedavg-seed0 is named twice; give every method and every seed once"),
    (["run", "--engine", "compiled"], "fedncv: use --layers compiled instead of --engine compiled (fedncv run"),
    (["run", "--engine", "stacked", "--layers", "compiled"], "layers=compiled is for the CPU, not for engine=stacked"),
    (["run", "--seeds"], "at least one"),
    (["show", "nowhere"], "there is no folder nowhere; fedncv run and fedncv study create one"),
    (["show", "."], "holds no run"),
    (["resume"], "fedncv resume needs an argument: A run, or a folder of runs."),
    (["export", "."], "holds no run"),
    (["partition", "--seed", "-1"], "seed must be from 0 to 2^64 - 1, not -1"),
    (["partition", "--out", "picture"], "--out picture has no suffix; end it with .png"),
]


@pytest.mark.parametrize(
    ("words", "message"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_mistake_gets_one_line_and_leaves_nothing_behind(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("fedncv: ")
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def made(folder, **changes):
    """A run that has not begun."""
    store.create(folder, replace(RunConfig(), **changes))
    return str(folder)


def test_a_run_that_cannot_go_on_here_says_where_it_can(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["resume", made(tmp_path / "a", device="cuda")]) == 2
    said = capsys.readouterr().err  # resume has no --device
    assert "torch sees no GPU; use device cpu, or run on a machine with a GPU" in said
    assert f"(set in {tmp_path / 'a' / CONFIG})" in said
    folder = made(tmp_path / "fed" / "server" / "runs" / "first", data=CUSTOM)
    (tmp_path / "fed" / "server" / "server.toml").touch()
    assert main(["resume", folder]) == 2
    assert f"resume it with `fedncv federation resume {tmp_path / 'fed'} --name first`" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "study", "variance", "resume"])
@pytest.mark.parametrize(
    ("there", "device", "message"),
    [
        (0, "cuda", "device is 'cuda', but torch sees no GPU; use device cpu, or run on a machine with a GPU"),
        (1, "cuda:1", "device is 'cuda:1', but torch sees 1 GPU here; use cuda:0"),
        (2, "cuda:7", "device is 'cuda:7', but torch sees 2 GPUs here; use cuda:0 to cuda:1"),
    ],
)
def test_a_gpu_that_is_not_there_is_named_with_those_that_are(
    command, there, device, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: there > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    words = {
        "run": ["--device", device],
        "study": ["smoke", "--device", device],
        "variance": ["fedavg", "--device", device],
        "resume": [made(tmp_path / "a", device=device)],
    }
    assert main([command, *words[command]]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_folder_that_is_not_there_is_named_with_the_one_that_is(tmp_path, capsys):
    folder = made(tmp_path / "fedavg-seed0")
    (tmp_path / "notes").touch()
    for command in ("show", "resume", "report", "export"):
        assert main([command, folder.replace("fedavg", "fedavgg")]) == 2
        assert f"fedavgg-seed0; did you mean {folder}?" in capsys.readouterr().err
        assert main([command, str(tmp_path / "notes")]) == 2
        assert f"notes is a file; name a folder of runs, such as {tmp_path}" in capsys.readouterr().err


def test_runs_and_studies_are_not_mixed_in_one_folder(tmp_path, capsys):
    run = made(tmp_path / "runs" / "fedavg-seed0")
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / FILE).touch()
    study = ["study", "smoke", "--methods", "fedavg", "--seeds", "1"]
    for words, out, message in (
        (["run"], run, f"{run} is a run, so it cannot hold other runs; choose another --out"),
        (study, run, f"{run} is a run, so it cannot hold other runs; choose another --out"),
        (study, tmp_path / "runs", f"{run} is a single run, not part of a study; choose another --out"),
        (["run"], tmp_path / "study", f"{tmp_path / 'study'} holds a study"),
    ):
        before = sorted(tmp_path.rglob("*"))
        assert main([*words, *QUICK, "--out", str(out)]) == 2
        assert message in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before


def test_an_out_that_is_a_file_is_named(tmp_path, capsys):
    (tmp_path / "notes").touch()
    for words in (["run"], ["study", "smoke", "--methods", "fedavg", "--seeds", "1"]):
        assert main([*words, *QUICK, "--out", str(tmp_path / "notes")]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"fedncv: {tmp_path / 'notes'}")
        assert "choose another path" in said


@pytest.mark.parametrize("command", ["show", "resume", "export", "variance"])
def test_a_run_of_another_version_says_so(command, tmp_path, capsys):
    folder = made(tmp_path / "a")
    with (tmp_path / "a" / CONFIG).open("a") as file:
        file.write("wings = 2\n")
    assert main([command, folder]) == 2
    error = capsys.readouterr().err
    assert "unknown key 'wings'" in error
    assert "use the version of fedncv that wrote it" in error


def test_export_of_a_folder_of_runs_names_one_of_them(tmp_path, capsys):
    folder = made(tmp_path / "fedavg-seed0")
    assert main(["export", str(tmp_path)]) == 2
    assert f"{tmp_path} is not a run; name one, such as {folder}" in capsys.readouterr().err


def test_a_bar_is_for_a_terminal_alone(monkeypatch, capsys):
    with bar(TextColumn("behind")) as nobody_looks:
        nobody_looks.add_task("words", total=1)
    assert nobody_looks.disable
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert not bar().disable
    for level in ("quiet", "verbose"):
        with at(level):
            assert bar().disable


def test_show_of_a_study_says_where_its_runs_are(tmp_path, capsys):
    folder = tmp_path / "digits" / "fedavg-seed0"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("")
    assert main(["show", str(tmp_path)]) == 2
    assert f"name a folder of runs, such as {tmp_path / 'digits'}, or see fedncv report" in capsys.readouterr().err


def test_one_diverged_run_does_not_stop_the_others(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["run", *QUICK, "--method", "fedprox:mu=1e30", "fedavg", "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert "diverged in round 1" in captured.err
    assert "failed:" in captured.out
    assert read_run(out / "fedavg-seed0").status == "finished"


def test_one_damaged_run_is_named_and_the_others_have_their_table(tmp_path, capsys):
    """`fedncv resume` must say the same reason as `fedncv show`."""
    out = tmp_path / "out"
    assert main(["run", *QUICK, "--method", "fedavg", "fedper", "--out", str(out)]) == 0
    (out / "fedavg-seed0" / METRICS).write_text("damaged\n")
    for command in ("show", "resume"):
        capsys.readouterr()
        assert main([command, str(out)]) == 2
        said = capsys.readouterr()
        assert f"{out}/fedavg-seed0/{METRICS} was edited, or lacks rows" in said.err
        assert said.err.count("fedncv: ") == 1
        assert re.search(r"(?m)^ fedper +1 ", said.out)


def test_a_run_whose_rows_were_changed_is_no_success_and_loses_nothing(tmp_path, capsys):
    assert main(["run", *QUICK, "--out", str(tmp_path)]) == 0
    path = tmp_path / "fedavg-seed0" / METRICS
    changed = path.read_bytes().replace(b'"lr": ', b'"lr":  ')
    path.write_bytes(changed)
    capsys.readouterr()
    assert main(["resume", str(tmp_path)]) == 2
    assert f"{path} was edited, or lacks rows" in capsys.readouterr().err
    assert path.read_bytes() == changed


def test_several_seeds_share_an_engine_and_have_the_bytes_of_single_runs(tmp_path, monkeypatch):
    """One engine a method; and a folder of runs that stand at other rounds is resumed to the same bytes."""
    command, methods = ["run", *QUICK, "--eval-every", "1"], ("fedavg", "fedper")
    engines = []

    def noted(problems, *, before):
        engines.append([problem.config.seed for problem in problems])
        return engine_for(problems, before=before)

    monkeypatch.setattr("fedncv.runner.engine_for", noted)
    assert main([*command, "--method", *methods, "--seeds", "0", "1", "2", "--out", str(tmp_path / "all")]) == 0
    assert engines == [[0, 1, 2], [0, 1, 2]]
    for seed in range(3):
        assert main([*command, "--method", *methods, "--seeds", str(seed), "--out", str(tmp_path / "one")]) == 0
    names = [f"{method}-seed{seed}" for method in methods for seed in range(3)]
    alone = {name: (tmp_path / "one" / name / METRICS).read_bytes() for name in names}
    assert {name: (tmp_path / "all" / name / METRICS).read_bytes() for name in names} == alone

    def stop(row):
        if row["round"] == 1:
            raise KeyboardInterrupt

    for name in names[1:]:  # the first one is finished, of the others one stands at round 1
        store.create(tmp_path / "all" / name, read_run(tmp_path / "one" / name).config, overwrite=True)
    with pytest.raises(KeyboardInterrupt):
        resume(tmp_path / "all" / names[1], on_round=stop)
    engines.clear()
    assert main(["resume", str(tmp_path / "all")]) == 0
    assert engines == [[2], [1], [0, 1, 2]]
    assert {name: (tmp_path / "all" / name / METRICS).read_bytes() for name in names} == alone
    engines.clear()
    assert main(["resume", str(tmp_path / "all")]) == 0
    assert engines == []


def test_a_run_that_diverges_among_its_seeds_stops_none_of_them(tmp_path, capsys, monkeypatch):
    def diverges(engine, states):
        settled = run_rounds(engine, states)
        seeds = [problem.config.seed for problem in engine.problems]
        return [DivergedError("it diverged") if seed == 1 else each for seed, each in zip(seeds, settled, strict=True)]

    run_rounds = SequentialEngine.run_rounds
    monkeypatch.setattr(SequentialEngine, "run_rounds", diverges)
    assert main(["run", *QUICK, "--seeds", "0", "1", "2", "--out", str(tmp_path)]) == 2
    folders = [tmp_path / f"fedavg-seed{seed}" for seed in range(3)]
    assert [read_run(folder).status for folder in folders] == ["finished", "failed", "finished"]
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fedncv:")]
    assert errors == [f"fedncv: {folders[1]}: it diverged"]


def begin(out, *, rounds=60):
    """A run in a process of its own, some rounds under way."""
    process = fedncv("run", *QUICK[:-4], "--rounds", rounds, "--epochs", "1", "--eval-every", "50", "--out", out)
    metrics = Path(out) / "fedavg-seed0" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 5):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.slow  # tests/test_store.py kills a run at every write point in the fast suite
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_is_resumed_to_the_same_bytes(how, tmp_path):
    process = begin(tmp_path / "stopped")
    os.kill(process.pid, how)
    _, error = process.communicate(timeout=60)
    stopped = tmp_path / "stopped" / "fedavg-seed0"
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert error.splitlines()[-1] == f"stopped; nothing is lost. Resume with:  fedncv resume {tmp_path / 'stopped'}"
        rows = len(read_rows(stopped))
    resumed = fedncv("resume", tmp_path / "stopped")
    _, error = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, error
    if how == signal.SIGINT:  # nothing is lost: not a round is repeated
        timing = [line for line in (stopped / "timing.jsonl").read_text().splitlines() if line]
        assert len(timing) == 61
        assert 5 < rows < 61
    undisturbed = fedncv(
        "run", *QUICK[:-4], "--rounds", 60, "--epochs", "1", "--eval-every", "50", "--out", tmp_path / "whole"
    )
    undisturbed.communicate(timeout=120)
    assert undisturbed.returncode == 0
    for name in ("metrics.jsonl", "state.safetensors", "config.toml"):
        assert (stopped / name).read_bytes() == (tmp_path / "whole" / "fedavg-seed0" / name).read_bytes()


@pytest.mark.slow
def test_output_into_a_closed_pipe_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m fedncv run --help | head -1", shell=True, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
