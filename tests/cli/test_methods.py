"""fedncv methods: a line each, or one in full."""

import pytest

from fedncv.cli import main as fedncv
from fedncv.cli.methods import knobs, main
from fedncv.methods import METHODS, SWITCHES
from fedncv.methods.fedrep import Config as FedRepConfig
from fedncv.methods.scaffold import Config as ScaffoldConfig


def test_lists_every_method_with_meaning_knobs_and_reference(capsys):
    assert main([]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == [*METHODS, *(f"+{name}" for name in SWITCHES)]
    assert len(METHODS) >= 20
    (fedprox,) = (line for line in lines if line[0] == "fedprox")
    assert fedprox == ["fedprox", "a pull towards the received model", "mu=0.01", "Li 2020, arXiv:1812.06127"]


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
    for knob in knobs(SWITCHES[name].config):
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


def test_knobs_are_read_from_the_config():
    option, server_lr = knobs(ScaffoldConfig)
    assert (option.kind, option.default) == ("I or II", "II")
    assert (server_lr.name, server_lr.kind, server_lr.default) == ("server_lr", "float", "1.0")
    assert server_lr.meaning.startswith("Server step, above 0")
    assert knobs(None) == []


def test_a_meaning_may_take_two_lines():
    (knob,) = knobs(FedRepConfig)
    assert knob.meaning.endswith("The others train the head; it gets one epoch even where none is left.")


def test_on_a_terminal_there_is_a_table(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "┏" in said
    assert "fedncv methods NAME" in said
