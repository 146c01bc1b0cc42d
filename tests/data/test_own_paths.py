"""Every row of the table "Your own data" in the docs runs, and a study of such data works as a whole."""

import csv
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedncv
from fedncv.cli import main
from fedncv.report.gather import gather
from fedncv.results import read_config, read_run, runs_in
from fedncv.study import read_study

PAGE = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text()
SECTION = PAGE.partition("## Your own data")[2].partition("\n\n**")[0]
WRITTEN = re.findall(r"^\|[^|]+\| `(.+)` \|$", SECTION.replace("\\|", "|"), flags=re.MULTILINE)
QUICK = ["--clients", "2", "--per-round", "1", "--rounds", "1", "--epochs", "1"]
CODE = """
import numpy as np
from torch import nn
from fedncv.data import from_arrays, load
from fedncv.methods.fedprox import Config, fedprox

def patients(*, year: int = 2019):
    return from_arrays(np.random.default_rng(year).normal(size=(40, 3)), [0, 1] * 20, name=f"patients of {year}")

everyone = patients(year=1)

def mine(*, mu: float = 0.1):
    return fedprox(Config(mu=mu))

def tokens(input_shape, num_classes):
    return nn.Sequential(nn.Embedding(260, 4), nn.Flatten(), nn.Linear(4 * input_shape[0], num_classes))
"""


