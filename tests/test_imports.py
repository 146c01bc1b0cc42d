"""The user's own data and methods by name: what is found, where, and what is said if it is not."""

import itertools
import sys

import pytest

from fedncv import imports
from fedncv.data import load
from fedncv.methods import find_method, in_full
from fedncv.methods.fedprox import Config, fedprox

NUMBER = itertools.count()
OWN = """
from pathlib import Path
from typing import Literal
from fedncv.data import from_arrays
from fedncv.methods.fedprox import Config, fedprox
from fedncv.methods.fedavg import fedavg
import numpy as np

Kind = Literal["a", "b"]

def patients(*, n: int = 6, name="mine", scale: float | None = None, kind: Kind = "a", at: Path = Path("x")):
    return from_arrays(np.full((n, 2), scale or 1.0), [0, 1] * (n // 2), name=name)

made = patients(n=4)

def prox(*, mu: float = 0.5):
    return fedprox(Config(mu=mu))

best = fedprox(Config(mu=2.0))

def number():
    return 3

def needs(x):
    return x

def listed(*, years: list[int] = [1]):
    return made

def broken():
    return [][1]

def refuses():
    raise ValueError("no patients that year")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of a fresh name in the current folder -> its name."""
    name = f"own_module_{next(NUMBER)}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    imports.look_in("")
    sys.modules.pop(name, None)


def test_a_function_makes_the_dataset_with_its_knobs(module):
    assert len(load(f"{module}:patients").x) == 6
    data = load(f'{module}:patients:n=8,name="a, b",scale=3,kind=b')
    assert (len(data.x), data.name, data.x.max()) == (8, "a, b", 3)
    assert load(f"{module}:made").x.shape == (4, 2)


def test_a_function_makes_the_method_and_switches_follow(module):
    for text, mu in [("prox", 0.5), ("prox:mu=0.1", 0.1), ("best", 2.0)]:
        assert find_method(f"{module}:{text}").reveals == fedprox(Config(mu=mu)).reveals
    assert find_method(f"{module}:prox:mu=0.1+momentum:beta=0.5").switches == ("momentum",)
    assert in_full(f"{module}:prox+prior") == f"{module}:prox:mu=0.5+prior:tau=1.0,epsilon=1.0"
    assert in_full(in_full(f"{module}:prox")) == in_full(f"{module}:prox")
    assert in_full(f"{module}:best") == f"{module}:best"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("patient", "has no 'patient'; did you mean 'patients'"),
        ("nothing", r"has no 'nothing' \(it has patients, made, prox, best, "),
        ("number", "returns int, not a fedncv.Dataset"),
        ("best", "is Method, not a fedncv.Dataset"),
        ("made:n=3", "is a Dataset, not a function: it has no knobs"),
        ("needs", r"x cannot be given in a text; make it a knob with a default: def needs\(\*, x="),
        ("listed", r"years is of type list\[int\]; a text can set"),
        ("patients:m=3", r"has no knob 'm' \(it has n, name, scale, kind, at\)"),
        ("patients:n=x", "n must be int, not 'x'"),
        ("patients:kind=c", "kind must be one of a, b, not 'c'"),
        ("broken", r"failed: IndexError: list index out of range \(.*own_module_\d+.py, line 31\)"),
        ("refuses", ":refuses': no patients that year$"),
    ],
)
def test_what_is_wrong_with_a_dataset_is_said_in_one_line(module, text, words):
    with pytest.raises(ValueError, match=words) as caught:
        load(f"{module}:{text}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("made", "is Dataset, not a fedncv.Method"),
        ("number", "returns int, not a fedncv.Method"),
        ("best:mu=1", "it has no knobs"),
        ("prox:mu=a", "mu must be float"),
        ("prox:mu=-1", ":prox': mu must be at least 0"),
        ("prox+nothing", "unknown switch 'nothing'"),
        ("best+prior+prior", "names prior twice"),
    ],
)
def test_what_is_wrong_with_a_method_is_said_in_one_line(module, text, words):
    with pytest.raises(ValueError, match=words) as caught:
        find_method(f"{module}:{text}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def f(:", r"SyntaxError: .*broken_\d+.py, line 1\)"),
        ("import no_such_thing", r"No module named 'no_such_thing' \(.*broken_\d+.py, line 1\)"),
        ("x = 1\nx / 0", r"ZeroDivisionError: division by zero \(.*broken_\d+.py, line 2\)"),
        ("raise SystemExit('usage')", r"SystemExit: usage \(.*broken_\d+.py, line 1\)"),
        ("import os\nos.no_such", r"AttributeError: .*broken_\d+.py, line 2\)"),
    ],
)
def test_a_module_that_does_not_import_says_file_and_line(tmp_path, monkeypatch, code, words):
    name = f"broken_{next(NUMBER)}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words) as caught:
        load(f"{name}:f")
    assert "\n" not in str(caught.value)


def test_a_module_that_is_not_there_says_where_it_was_searched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"there is no module 'nowhere' in {tmp_path}"):
        find_method("nowhere:f")
    with pytest.raises(ValueError, match=r"there is no module 'json.nowhere'"):
        find_method("json.nowhere:f")


def test_the_folder_of_own_modules_is_known_and_found_from_elsewhere(module, tmp_path, monkeypatch):
    load(f"{module}:made")
    assert imports.code_folder([f"{module}:made", "fedavg"]) == str(tmp_path)
    assert imports.code_folder(["fedavg", "json:loads", "fedncv.methods.fedprox:fedprox"]) == ""
    sys.modules.pop(module)
    sys.path.remove(str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="there is no module"):
        load(f"{module}:made")
    imports.look_in(str(tmp_path))
    assert len(load(f"{module}:made").x) == 4


def test_another_module_of_that_name_is_never_taken_for_the_runs(module, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / f"{module}.py").write_text("made = 3")
    monkeypatch.chdir(tmp_path / "other")
    sys.path.insert(0, str(tmp_path / "other"))  # as `python -m` does
    imports.look_in(str(tmp_path))
    assert len(load(f"{module}:made").x) == 4  # the run's folder comes before the current one
    imports.look_in(str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"is loaded from .*, but the run was made with the one in .*other"):
        load(f"{module}:made")
