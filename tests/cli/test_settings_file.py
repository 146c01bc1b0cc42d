"""--config reads what --print-config prints: the same settings, whatever they are."""

import tomllib
from dataclasses import fields
from itertools import pairwise

import pytest

from fedncv.cli import main
from fedncv.config import Settings, options
from fedncv.results import CONFIG
from fedncv.study import FILE, read_study

QUICK = ["--model", "mlp", "--clients", "5", "--per-round", "2", "--rounds", "1", "--epochs", "1"]
OTHER = Settings(
    data="synthetic:clients=9,samples=40", data_dir="/data", partition="iid", stream="arrivals:start=0.5,rate=0.1",
    clients=9, unseen=0.3, test_share=0.125, model="mlp", rounds=3, per_round=4, sampling="available", availability=0.3,
    dropout=0.1, stragglers=0.2, epochs=2, batch_size=7, lr=1e-5, schedule="cosine:floor=0.1",
    optimizer="adamw:beta1=0.8", weight_decay=1e-3, buffers="personal", eval_every=3, after_every=2, eval_clients=4,
    metrics=("f1_macro", "ece"), probe="every=2", checkpoint_every=5, rows="disk", diverged="skip", dtype="float64",
    precision="float32", device="cuda:3", engine="ray", cluster="host:6379", workers=2, block=3, layers="torch",
)  # fmt: skip
LEFT = {
    "code_dir",
    "task",
    "momentum",
    "topology",
}  # one is filled in; the others have no second value that fits the rest