def save_pictures(folder):
    random = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (folder / kind).mkdir(parents=True)
        for k in range(20):
            Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(folder / kind / f"{k}.png")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with everything that the table names, as the current one."""
    folder = tmp_path / "my work, 2026 = é"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("birds", "cats, dogs + birds"):
        save_pictures(folder / name)
    random = np.random.default_rng(0)
    rows = [[k, f"{random.normal():.3f}", "AB"[k % 2], ["ill", "well"][k % 2]] for k in range(40)]
    for name, target in (("patients.csv", "outcome"), ("houses.csv", "price")):
        with Path(name).open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["age", "bmi", "hospital", target] if target == "outcome" else ["age", target])
            table.writerows(rows if target == "outcome" else [row[:2] for row in rows])
    held = {u: {"x": [[k / 255] * 784 for k in range(8)], "y": [0, 1] * 4} for u in "abc"}
    Path("femnist/data/train").mkdir(parents=True)
    Path("femnist/data/train/a.json").write_text(json.dumps({"users": list(held), "user_data": held}))
    Path("plays").mkdir()
    Path("plays/shakespeare.txt").write_text(
        "\n\n".join(f"{name}:\n{'to be or not ' * 20}" for name in ("A", "B", "C"))
    )
    Path("my_code.py").write_text(CODE)
    yield folder
    sys.modules.pop("my_code", None)


@pytest.mark.parametrize("written", [words for words in WRITTEN if words.startswith("--data ")])
def test_every_row_of_the_docs_runs(here, written, capsys):
    words = shlex.split(written)
    if "parquet" in written:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import csv as arrow_csv
        from pyarrow import parquet

        assert pyarrow
        parquet.write_table(arrow_csv.read_csv("patients.csv"), "patients.parquet")
    model = "my_code:tokens" if "shakespeare" in written else "mlp"
    assert main(["run", *words, "--model", model, *QUICK, "--out", "out"]) == 0
    assert "owners, but the partition" not in capsys.readouterr().err
    (run,) = runs_in(Path("out"))
    config = read_config(run)
    assert read_run(run).status == "finished"
    if "path=" in config.data:
        assert str(here) in config.data.replace('\\"', '"')
    assert config.code_dir == (str(here) if "my_code" in config.data + config.model else "")


@pytest.mark.parametrize("written", [words for words in WRITTEN if words.startswith("fedncv.")])
def test_every_python_row_of_the_docs_runs(here, written):
    if "from_table" in written:
        pytest.importorskip("datasets", reason="the extra 'hub' (datasets) is not installed")
        import datasets

        table = datasets.Dataset.from_dict({"image": np.zeros((8, 4)).tolist(), "label": [0, 1] * 4})
    else:
        table = None
    x, y = torch.zeros(20, 3), torch.tensor([0, 1] * 10)
    names = {"x": x, "y": y, "owners": y, "torch_dataset": list(zip(x, y, strict=True)), "table": table}
    names["y_float"] = y.double()
    names["settings"] = {"model": "mlp", "partition": "iid", "clients": 2, "per_round": 1, "rounds": 1, "epochs": 1}
    assert eval(written, {"fedncv": fedncv}, names).last["round"] == 1


def test_a_note_says_that_owners_are_not_used(here, capsys):
    words = ["--data", "table:path=patients.csv,y=outcome,owner=hospital", "--partition", "iid", "--model", "mlp"]
    assert main(["run", *words, *QUICK]) == 0
    assert "note: patients has 2 owners, but the partition is iid; --partition natural" in capsys.readouterr().err
    assert [path.name.rpartition("-")[0][:30] for path in Path("runs").iterdir()] == ["patients.csv_y_outcome_owner_h"]


@pytest.mark.parametrize(
    ("data", "task", "words"),
    [
        (
            "table:path=houses.csv,y=price",
            "classification",
            "the targets are numbers, not classes; use task regression",
        ),
        (
            "table:path=patients.csv,y=outcome,x=age",
            "regression",
            r"classes \(ill, well\), not numbers; use task classification$",
        ),
    ],
)
def test_a_task_for_other_targets_is_refused(here, data, task, words):
    with pytest.raises(ValueError, match=words):
        fedncv.simulate(data=data, task=task, model="mlp", partition="iid", clients=2, per_round=1, rounds=1)


def test_a_study_of_a_folder_has_a_column_with_results(here, tmp_path):
    """The folder's path is the name of neither the column's folder nor a part of it."""
    words = ["--methods", "fedavg", "--model", "mlp", *QUICK, "--partition", "iid", "--seeds", "1"]
    assert main(["study", "smoke", "--datasets", f'folder:path="{here}/birds"', *words, "--out", "study"]) == 0
    (column,) = read_study(Path("study")).columns()
    assert re.fullmatch(r"birds-[0-9a-f]{6}", column)
    assert read_run(Path("study") / column / "fedavg-seed0").status == "finished"
    (found,) = gather(Path("study")).columns
    assert found.scores("before")["fedavg"].keys() == {0}


@pytest.mark.slow
def test_a_study_of_own_data_and_methods_works_as_a_whole(here, tmp_path, monkeypatch, capsys):
    """Tuned, reported, extended and resumed from another folder; each dataset has a column and a safe folder."""
    data = ["folder:path=birds", 'folder:path="cats, dogs + birds"', "my_code:patients:year=2020"]
    words = ["--methods", "fedavg", "my_code:mine:mu=0.2+prior", "--model", "mlp", *QUICK, "--partition", "iid"]
    words += ["--tune", "--tuning-lr", "0.01", "0.1", "--tuning-seeds", "1", "--out", str(tmp_path / "study")]
    assert main(["study", "smoke", "--datasets", *data, *words, "--seeds", "1", "--dry-run"]) == 0
    assert re.search(r"total .* 18 .* 270 ", capsys.readouterr().out)  # 18 runs of 40 * 0.75 / 2 samples
    assert main(["study", "smoke", "--datasets", *data, *words, "--seeds", "1"]) == 0
    study = read_study(tmp_path / "study")
    assert study.settings.code_dir == str(here)
    assert [name.rpartition("-")[0] for name in study.columns()] == ["birds", "cats_dogs_birds", "patients_year_2020"]
    assert {len(rates) for rates in study.lr.values()} == {2}
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("my_code")
    sys.path.remove(str(here))
    assert main(["study", "smoke", "--datasets", *study.datasets, *words, "--seeds", "2"]) == 0
    runs = [tmp_path / "study" / cell.folder for cell in read_study(tmp_path / "study").cells()]
    assert len(runs) == 12
    assert {read_run(run).status for run in runs} == {"finished"}
    assert main(["report", str(tmp_path / "study")]) == 0
    assert "12 of 12 runs finished" in (tmp_path / "study" / "report.html").read_text()
    assert main(["export", str(runs[-1])]) == 0


def test_a_run_goes_on_from_another_folder(here, tmp_path, monkeypatch):
    words = ["--data", "my_code:patients", "--method", "my_code:mine", "--partition", "iid", "--model", "mlp"]
    assert main(["run", *words, *QUICK, "--out", str(tmp_path / "out")]) == 0
    (run,) = runs_in(tmp_path / "out")
    rows = (run / "metrics.jsonl").read_bytes()
    (run / "state.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("my_code")
    sys.path.remove(str(here))
    assert main(["resume", str(run)]) == 0
    assert (run / "metrics.jsonl").read_bytes() == rows
    assert main(["variance", str(run), "my_code:mine:mu=1", "--out", str(tmp_path / "variance")]) == 0


def test_the_partition_of_a_regression_is_drawn_by_its_sizes(here, capsys):
    words = ["--data", "table:path=houses.csv,y=price", "--partition", "iid", "--clients", "4"]
    assert main(["partition", *words]) == 0
    said = capsys.readouterr().out
    assert "samples per client: 10 to 10" in said
    assert "class" not in said
    assert Path("partition.png").is_file()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("patients.csv", "'patients.csv' is a file; write table:path=patients.csv,y=COLUMN"),
        ("my_code.py", "'my_code.py' is a file of code; name a function in it, as in my_code:function"),
        (".", "'.' is a folder; write folder:path=."),
        ("table:patients.csv,y=outcome", r"did you mean table:path=patients.csv,y=outcome\?"),
        ("table:path=patients.csv,y=outcome,standardize=true", r"\); did you mean 'standardise'\?"),
        ("my_code.py:patients", r"name the module without .py; did you mean my_code:patients\?"),
    ],
)
def test_a_near_miss_is_told_what_to_write(here, data, words):
    with pytest.raises(ValueError, match=words):
        fedncv.data.load(data)
