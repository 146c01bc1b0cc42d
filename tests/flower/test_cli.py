"""fedncv federation as a person meets it: a folder, one line for a mistake, and up, status, down."""

import subprocess
import sys

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

from fedncv.cli import main
from fedncv.cli.federation import ACTIONS
from fedncv.flower import processes


def test_every_action_helps(capsys):
    with pytest.raises(SystemExit) as left:
        main(["federation", "--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    for name, (_, meaning) in ACTIONS.items():
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
        "data",
        "node.key",
        "node.pub",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status", "nowhere"], "there is no nowhere/server/server.toml"),
        (["run", "nowhere"], "there is no nowhere/server/server.toml"),
        (["start", "x"], "unknown action of federation 'start'"),
        (["init", "x", "--clients", "2", "--dropout", "0.5"], "real clients fail by themselves"),
        (["init", "x", "--clients", "2", "--sampling", "available"], "who is reachable shows by itself"),
        (["init", "x", "--method", "fedavgg"], "did you mean 'fedavg'"),
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
        assert "ended client 1, client 0, server" in fedncv("down", "trial")
    assert "nothing ran" in fedncv("down", "trial")
