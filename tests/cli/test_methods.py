"""fedncv methods: a line each, or one in full."""

import subprocess
import sys

import pytest

from fedncv import catalogue
from fedncv.cli import main as fedncv
from fedncv.cli.methods import main
from fedncv.methods import METHODS, SWITCHES

WITHOUT_TORCH = """
import sys
from fedncv.cli import main
main(sys.argv[1:])
sys.exit("torch is loaded" if "torch" in sys.modules else 0)
"""


def test_lists_every_method_with_meaning_knobs_and_reference(capsys):
    assert main([]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == [*METHODS, *(f"+{name}" for name in SWITCHES)]
    assert len(METHODS) >= 20
    (fedprox,) = (line for line in lines if line[0] == "fedprox")
    summary, form = "pull local models towards the received one", getattr(METHODS["fedprox"].make(), "form", "")
    assert fedprox == ["fedprox", summary, "mu=0.01", form, "Li 2020, arXiv:1812.06127"]


@pytest.mark.parametrize("name", METHODS)
def test_shows_one_in_full(name, capsys):
    assert main([name]) == 0
    said = capsys.readouterr().out
    entry = METHODS[name]
    for text in (entry.summary, entry.reference, *entry.make().reveals):
        assert text in said


@pytest.mark.parametrize("name", SWITCHES)
def test_shows_a_switch_in_full_under_the_name_it_is_listed_by(name, capsys):
    assert main([f"+{name}"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"+{name}: {SWITCHES[name].summary} (as in fedavg+{name})\n")
    for knob in catalogue.switches()[name].knobs:
        assert f"  {knob.name} = {knob.default} ({knob.kind}): " in said


def test_says_what_is_revealed(capsys):
    main(["fedgen"])
    assert "n_C: how many samples of each class it holds" in capsys.readouterr().out
    main(["local"])
    assert "the server learns from a client:\n  nothing" in capsys.readouterr().out


def test_a_typo_gets_the_nearest_name(capsys):
    assert fedncv(["methods", "scafold"]) == 2
    assert "unknown method 'scafold'; did you mean 'scaffold'?" in capsys.readouterr().err
    assert fedncv(["methods", "+averge"]) == 2
    assert "unknown method '+averge'; did you mean '+average'?" in capsys.readouterr().err
    assert fedncv(["methods", "xyz"]) == 2
    assert "unknown method 'xyz' (there are fedncv, " in capsys.readouterr().err


def test_the_command_loads_no_torch():
    """Nor does the list of commands, nor the version."""
    for words in (["methods"], ["methods", "fedncv"], ["methods", "+prior"], ["--help"], ["--version"]):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), words
        assert done.stdout


def test_on_a_terminal_there_is_a_table(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "┏" in said
    assert "fedncv methods NAME" in said
