"""The user's own code that a config names: edited code is another run, and is never taken for the first one."""

import importlib
import sys

import pytest

import fedncv
from fedncv.cli import main
from fedncv.config import RunConfig, changed_code
from fedncv.objects import code_of
from fedncv.report.gather import gather
from fedncv.report.repeat import again
from fedncv.results import by_method, differing, notes_on, read_config, read_run, runs_in, share_samples

SOURCE = """
import functools

import torch
from torch import nn

import fedncv
from fedncv.methods.fedavg import fedavg

READ = {}


@functools.cache
def numbers():
    READ["numbers"] = len(READ)  # changes a value that it names
    x = torch.arange(80.0).reshape(40, 2) / 80
    return fedncv.Dataset("numbers", x, (x[:, 0] > 0.5).long(), 2)


def net(shape, outputs):
    return nn.Sequential(nn.Linear(shape[0], 3), nn.Tanh(), nn.Linear(3, outputs))


def mine(*, scale: float = 0.5):
    def direction(ask, y_P, batch, down, own, scratch):
        return scale * ask.grad(y_P, batch), scratch

    return fedavg()._replace(direction=direction)
"""
OWN = {"data": "codes:numbers", "model": "codes:net", "method": "codes:mine"}
QUICK = {"clients": 3, "per_round": 2, "rounds": 1, "epochs": 1, "partition": "iid", "engine": "sequential"}


