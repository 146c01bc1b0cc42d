"""Own methods, data, models and tasks: their names and fingerprints, in one process and across several."""

import dataclasses
import functools
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from federations import Tiny, tiny_dataset
from torch import nn

import fedncv
from fedncv.config import Own, RunConfig, own_object, short_names
from fedncv.fingerprint import fingerprint
from fedncv.methods import METHODS, find_method
from fedncv.methods.fedavg import fedavg
from fedncv.results import by_method, differing, notes_on, read_run, runs_in
from fedncv.tasks import TASKS

QUICK = {"clients": 3, "per_round": 2, "rounds": 1, "epochs": 1, "partition": "iid"}
DATA = tiny_dataset(60)


def scaled(scale):
    """A method: FedAvg with a factor in front of the gradient, a value that its function closes over."""

    def direction(ask, y_P, batch, _down, _own, scratch):
        return scale * ask.grad(y_P, batch), scratch

    return fedavg()._replace(direction=direction)


def halved():
    return scaled(0.5)


# ---- fingerprints ----------------------------------------------------------------------------------------

SOURCE = """
import dataclasses
import functools
import importlib
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from fedncv.fingerprint import fingerprint
from fedncv.methods import find_method

RATE = 0.5


class Pair(NamedTuple):
    first: object
    second: object


class Net(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.layer = nn.Linear(3, outputs)

    def forward(self, x):
        return again(RATE * self.layer(x), 0)


def again(x, times):
    return again(x, times - 1) if times else x


def closed(tensor):
    return lambda x: x + tensor


things = [
    Net, again, closed(torch.arange(4.0)), functools.partial(Net, outputs=3), Pair(closed(2), {"b", "a", "c"}),
    {"x": np.ones(3), "y": [1, 2.5, None]}, find_method("fedncv"), torch.relu, len, nn.Linear(2, 2).__class__,
]
"""


def test_a_fingerprint_is_the_same_in_every_process(tmp_path):
    """Here from source, there imported, with another order of sets."""
    (tmp_path / "own.py").write_text(SOURCE)
    space = {"__name__": "__main__"}
    exec(SOURCE, space)
    here = [fingerprint(thing) for thing in space["things"]]
    code = "import own; print(*map(own.fingerprint, own.things))"
    settings = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True, env=settings
    )
    assert done.stdout.split() == here
    assert len(set(here)) == len(here)


def changed(old, new):
    """The fingerprint of the source's network with one change."""
    assert old in SOURCE
    space = {"__name__": "__main__"}
    exec(SOURCE.replace(old, new), space)
    return fingerprint(space["Net"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("RATE = 0.5", "RATE = 0.25"),  # a global value that its function names
        ("times - 1", "times - 2"),  # a function that it calls
        ("RATE * self", "RATE + self"),  # an operator
        ("nn.Linear(3", "nn.Linear(4"),  # a constant
    ],
)
def test_a_change_in_what_a_class_does_changes_its_fingerprint(old, new):
    assert changed(old, new) != changed(old, old)


def test_a_change_in_what_a_class_does_not_use_leaves_its_fingerprint():
    assert changed("x + tensor", "x - tensor") == changed("import functools", "import functools  # a comment")


@dataclass(frozen=True)
class Knobs:
    first: float
    second: float = 1.0


class Record(NamedTuple):
    first: float
    second: object = ()


def keyword_only(*, rate=0.1):
    return rate


def other_keyword_only(*, rate=0.2):
    return rate


BASE = nn.Linear(2, 2)
DIFFERENT = [
    *(lambda x: x + 1, lambda x: x - 1, lambda y: y.mean(), lambda y: y.sum()),
    *(scaled(1.0), scaled(2.0), find_method("fedavg"), *TASKS.values()),
    *(functools.partial(Tiny, num_classes=3), functools.partial(Tiny, num_classes=4), Tiny),
    *(torch.zeros(3), torch.zeros(4), torch.zeros(3, 1), torch.zeros(3, dtype=torch.int32), np.zeros(3), [0.0] * 3),
    *(0, 0.0, False, None, "", b"", (), [], {}, set(), "0", 1j),
    *(Knobs(1.0), Knobs(2.0), Knobs(1.0, 2.0), Record(1.0), Record(1.0, (2,))),
    *(BASE, nn.Linear(2, 2), nn.Sequential(BASE), nn.Sequential(BASE, nn.ReLU()), nn.Sequential(BASE, nn.Tanh())),
    *(keyword_only, other_keyword_only, Path("a"), Path("b"), re.compile("a"), re.compile("b")),
    *(DATA, DATA._replace(name="other"), DATA._replace(x=DATA.x.clone().index_fill_(0, torch.tensor([5]), 1))),
    *(torch.relu, torch.tanh, len, max, str.upper, str.lower, Tiny((4,), 3).forward),
]


