"""Runs are resumed, shown and exported from any folder, with own objects too, whatever their folder is called."""

import importlib
import shlex
import sys

import pytest
import torch
from federations import Tiny, tiny_dataset
from safetensors.torch import load_file

import fedncv
from fedncv.cli import main
from fedncv.results import read_config, read_run

QUICK = {"clients": 3, "per_round": 2, "rounds": 1, "epochs": 1, "partition": "iid", "engine": "sequential"}
ODD = "my run, \"é\" =1 $HOME 'x'"
MODULE = """
import torch
from torch import nn
import fedncv


class Net(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.body = nn.Flatten()
        self.head = nn.Linear(shape[0], outputs)

    def forward(self, x):
        return self.head(self.body(x))


def numbers():
    x = torch.arange(60.0).reshape(30, 2) / 60
    return fedncv.Dataset("numbers", x, (x[:, 0] > 0.5).long(), 2)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of one's own in the folder where the run is made. The run is then used in another folder."""
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    work.mkdir()
    elsewhere.mkdir()
    (work / "module_of_mine.py").write_text(MODULE)
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(work)
    module = importlib.import_module("module_of_mine")

    def leave():
        monkeypatch.chdir(elsewhere)
        monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(work)])
        del sys.modules["module_of_mine"]
        importlib.invalidate_caches()
        return work

    yield module, leave
    sys.modules.pop("module_of_mine", None)


def test_a_run_of_importable_objects_is_used_by_every_command_from_anywhere(mine, capsys):
    module, leave = mine
    result = fedncv.simulate(data=module.numbers, model=module.Net, out=ODD, **QUICK)
    run = leave() / ODD
    assert main(["export", str(run), "--to", "model.safetensors"]) == 0
    assert torch.equal(load_file("model.safetensors")["head.weight"], result.state_dict()["head.weight"])
    assert main(["resume", str(run), "--rounds", "2"]) == 0
    assert main(["show", str(run)]) == 0
    assert read_run(run).rounds == 2
    again = capsys.readouterr().out
    assert f"again    fedncv show {shlex.quote(str(run))}" in again
    assert "numbers, 3 clients" in again


def test_a_module_that_was_changed_since_is_refused(mine, capsys):
    module, leave = mine
    fedncv.simulate(data=module.numbers, model=module.Net, out="run", **QUICK)
    work = leave()
    (work / "module_of_mine.py").write_text(MODULE.replace("nn.Flatten()", "nn.Identity()"))
    assert main(["resume", str(work / "run"), "--rounds", "2"]) == 2
    assert "was started with another model: Net #" in capsys.readouterr().err
    assert main(["resume", str(work / "run")]) == 0  # it is finished: nothing to do


def test_a_relative_data_folder_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fedncv.simulate(data_dir="files", model="mlp", out="run", **QUICK)
    assert read_config(tmp_path / "run").data_dir == str(tmp_path / "files")
    words = ["--model", "mlp", "--clients", "3", "--per-round", "2", "--rounds", "1", "--epochs", "1"]
    assert main(["run", *words, "--data-dir", "../files", "--out", "runs"]) == 0
    assert read_config(tmp_path / "runs" / "fedavg-seed0").data_dir == str(tmp_path.parent / "files")


def own_run(folder):
    """A run whose objects cannot be imported."""
    objects = {"data": tiny_dataset(60), "model": lambda shape, _outputs: Tiny(shape, 3)}
    return fedncv.simulate(out=folder, **objects, **QUICK), objects


def test_a_finished_run_of_own_objects_has_nothing_to_do_and_another_says_once_what_it_needs(tmp_path, capsys):
    own_run(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert {name: (tmp_path / "run" / name).read_bytes() for name in before} == before
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace("rounds = 1", "rounds = 2"))
    assert main(["resume", str(tmp_path / "run")]) == 2
    said = capsys.readouterr()
    assert (said.out + said.err).count("objects of your own (data tiny, model)") == 1


def test_a_finished_run_of_own_objects_is_exported_from_python(tmp_path, capsys):
    result, objects = own_run(tmp_path / "run")
    assert main(["export", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "objects of your own (data tiny, model); pass them again" in error
    assert "fedncv.export_run(folder, data=..., model=...)" in error
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    path = fedncv.export_run(tmp_path / "run", tmp_path / "a.safetensors", **objects)
    assert path == tmp_path / "a.safetensors"
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    for client in (None, 1):
        saved = load_file(result.save(tmp_path / "b.safetensors", client))
        exported = load_file(fedncv.export_run(tmp_path / "run", client=client, **objects))
        assert saved.keys() == exported.keys() == result.state_dict(client).keys()
        assert all(torch.equal(saved[name], exported[name]) for name in saved)
    assert (tmp_path / "run" / "model.safetensors").exists()
    with pytest.raises(ValueError, match="was started with another data"):
        fedncv.export_run(tmp_path / "run", **(objects | {"data": tiny_dataset(61)}))
    with pytest.raises(ValueError, match="there is no client 7"):
        result.save(tmp_path / "c.safetensors", 7)


def test_printed_commands_quote_the_folder(tmp_path, capsys, monkeypatch):
    out = tmp_path / ODD
    words = [
        "--model",
        "mlp",
        "--clients",
        "3",
        "--per-round",
        "2",
        "--rounds",
        "1",
        "--epochs",
        "1",
        "--out",
        str(out),
    ]
    assert main(["run", *words]) == 0
    shown = capsys.readouterr().out
    command = next(line for line in shown.splitlines() if line.startswith("again")).partition("    ")[2]
    assert shlex.split(command) == ["fedncv", "show", str(out)]
    assert main(["run", *words]) == 2
    error = capsys.readouterr().err
    command = error[error.index("`") + 1 : error.rindex("`")]
    assert shlex.split(command) == ["fedncv", "resume", str(out / "fedavg-seed0")]
    (out / "fedavg-seed0" / "metrics.jsonl").write_text("{}\n")
    assert main(["show", str(out)]) == 2
    error = capsys.readouterr().err
    command = error[error.index("`") + 1 : error.rindex("`")]
    assert shlex.split(command) == ["fedncv", "resume", str(out / "fedavg-seed0")]


def test_a_run_is_not_resumed_on_other_samples(tmp_path, monkeypatch):
    """A table that was edited in the meantime; the finished model can still be exported."""
    table, run = tmp_path / "t.csv", tmp_path / "run"
    rows = [f"{i % 7},{i % 5},{'yes' if i % 7 > 3 else 'no'}" for i in range(40)]
    table.write_text("\n".join(["a,b,y", *rows]), encoding="utf-8")
    fedncv.simulate(data=f"table:path={table},y=y", model="mlp", **QUICK, out=run)
    assert fedncv.resume(run, rounds=2).last["round"] == 2
    table.write_text("\n".join(["a,b,y", "6,4,yes", *rows[1:]]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"was started with other samples than 'table:path=.*a file was changed"):
        fedncv.resume(run, rounds=3)
    assert fedncv.export_run(run, tmp_path / "model.safetensors").exists()
