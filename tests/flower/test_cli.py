"""fedncv federation as a person meets it: a folder, one line for a mistake, and up, status, down."""

import io
import re
import subprocess
import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

from fedncv.cli import main
from fedncv.cli.federation import ACTIONS
from fedncv.cli.federation.run import follow
from fedncv.config import RunConfig
from fedncv.flower import coordinator, processes
from fedncv.flower.halves import NOT_HERE, check


def test_every_action_helps(capsys):
    with pytest.raises(SystemExit) as left:
        main(["federation", "--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    for name, meaning in ACTIONS.items():
        assert meaning in said
        with pytest.raises(SystemExit) as left:
            main(["federation", name, "--help"])
        assert left.value.code == 0
        assert f"fedncv federation {name}" in capsys.readouterr().out


def test_init_writes_a_part_for_each_machine(tmp_path, capsys):
    folder = tmp_path / "trial"
    assert main(["federation", "init", str(folder), "--clients", "3", "--host", "fed.example.org"]) == 0
    assert "fed.example.org" in capsys.readouterr().out
    assert processes.names(folder) == ["server", "0", "1", "2"]
    assert sorted(p.name for p in (folder / "clients" / "1").iterdir()) == [
        "ca.crt",
        "client.toml",
        "compose.yaml",
        "data",
        "fedncv-client.service",
        "node.key",
        "node.pub",
        "roster.toml",
        "rules.toml",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status", "nowhere"], "there is no nowhere/server/server.toml"),
        (["run", "nowhere"], "there is no nowhere/server/server.toml"),
        (["start", "x"], "unknown action of federation 'start'"),
        (["down", "nowhere"], "there is no nowhere/server/server.toml"),
        (["init", "x", "--rounds", "3"], "Unrecognized options: --rounds"),  # it is the runs' affair
        (["init", "x", "--port", "99999"], "port must be from 1 to 65535, or 0 for a free one, not 99999"),
        (["init", "x", "--host", "my host"], "'my host' is not a host name or address"),
        (["init", "x", "--data", "digts"], "did you mean 'digits'"),
        (["run", "x", "--dropout", "0.5"], "--dropout 0.5: real clients fail by themselves; leave --dropout out"),
        (
            ["run", "x", "--secure-sums", "threshold=2", "--eval-every", "5"],
            "secure sums the server asks for no scores",
        ),
        (
            ["run", "x", "--after-every=5", "--secure-sums=threshold=2"],
            "secure sums the server asks for no scores",
        ),
        (["run", "x", "--engine=stacked"], "--engine stacked: every client trains by itself"),
        (["run", "x", "--data-dir", "y"], "--data-dir y: `fedncv federation init` has already divided the samples"),
        (["run", "x", "--sampling", "available"], "invalid choice 'available' for argument '--sampling'"),
        (["client", "nowhere"], "there is no nowhere/client.toml"),
    ],
)
def test_a_mistake_gets_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["federation", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_folder_that_is_in_use_is_left_alone(tmp_path, capsys):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.tex").write_text("")
    assert main(["federation", "init", str(tmp_path / "x"), "--clients", "2"]) == 2
    assert "is not empty" in capsys.readouterr().err


def offered(action, capsys):
    """The settings of a run that the action's help names."""
    with pytest.raises(SystemExit):
        main(["federation", action, "--help"])
    said = capsys.readouterr().out
    return {f.name for f in fields(RunConfig) if re.search(rf"--{f.name.replace('_', '-')}\b(?!-)", said)}


def test_help_offers_what_has_an_effect_and_nothing_else(capsys):
    of_samples = {"data", "data_dir", "partition", "test_share"}
    assert offered("init", capsys) == {*of_samples, "clients", "seed"}
    assert offered("run", capsys) == {f.name for f in fields(RunConfig)} - of_samples - set(NOT_HERE) - {"code"}


@pytest.mark.parametrize("name", NOT_HERE)
def test_a_setting_without_effect_is_refused_with_its_value(name):
    """Also where a run is made from Python."""
    kind = type(getattr(RunConfig, name))
    others = {
        "stream": "arrivals", "probe": "every=2", "diverged": "skip", "device": "cuda", "engine": "stacked",
        "layers": "compiled", "cluster": "auto", "topology": "ring",
    }  # fmt: skip
    value = others.get(name, kind(1) if kind is int else 0.25)
    with pytest.raises(ValueError, match=re.escape(f"{name} is {value!r}: {NOT_HERE[name]}; leave it at ")):
        check(replace(RunConfig(), **{name: value}))


def test_without_a_server_a_run_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fedncv.cli.federation.shared.ANSWER_SECONDS", 0.1)
    folder = tmp_path / "trial"
    assert main(["federation", "init", str(folder)]) == 0
    for action in ("run", "resume"):
        assert main(["federation", action, str(folder)]) == 2
        assert f"does not answer; start it with `fedncv federation up {folder}`" in capsys.readouterr().err
    assert not list((folder / "server" / "runs").iterdir())


@pytest.mark.parametrize(
    ("action", "part", "file"), [("server", "server", "server.key"), ("client", "clients/0", "ca.crt")]
)
def test_a_part_that_is_not_complete_is_not_started(action, part, file, tmp_path, monkeypatch, capsys):
    """Flower would end at once, and be started again for ever."""
    monkeypatch.setattr("fedncv.flower.processes.keep", lambda *_: 0)
    assert main(["federation", "init", str(tmp_path / "trial")]) == 0
    (tmp_path / "trial" / part / file).unlink()
    assert main(["federation", action, str(tmp_path / "trial" / part)]) == 2
    assert f"there is no {tmp_path / 'trial' / part / file}; copy the whole folder" in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "stopped"), [("y\n", True), ("\n", False), ("no\n", False), ("", False)])
def test_ctrl_c_on_a_terminal_offers_to_stop_the_run(typed, stopped, tmp_path, monkeypatch, capsys):
    calls = []

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def stop(*arguments):
        calls.append(arguments)
        return SimpleNamespace(folder=tmp_path, rounds=1, config=SimpleNamespace(rounds=3))

    def wait(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(coordinator, "follow", wait)
    monkeypatch.setattr(coordinator, "stop", stop)
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert follow(tmp_path, "first", 1.0) == 130
    assert calls == ([(tmp_path, "first")] if stopped else [])
    said = capsys.readouterr().err
    assert "Stop the run 'first'? Otherwise it goes on. [y/N]" in said
    assert ("stopped after round 1 of 3" in said) == stopped
    assert (f"fedncv federation stop {tmp_path} --name first" in said) != stopped


@pytest.mark.slow
def test_up_run_status_down(tmp_path):
    """The commands of the docs, as commands; nothing is left running, and down twice is harmless."""

    def fedncv(*words):
        command = [sys.executable, "-m", "fedncv", "federation", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    fedncv("init", "trial", "--clients", "2", "--partition", "iid")
    try:
        assert "clients 0, 1 are connected" in fedncv("up", "trial")
        short = ["--model", "mlp", "--epochs", "1", "--rounds", "2", "--seconds", "250"]
        assert "2 rounds of scaffold" in fedncv("run", "trial", "--method", "scaffold", *short)
        said = fedncv("status", "trial")
        assert "run first: scaffold, round 2 of 2, finished" in said
        assert said.count("connected") == 2
    finally:
        assert "stopped client 1, client 0, server" in fedncv("down", "trial")
    assert "nothing was running" in fedncv("down", "trial")