def test_different_things_have_different_fingerprints():
    found = {}
    for thing in DIFFERENT:
        found.setdefault(fingerprint(thing), []).append(thing)
    assert [same for same in found.values() if len(same) > 1] == []


def test_equal_things_have_equal_fingerprints():
    for make in (lambda: scaled(2.0), lambda: find_method("fedncv"), lambda: tiny_dataset(60), lambda: Knobs(1.0)):
        assert fingerprint(make()) == fingerprint(make())
    circle = [1]
    circle.append(circle)
    assert fingerprint(circle) == fingerprint(circle)


def test_every_listed_method_has_a_fingerprint_of_its_own():
    assert len({fingerprint(find_method(name)) for name in METHODS}) == len(METHODS)


def test_a_default_field_that_is_spelled_out_changes_nothing():
    assert fingerprint(Knobs(1.0, 1.0)) == fingerprint(Knobs(1.0))
    assert fingerprint(fedavg()._replace(same_batches=False)) == fingerprint(fedavg())


def test_of_a_large_tensor_blocks_are_read(monkeypatch):
    """Its ends always: a change there is noticed."""
    monkeypatch.setattr("fedncv.fingerprint.WHOLE", 1 << 12)
    monkeypatch.setattr("fedncv.fingerprint.BLOCKS", 4)
    x = torch.zeros(5000)
    found = {fingerprint(x)}
    for place in (0, 4999):
        y = x.clone()
        y[place] = 1
        found.add(fingerprint(y))
    assert len(found) == 3


# ---- names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"method": scaled(2.0)}, "scaled"),
        ({"method": fedavg()._replace(shared=lambda server: server.x_P)}, "fedavg()._replace"),
        ({"data": DATA}, DATA.name),
        ({"data": lambda: DATA}, "data"),
        ({"model": Tiny}, "Tiny"),
        ({"model": lambda shape, _outputs: Tiny(shape, 3)}, "model"),
        ({"model": functools.partial(Tiny)}, "Tiny"),
        ({"task": TASKS["classification"]._replace(score_name="mine")}, "task"),
        ({"method": halved}, "halved"),
    ],
)
def test_an_object_is_named_by_the_function_that_made_it(given, name):
    config = fedncv.simulate(**({"data": DATA, "model": Tiny} | given), **(QUICK | {"rounds": 0})).problem.config
    (kind,) = given
    own = own_object(getattr(config, kind))
    assert own.short == ("method" if "_replace" in name else name)
    assert own.fingerprint


def test_a_name_is_given_to_a_method(tmp_path):
    settings = {"data": DATA, "model": Tiny, **QUICK}
    result = fedncv.simulate(method=scaled(2.0), name="twice as far", out=tmp_path / "a", **settings)
    assert own_object(result.problem.config.method).name == "twice as far"
    assert result.tidy()[0]["method"].startswith("twice as far#")
    (result,) = fedncv.simulate_many(method=halved, name="half", seeds=[1], **settings)
    assert own_object(result.problem.config.method).short == "half"
    for odd in ("thrice + more: x", "a#b, c=1", "é 'q'", "custom:x y"):
        (result,) = fedncv.simulate_many(method=halved, name=odd, seeds=[1], **settings)
        assert own_object(result.problem.config.method).short == odd
    for wrong in ("", " ", "two\nlines", "module:function"):
        with pytest.raises(ValueError, match="name must be one line of text"):
            fedncv.simulate(method=halved, name=wrong, **settings)
    with pytest.raises(ValueError, match="name='mine' names a method of your own; fedprox has a name"):
        fedncv.simulate(method="fedprox", name="mine", **settings)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": 3}, r"method must be a name, a fedncv.Method, or a function .* not 3 \(int\)"),
        ({"method": lambda: DATA}, "method must be .* not a function that returned Dataset"),
        ({"data": torch.zeros(3)}, "data must be a name, a fedncv.Dataset, or a function"),
        ({"model": nn.Linear(2, 2)._parameters}, "model must be a name, or a function that maps"),
        ({"task": lambda: None}, r"task must be .* not a function that returned None \(NoneType\)"),
        ({"optimizer": torch.optim.Adam}, r'not Adam, which needs arguments \(params\); write optimizer="adam"'),
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())}, 'not SGD; write optimizer="sgd"'),
        ({"task": nn.functional.cross_entropy}, r"cross_entropy, which needs .*; write fedncv.Task\(loss="),
        ({"method": lambda k: 3}, r"not <lambda>, which needs arguments \(k\)"),
        ({"data": (torch.zeros(3), torch.zeros(3))}, r"not tuple; make one with fedncv.data.from_arrays\(x, y\)"),
    ],
)
def test_an_object_of_the_wrong_type_is_refused(given, words):
    with pytest.raises(ValueError, match=words) as caught:
        fedncv.simulate(**given, **QUICK)
    assert "\n" not in str(caught.value)


