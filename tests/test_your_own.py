"""docs/your_own.md: its file, its commands and its Python run as they are printed there."""

import re
import shlex
from pathlib import Path

import pytest

from fedncv.cli import main

PAGE = Path(__file__).parents[1] / "docs" / "your_own.md"
ADDED = re.compile(r"^\| `(--[^`]*)` \| (.*) \|$", re.MULTILINE)
REFUSING = re.compile(r"```text\n(.*)\n```")
PYTHON, COMMANDS = re.compile(r"```python\n(.*?)```", re.DOTALL), re.compile(r"```\n(fedncv .*?)```", re.DOTALL)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the page's own.py, as the current one."""
    text = PAGE.read_text(encoding="utf-8")
    (tmp_path / "own.py").write_text(PYTHON.findall(text)[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_every_command_of_the_page_runs(here, capsys):
    (block,) = COMMANDS.findall(PAGE.read_text(encoding="utf-8"))
    for line in block.splitlines():
        assert main(shlex.split(line)[1:]) == 0, line
    assert (here / "runs" / "own" / "report.html").exists()
    printed = capsys.readouterr().out
    assert "signed" in printed
    assert "recall" in printed
    assert list((here / "runs" / "own" / "fedavg-seed0").glob("*.safetensors"))


def test_the_python_of_the_page_runs(here, capsys):
    exec(compile(PYTHON.findall(PAGE.read_text(encoding="utf-8"))[1], "your_own.md", "exec"), {})
    before, recall = map(float, capsys.readouterr().out.split())
    assert 0.4 < before <= 1
    assert 0 <= recall <= 1


@pytest.mark.parametrize(("added", "answer"), ADDED.findall(PAGE.read_text(encoding="utf-8")))
def test_what_is_refused_is_refused_in_those_words(here, capsys, added, answer):
    (command,) = REFUSING.findall(PAGE.read_text(encoding="utf-8"))
    assert main(shlex.split(f"{command} {added} --out {here / 'none'}")[1:]) == 2
    error = capsys.readouterr().err
    assert answer in error
    assert error.count("\n") == 1
    assert not (here / "none").exists()
