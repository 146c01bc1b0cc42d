"""fedncv variance, as a user calls it."""

import json

import pytest
from federations import FULL_FEDNCV

from fedncv import cli

SMALL = [
    "--model",
    "mlp",
    "--clients",
    "5",
    "--per-round",
    "2",
    "--rounds",
    "3",
    "--epochs",
    "1",
    "--batch-size",
    "200",
]


def main(*argv):
    return cli.main(["variance", *argv])


def test_it_prints_the_table_and_leaves_rows_and_five_pictures_that_can_be_drawn_again(tmp_path, capsys):
    out = tmp_path / "v"
    methods = ["fedavg", "scaffold", FULL_FEDNCV]
    assert main(*methods, *SMALL, "--at", "2", "3", "--out", str(out)) == 0
    said = capsys.readouterr().out
    assert "all at the models of fedavg's run" in said
    assert "scaffold *" in said  # equal weights: another aim
    assert "fedavg *" not in said
    rows = [json.loads(line) for line in (out / "variance.jsonl").read_text().splitlines()]
    assert [(row["method"], row["round"]) for row in rows] == [(m, t) for m in methods for t in (2, 3)]
    pictures = ("error", "split", "beta", "alpha", "layers")
    assert all((out / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in pictures)
    again = tmp_path / "again"
    assert main("--show", str(out / "variance.jsonl"), "--out", str(again)) == 0
    table = said[said.index("digits, dirichlet") : said.index("picture")]
    assert capsys.readouterr().out.startswith(table)
    assert main("fedavg", *SMALL, "--out", str(out)) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err


def test_a_run_is_its_own_reference_and_gives_its_settings(tmp_path, capsys):
    run = tmp_path / "runs"
    cli.main(["run", "--method", "fedvarp", "--seeds", "3", *SMALL, "--eval-every", "0", "--out", str(run)])
    out = tmp_path / "v"
    assert main(str(run / "fedvarp-seed3"), "--at", "3", "--out", str(out), "--no-within") == 0
    (row,) = [json.loads(line) for line in (out / "variance.jsonl").read_text().splitlines()]
    assert (row["method"], row["reference"], row["seed"], row["clients"]) == ("fedvarp", "fedvarp", 3, 5)
    assert row["beta"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([], "name a run's folder or one or more methods"),
        (["fedavgg"], "did you mean 'fedavg'"),
        (["fedper"], "no model that all clients share"),
        (["fedavg", "fedavg"], "twice"),
        (["fedavg", "--at", "9"], "rounds 0 to 3"),
        (["fedavg", "--draws", "2"], "at least 10"),
        (["fedavg", "--reference", "nobody"], "unknown method 'nobody'"),
        (["--show", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["fedavg", "--data", "custom"], "started from Python with objects of your own (data)"),
    ],
)
def test_a_mistake_gets_one_line_and_leaves_nothing_behind(argv, word, tmp_path, capsys):
    out = tmp_path / "v"
    assert main(*argv, *SMALL, "--out", str(out)) == 2
    said = capsys.readouterr().err
    assert word in said
    assert len(said.splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--topology", "ring"], "with topology ring every client has a model of its own"),
        ([], "per_round is 5: all clients reply in every round"),
        (["--sampling", "poisson"], "per_round is 5: all clients reply in every round"),
    ],
)
def test_without_a_draw_or_a_common_model_there_is_nothing_to_measure(argv, word, tmp_path, capsys):
    assert main("fedavg", *SMALL, "--per-round", "5", *argv, "--out", str(tmp_path / "v")) == 2
    assert word in capsys.readouterr().err
    assert not (tmp_path / "v").exists()


def test_without_rounds_there_is_no_path_and_a_file_is_no_folder(tmp_path, capsys):
    assert main("fedavg", *SMALL, "--rounds", "0", "--out", str(tmp_path / "v")) == 2
    assert "rounds is 0: there is no path to follow" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main("fedavg", *SMALL, "--out", str(tmp_path / "file")) == 2
    assert f"{tmp_path / 'file'}: File exists; choose another path" in capsys.readouterr().err


def test_stopping_keeps_the_rows_so_far(tmp_path, capsys, monkeypatch):
    from fedncv.cli import variance

    def two_rows(*arguments, **settings):
        yield from list(real(*arguments, **settings))[:1]
        raise KeyboardInterrupt

    real = variance.rows_of
    monkeypatch.setattr(variance, "rows_of", two_rows)
    out = tmp_path / "v"
    assert main("fedavg", *SMALL, "--at", "1", "2", "--no-within", "--out", str(out)) == 130
    assert "the 1 rows so far" in capsys.readouterr().err
    assert len((out / "variance.jsonl").read_text().splitlines()) == 1