def test_a_text_of_the_config_and_an_object_are_told_apart():
    """A module of a user's own may be called custom.py."""
    for text in ("fedavg", "custom:function", "custom.module:function", "customs"):
        assert own_object(text) is None
    for own in (Own("a", "012abc"), Own("a: b#c, d", "012abc"), Own("package.module:f", "ffffff")):
        assert own_object(str(own)) == own
    assert own_object("custom") == Own("custom", "")


def test_a_builtin_name_is_not_taken_away():
    assert short_names(["fedavg", "custom:fedavg#012abc"]) == {
        "fedavg": "fedavg",
        "custom:fedavg#012abc": "fedavg #012abc",
    }


# ---- never pooled ----------------------------------------------------------------------------------------


def groups_in(folder):
    return {name: [run.config.seed for run in group] for name, group in by_method(map_runs(folder)).items()}


def map_runs(folder):
    return [read_run(path) for path in runs_in(folder)]


def test_two_own_methods_are_two_lines(tmp_path, capsys):
    for i, scale in enumerate((1.0, 2.0)):
        for seed in (0, 1):
            fedncv.simulate(
                method=scaled(scale), data=DATA, model=Tiny, seed=seed, out=tmp_path / f"{i}-{seed}", **QUICK
            )
    a, b = sorted(groups_in(tmp_path).items())
    assert a[0].startswith("scaled #")
    assert b[0].startswith("scaled #")
    assert a[0] != b[0]
    assert a[1] == b[1] == [0, 1]
    from fedncv.cli import main

    assert main(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert a[0] in shown
    assert b[0] in shown


def test_runs_that_differ_in_any_setting_are_no_seeds_of_each_other(tmp_path):
    settings = {"data": DATA, "model": Tiny} | QUICK
    for name, more in {
        "a": {},
        "b": {"seed": 1},
        "c": {"lr": 0.5, "seed": 2},
        "d": {"model": functools.partial(Tiny)},
        "e": {"data": tiny_dataset(70)},
        "f": {},
        "g": {"method": halved},
    }.items():
        fedncv.simulate(out=tmp_path / name, **(settings | more))
    found = groups_in(tmp_path)
    assert sorted(map(len, found.values())) == [1, 1, 1, 1, 2]
    assert found["halved"] == [0]
    runs = map_runs(tmp_path)
    assert set(differing(runs)) == {"data", "lr", "model"}
    first, second = notes_on(runs)
    assert first.startswith("note: these runs differ in data (")
    assert "lr (0.01, 0.5)" in first
    assert second.endswith(f"{tmp_path / 'f'} repeats {tmp_path / 'a'} and is not counted")
    assert [seeds for name, seeds in found.items() if "lr 0.5" in name] == [[2]]


# ---- resumed ---------------------------------------------------------------------------------------------


@pytest.fixture
def started(tmp_path):
    """A run with own objects of which only the model can be imported."""
    objects = {"method": scaled(2.0), "data": DATA, "model": Tiny}
    fedncv.simulate(out=tmp_path / "run", **objects, **QUICK)
    return tmp_path / "run", objects


def test_what_can_be_imported_need_not_be_passed(started):
    folder, objects = started
    del objects["model"]
    assert len(fedncv.resume(folder, **objects).rows) == 2


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"method": scaled(3.0)}, r"started with another method: scaled #\w{6}, now scaled #\w{6}; pass the object of"),
        ({"data": tiny_dataset(61)}, "started with another data"),
        ({"model": functools.partial(Tiny)}, "started with another model: Tiny"),
        ({"task": TASKS["classification"]}, "was started with task 'classification'; leave out task="),
        (
            {"method": None},
            r"started from Python with objects of your own \(method scaled\); pass them again",
        ),
    ],
)
def test_another_object_is_refused(started, other, words):
    folder, objects = started
    with pytest.raises(ValueError, match=words):
        fedncv.resume(folder, **(objects | other))


