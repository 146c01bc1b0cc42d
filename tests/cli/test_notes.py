"""--quiet and --verbose: results on stdout, everything else on stderr, and how much of it."""

import os
import re

import pytest

from fedncv import notes
from fedncv.cli import COMMANDS, main
from fedncv.cli.arguments import EVERY_COMMAND

RUN = ["run", "--model", "mlp", "--clients", "5", "--per-round", "2", "--rounds", "4", "--epochs", "1"]


def said(capsys, *words, code=0):
    capsys.readouterr()
    assert main([*map(str, words)]) == code
    return capsys.readouterr()


def test_results_go_to_stdout_and_progress_to_stderr(tmp_path, capsys):
    plain = said(capsys, *RUN, "--out", tmp_path / "a")
    assert "begins at round 0/4" in plain.err
    assert "begins" not in plain.out
    assert re.search(r"(?m)^ fedavg +1 ", plain.out)
    quiet = said(capsys, *RUN, "--quiet", "--out", tmp_path / "b")
    assert quiet.err == ""
    assert quiet.out.replace(str(tmp_path / "b"), str(tmp_path / "a")) == plain.out


@pytest.mark.parametrize("words", [["--verbose", *RUN], [*RUN, "-v"]], ids=["before", "after"])
def test_verbose_has_versions_every_round_and_seconds(words, tmp_path, capsys):
    first, *lines, last = said(capsys, *words, "--out", tmp_path).err.splitlines()
    assert re.fullmatch(r"fedncv \S+, Python 3\.\S+, torch \S+, numpy \S+, \w+ \w+", first)
    assert [re.search(r"round (\d)/4", line)[1] for line in lines if " round " in line and "begins" not in line] == [
        "0", "1", "2", "3", "4",
    ]  # fmt: skip
    assert re.fullmatch(r"fedncv run: \d+\.\d s, exit status 0", last)
    assert notes.VARIABLE not in os.environ


def test_errors_are_said_however_quiet_and_traced_if_verbose(capsys):
    mistake = ["run", "--lr", "-1"]
    plain, quiet = said(capsys, *mistake, code=2), said(capsys, *mistake, "-q", code=2)
    assert plain.err == quiet.err
    assert plain.err.count("\n") == 1
    verbose = said(capsys, *mistake, "-v", code=2).err
    assert plain.err in verbose
    assert "Traceback (most recent call last)" in verbose


@pytest.mark.parametrize("word", ["--quiet", "-v"])
def test_they_may_stand_before_help_and_version(word, capsys):
    assert said(capsys, word, "--help").out == said(capsys, "--help").out == said(capsys, word).out
    assert said(capsys, word, "--version").out == said(capsys, "--version").out


def test_a_command_cannot_be_both(capsys):
    assert "--quiet and --verbose contradict each other" in said(capsys, *RUN, "-q", "-v", code=2).err


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "federation"])
def test_every_commands_help_explains_them(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out
    for line in EVERY_COMMAND.splitlines():
        assert line.strip() in out


def test_the_environment_sets_the_level_too_and_nonsense_there_changes_nothing(monkeypatch, capsys):
    for value, expected in (("quiet", ["", ""]), ("verbose", ["a\n", "b\n"]), ("loud", ["a\n", ""])):
        monkeypatch.setenv(notes.VARIABLE, value)
        notes.note("a")
        first = capsys.readouterr().err
        notes.detail("b")
        assert [first, capsys.readouterr().err] == expected
