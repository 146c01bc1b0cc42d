"""methods/index.json says what the code says. After a change: python tools/method_index.py."""

import runpy
from dataclasses import dataclass
from pathlib import Path

from fedncv import catalogue
from fedncv.methods import METHODS, SWITCHES
from fedncv.methods.fedrep import Config as FedRepConfig
from fedncv.methods.scaffold import Config as ScaffoldConfig

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "method_index.py"))
knobs = TOOL["knobs"]


def test_the_index_is_up_to_date():
    assert catalogue.INDEX.read_text(encoding="utf-8") == TOOL["index"](), "run python tools/method_index.py"


def test_what_is_read_is_what_the_code_says():
    assert list(catalogue.methods()) == list(METHODS)
    assert list(catalogue.switches()) == list(SWITCHES)
    for name, entry in METHODS.items():
        assert catalogue.methods()[name] == TOOL["about"](name, entry)
    for name, switch in SWITCHES.items():
        assert catalogue.switches()[name] == TOOL["about_switch"](name, switch)


def test_titles_are_written_for_people():
    titles = {name: about.title for name, about in catalogue.methods().items()}
    assert (titles["fedavg"], titles["scaffold"], titles["fedncv"]) == ("FedAvg", "SCAFFOLD", "FedNCV")


def test_knobs_are_read_from_the_config():
    option, server_lr, _ = knobs(ScaffoldConfig)
    assert (option.kind, option.default) == ("I or II", "II")
    assert (server_lr.name, server_lr.kind, server_lr.default) == ("server_lr", "float", "1.0")
    assert server_lr.meaning.startswith("Server step, above 0")
    assert knobs(None) == []


def test_a_meaning_may_take_two_lines():
    (knob,) = knobs(FedRepConfig)
    assert knob.meaning.endswith("The others train the head, which gets at least one epoch.")


@dataclass(frozen=True)
class Part:
    strength: float = 1.0


def test_defaults_are_written_as_in_a_methods_name():
    assert [TOOL["written"](value) for value in (True, 0.5, "saga", None, Part())] == [
        "true", "0.5", "saga", "off", "on",
    ]  # fmt: skip