def test_the_line_that_a_refusal_suggests_makes_it_pass(started):
    folder, objects = started
    with pytest.raises(ValueError, match=r"config\.toml") as refused:
        fedncv.resume(folder, **(objects | {"method": scaled(3.0)}))
    line = re.search(r'method = "[^"]*"', str(refused.value))[0]
    text = re.sub(r"^method = .*$", line, (folder / "config.toml").read_text(), flags=re.MULTILINE)
    (folder / "config.toml").write_text(text)
    assert len(fedncv.resume(folder, **(objects | {"method": scaled(3.0)})).rows) == 2


def test_runs_of_the_time_before_names_are_resumed(tmp_path):
    from fedncv.engine.problem import build, start
    from fedncv.runner import LiveRun, train
    from fedncv.store import create

    config = replace(RunConfig(**QUICK), method="custom", data="custom", model="custom")
    objects = {"method": scaled(2.0), "data": DATA, "model": Tiny}
    create(tmp_path / "run", config)
    problem = build(config, **objects)
    train([LiveRun(problem, start(problem), folder=tmp_path / "run")])
    assert len(fedncv.resume(tmp_path / "run", **objects).rows) == 2
    assert groups_in(tmp_path) == {"custom": [0]}


# ---- fingerprints that must differ ---------------------------------------------------------------------


def net(*, frozen=False, tied=False, hidden=1, hook=False):
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.fill_(0.5)
    layers[0].weight.requires_grad_(not frozen)
    if tied:
        layers[1].weight = layers[0].weight
    layers._hidden = hidden
    if hook:
        layers[0].register_forward_hook(lambda module, args, output: 2 * output)
    return layers


@dataclasses.dataclass
class Point:
    x: int = 0


def with_attribute(lr):
    def function():
        return None

    function.lr = lr
    return function


def beside(x):
    point = Point()
    point.more = x
    return point


DIFFER = {
    "frozen": (net(), net(frozen=True)),
    "tied": (net(), net(tied=True)),
    "private attribute": (net(), net(hidden=2)),
    "hook": (net(), net(hook=True)),
    "cached function": (functools.cache(lambda x: 2 * x), functools.cache(lambda x: 3 * x)),
    "attribute of a function": (with_attribute(1), with_attribute(2)),
    "bound builtin": ({1: 2}.get, {1: 3}.get),
    "sparse": (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
    "default of a dict": (defaultdict(int), defaultdict(float)),
    "attribute beside the fields": (beside(1), beside(2)),
}


@pytest.mark.parametrize("what", DIFFER)
def test_different_objects_have_different_fingerprints(what):
    one, other = DIFFER[what]
    assert fingerprint(one) == fingerprint(one)
    assert fingerprint(one) != fingerprint(other)


def test_a_value_of_another_module_of_ones_own_counts(tmp_path, monkeypatch):
    """Also if that module has the name of one of Python's."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_values.py").write_text("A = 1\nB = 1\n")
    (tmp_path / "my_code.py").write_text("import my_values\n\n\ndef scaled(x):\n    return x * my_values.A\n")
    values, code = importlib.import_module("my_values"), importlib.import_module("my_code")
    before = fingerprint(code.scaled)
    values.B = 2
    assert fingerprint(code.scaled) == before
    values.A = 2
    assert fingerprint(code.scaled) != before


@pytest.mark.parametrize(("folder", "read"), [("site-packages", False), ("dist-packages", False), ("mine", True)])
def test_packages_of_another_environment_count_by_their_name(folder, read, tmp_path, monkeypatch):
    """A virtual environment may use the system's packages, which are not below its own folder."""
    (tmp_path / folder).mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / folder))
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    found = []
    for number in (1, 2):
        (tmp_path / folder / "beside.py").write_text(f"def loss(x):\n    return {number} * x\n" + "#" * number)
        sys.modules.pop("beside", None)
        importlib.invalidate_caches()
        found.append(fingerprint(importlib.import_module("beside").loss))
    sys.modules.pop("beside")
    assert (found[0] != found[1]) == read


def test_no_run_is_lost_if_a_name_looks_like_another_with_a_setting(tmp_path):
    for i, (name, lr, scale) in enumerate([("x, lr 0.1", 0.1, 1.0), ("x", 0.1, 2.0), ("x", 0.2, 2.0)]):
        fedncv.simulate(method=scaled(scale), name=name, data=DATA, model=Tiny, lr=lr, **QUICK, out=tmp_path / str(i))
    groups = by_method([read_run(tmp_path / str(i)) for i in range(3)])
    assert [len(group) for group in groups.values()] == [1, 1, 1]