@pytest.fixture
def edit(tmp_path, monkeypatch):
    """Write the file with some words replaced, as if for another process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(**changes):
        text = SOURCE
        for old, new in changes.values():
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "codes.py").write_text(text)
        sys.modules.pop("codes", None)
        importlib.invalidate_caches()

    write()
    yield write
    sys.modules.pop("codes", None)


MODEL = ("nn.Tanh", "nn.ReLU")
METHOD = ("scale * ask", "-scale * ask")
DATA = ("> 0.5", "> 0.4")


def test_the_config_has_the_fingerprints_of_the_functions_it_names(edit, tmp_path):
    first = fedncv.simulate(out=tmp_path / "run", **OWN, **QUICK).config
    assert read_config(tmp_path / "run") == first
    words = dict(word.split("#") for word in first.code.split())
    assert list(words) == ["codes:mine", "codes:net", "codes:numbers"]
    for name, change in {"codes:net": MODEL, "codes:mine": METHOD, "codes:numbers": DATA}.items():
        edit(it=change)
        other = dict(word.split("#") for word in code_of(first).split())
        assert {each for each in words if words[each] != other[each]} == {name}
    edit(it=("import functools", "import functools  # a comment"))
    assert code_of(first) == first.code
    assert code_of(RunConfig()) == code_of(RunConfig(method="fedprox:mu=0.1+prior")) == ""
    assert code_of(first, custom=("data",)).split() == [f"{n}#{words[n]}" for n in ("codes:mine", "codes:net")]
    assert fedncv.simulate(first, seed=1).config.code == first.code  # taken anew, not copied
    edit(it=MODEL)
    assert fedncv.simulate(first, seed=1).config.code != first.code


@pytest.mark.parametrize(("setting", "change"), [("model", MODEL), ("method", METHOD), ("data", DATA)])
def test_edited_code_is_not_resumed(edit, tmp_path, setting, change, capsys):
    run = tmp_path / "run"
    fedncv.simulate(out=run, **OWN, **QUICK)
    assert fedncv.resume(run, rounds=2).last["round"] == 2  # the function has changed its global values
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    edit(it=change)
    words = (
        rf"was started with other code \({setting} {OWN[setting]} #\w+, now #\w+\): .*codes.py was edited, or Python"
    )
    with pytest.raises(ValueError, match=words) as refused:
        fedncv.resume(run, rounds=3)
    assert main(["resume", str(run), "--rounds", "3"]) == 2
    assert str(refused.value) in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    line = str(refused.value).partition("write ")[2].partition(" into")[0]
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace(f'code = "{read_config(run).code}"', line))
    if setting != "data":  # its samples are compared too
        assert fedncv.resume(run, rounds=3).last["round"] == 3


def test_a_finished_run_of_edited_code_is_exported(edit, tmp_path, capsys):
    run = tmp_path / "run"
    saved = fedncv.simulate(out=run, **OWN, **QUICK).state_dict()
    edit(method=("scale: float = 0.5", "scale: float = 0.7"))
    assert main(["export", str(run)]) == 0
    assert "has changed" not in capsys.readouterr().err
    edit(method=METHOD, model=MODEL)
    assert fedncv.export_run(run).exists()
    assert "the code of codes:net has changed since this run" in capsys.readouterr().err
    edit(model=("3", "4"))
    with pytest.raises(ValueError, match=r"holds a model of 17 numbers, but codes:net makes one of 22 now; restore"):
        fedncv.export_run(run)
    assert saved.keys()


def test_a_run_from_before_fingerprints_is_resumed(edit, tmp_path):
    run = tmp_path / "run"
    fedncv.simulate(out=run, **OWN, **QUICK)
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text("".join(x for x in text.splitlines(True) if not x.startswith("code = ")))
    edit(model=MODEL)
    assert fedncv.resume(run, rounds=2).last["round"] == 2
    edit(method=("scale: float = 0.5", "scale: float = 0.7"))
    words = r"started as codes:mine:scale=0.5, but 'codes:mine' means codes:mine:scale=0.7 now: your file has other"
    with pytest.raises(ValueError, match=words):
        fedncv.resume(run, rounds=3)
    edit(method=("scale", "size"))
    with pytest.raises(
        ValueError, match=r"started as codes:mine:scale=0.5, but your file has changed since: .*no knob"
    ):
        fedncv.resume(run, rounds=3)


def test_seeds_of_two_codes_are_two_lines(edit, tmp_path, capsys):
    out = tmp_path / "out"
    for method in ("codes:mine", "codes:mine:scale=0.5", "fedavg"):
        fedncv.simulate(out=out / method[-4:], **OWN | {"method": method}, **QUICK)
    assert not differing([read_run(path) for path in runs_in(out)])  # other methods are no other code
    assert share_samples([read_run(path) for path in runs_in(out)])
    assert gather(out).differing == []
    edit(method=METHOD)
    fedncv.simulate(out=out / "other", seed=1, **OWN, **QUICK)
    runs = [read_run(path) for path in runs_in(out)]
    found = by_method(runs)
    assert sorted(map(len, found.values())) == [1, 1, 1, 1]
    assert sum(name.startswith("mine, code mine #") for name in found) == 2
    assert notes_on(runs)[0].startswith("note: these runs differ in code (mine #")
    assert share_samples(runs)
    with pytest.raises(ValueError, match=r"different protocols .*: code \('mine #\w+' in .*, 'mine #\w+' in other\)"):
        gather(out)
    for each in again(gather(out, allow=("code",))):
        assert "#" not in each.text
        assert "--code " not in each.text
    edit(data=DATA)
    fedncv.simulate(out=out / "third", seed=2, **OWN, **QUICK)
    assert not share_samples([read_run(path) for path in runs_in(out)])
    assert main(["show", str(out)]) == 0
    assert "mine, code mine #" in capsys.readouterr().out


def test_runs_without_a_fingerprint_are_not_averaged_with_those_that_have_one():
    old, new = RunConfig(model="codes:net"), RunConfig(model="codes:net", code="codes:net#3f2a91")
    assert changed_code([old, new]) == ["codes:net"]
    assert changed_code([new, RunConfig(), RunConfig(model="codes:other", code="codes:other#000000")]) == []


def test_a_study_refuses_edited_code(edit, tmp_path, capsys):
    words = ["study", "table1", "--datasets", "codes:numbers", "--methods", "codes:mine", "fedavg", "--seeds", "1"]
    words += ["--model", "codes:net", "--clients", "3", "--per-round", "2", "--rounds", "1", "--epochs", "1"]
    words += ["--partition", "iid", "--out", str(tmp_path / "study")]
    assert main(words) == 0, capsys.readouterr().err
    assert "code =" not in (tmp_path / "study" / "study.toml").read_text()
    assert main(words) == 0
    edit(model=MODEL)
    capsys.readouterr()
    assert main(words) == 2
    assert "was started with other code (model codes:net #" in capsys.readouterr().err