def printed(capsys, *words):
    capsys.readouterr()
    assert main([*map(str, words), "--print-config"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def test_every_setting_makes_the_round_trip(tmp_path, capsys):
    """All settings at other values than their defaults, first as options, then from the file alone."""
    changed = {f.name for f in fields(Settings) if getattr(OTHER, f.name) != f.default}
    assert changed | LEFT == {f.name for f in fields(Settings)}
    words = ["--method", "fedavg", "fedprox+prior", "--seeds", "3", str(2**64 - 1), *options(OTHER, Settings())]
    first = printed(capsys, "run", *words)
    (tmp_path / "a.toml").write_text(first)
    assert printed(capsys, "run", "--config", tmp_path / "a.toml") == first
    values = tomllib.loads(first)
    assert values.pop("method") == ["fedavg", "fedprox+prior"]
    assert values.pop("seeds") == [3, 2**64 - 1]
    expected = {f.name: getattr(OTHER, f.name) for f in fields(Settings)}
    assert values == expected | {"metrics": ["f1_macro", "ece"]}


def test_the_runs_of_a_printed_file_are_those_of_the_command(tmp_path, capsys):
    words = ["run", *QUICK, "--recipe", "smoke", "--method", "fedprox:mu=0.1", "fedavg", "--seeds", "4"]
    (tmp_path / "a.toml").write_text(printed(capsys, *words))
    assert not (tmp_path / "a").exists()
    assert main([*words, "--out", str(tmp_path / "a")]) == 0
    assert main(["run", "--config", str(tmp_path / "a.toml"), "--out", str(tmp_path / "b")]) == 0
    for name in ("fedprox-mu-0.1-seed4", "fedavg-seed4"):
        for file in (CONFIG, "metrics.jsonl"):
            assert (tmp_path / "a" / name / file).read_bytes() == (tmp_path / "b" / name / file).read_bytes()


@pytest.mark.parametrize("words", [["--recipe", "smoke"], [], ["--data", 'folder:path=my "é" birds,size=8']])
def test_paths_are_absolute_and_texts_keep_their_marks(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = printed(capsys, "run", *words)
    (tmp_path / "a.toml").write_text(first, encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert printed(capsys, "run", "--config", "../a.toml") == first


@pytest.mark.parametrize(
    "words",
    [
        ["smoke"],
        ["table1", "--clients", "50", "100", "--tune", "--tuning-lr", "0.5", "1", "--tuning-seeds", "3"],
        ["robustness", "--datasets", "digits", "--methods", "fedavg", "--seeds", "2", "--lr", "0.25"],
    ],
    ids=lambda words: words[0],
)
def test_a_study_makes_the_round_trip_and_its_name_may_be_in_the_file(words, tmp_path, capsys):
    first = printed(capsys, "study", *words)
    (tmp_path / "a.toml").write_text(first)
    assert printed(capsys, "study", "--config", tmp_path / "a.toml") == first
    assert printed(capsys, "study", words[0], "--config", tmp_path / "a.toml") == first
    for option, value in pairwise(words):
        if option in ("--seeds", "--tuning-seeds"):
            assert tomllib.loads(first)[option[2:].replace("-", "_")] == int(value)


def test_a_study_from_a_file_is_the_study_of_its_command_and_options_replace_the_files(tmp_path):
    (tmp_path / "a.toml").write_text(
        'name = "smoke"\nmethods = ["fedavg", "local"]\nseeds = 2\nclients = 5\nper_round = 2\nrounds = 9\nepochs = 1\n'
        'model = "mlp"\n'
    )
    assert main(["study", "--config", str(tmp_path / "a.toml"), "--rounds", "1", "--out", str(tmp_path / "a")]) == 0
    words = ["smoke", *QUICK, "--methods", "fedavg", "local", "--seeds", "2"]
    assert main(["study", *words, "--out", str(tmp_path / "b")]) == 0
    assert read_study(tmp_path / "a") == read_study(tmp_path / "b")
    assert read_study(tmp_path / "a").settings.rounds == 1


@pytest.mark.parametrize(
    ("command", "text", "message"),
    [
        ("study", 'name = "table9"', "unknown study 'table9'"),
        ("study", "rounds = 3", "name a study first"),
        ("study", 'name = "smoke"\nseeds = [0, 1]', "seeds must be int, not [0, 1]"),
        ("study", 'name = "smoke"\nseeds = true', "seeds must be int, not True"),
        ("study", 'name = "smoke"\ntune = "yes"', "tune must be bool, not 'yes'"),
        ("study", 'name = "smoke"\ndata = "mnist"', "a study has no data, but datasets"),
        ("study", 'name = "smoke"\nmethod = "fedavg"', "a study has no method, but datasets"),
        ("study", 'name = "smoke"\nclients = [5, "6"]', "clients must be a list of int"),
        ("study", 'name = "smoke"\nroundz = 3', "unknown key 'roundz'; did you mean 'rounds'"),
        ("study", "name = 3", "name must be the name of a study, not 3"),
        ("study", 'name = "smoke"\n[settings]\nlr = 1.0', "is the record of a study, not a file of options"),
        ("run", 'name = "smoke"\n[settings]\nlr = 1.0', "is the record of a study, not a file of options"),
        ("run", "tune = true", "unknown key 'tune'"),
        ("run", "seed = 1\nseeds = [1]", "has both seed and seeds"),
        ("run", "seeds = [1.5]", "seeds must be a list of int"),
        ("run", "lr = '0.1'", "lr must be float, not '0.1'"),
        ("run", "lr = ", "is not valid TOML"),
    ],
)
def test_a_file_that_could_be_misread_is_refused_in_one_line(command, text, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text(text)
    assert main([command, "--config", "a.toml"]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.toml"]


def test_a_name_beside_another_one_in_the_file_is_refused(tmp_path, capsys):
    (tmp_path / "a.toml").write_text('name = "smoke"\n')
    assert main(["study", "table1", "--config", str(tmp_path / "a.toml")]) == 2
    assert "is for the study smoke, not table1" in capsys.readouterr().err


def test_a_studys_record_cannot_be_taken_for_a_file_of_options(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["study", "smoke", *QUICK, "--methods", "fedavg", "--seeds", "1", "--out", str(out)]) == 0
    assert main(["study", "--config", str(out / FILE)]) == 2
    assert "--print-config with that command writes a file" in capsys.readouterr().err
