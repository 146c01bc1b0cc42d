"""Several folders on one page: equal settings are pooled, different ones are told apart, and the page says which."""

import json
import shutil
import statistics
from dataclasses import replace

import pytest
from made_up_runs import made_up_study, write_run, write_study

from fedncv.cli import main
from fedncv.report.gather import gather
from fedncv.report.page import page
from fedncv.report.reruns import reruns
from fedncv.report.table import main_table


@pytest.fixture
def study():
    return made_up_study()


def page_of(results):
    return page(results, main_table(results), [])


def test_more_seeds_in_another_folder_are_more_seeds(study, tmp_path):
    write_study(tmp_path / "a", study)
    write_study(tmp_path / "b", replace(study, seeds=(3, 4)))
    results = gather(tmp_path / "a", tmp_path / "b", out=tmp_path / "both")
    assert results.methods == list(study.methods)
    assert [run.config.seed for run in results.columns[0].runs["fedavg"]] == [0, 1, 2, 3, 4]
    assert results.apart == []
    assert "settings are equal, so seeds of one method are pooled" in page_of(results)


def test_the_same_runs_in_both_count_once(study, tmp_path):
    write_study(tmp_path / "a", study)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    alone, both = gather(tmp_path / "a"), gather(tmp_path / "a", tmp_path / "b")
    assert both.methods == alone.methods
    assert both.columns[0].scores("before") == alone.columns[0].scores("before")


def test_other_numbers_for_one_seed_are_told_apart(study, tmp_path):
    """Another machine, or an own object that changed: nothing may be averaged or dropped in silence."""
    write_study(tmp_path / "a", study)
    write_study(tmp_path / "b", study, level=lambda _, m: 0.5 if m == "fedavg" else 0.7)
    results = gather(tmp_path / "a", tmp_path / "b")
    assert "fedavg @ a" in results.methods
    assert "fedavg @ b" in results.methods


def test_a_method_with_other_settings_is_told_apart_and_others_are_not(study, tmp_path):
    write_study(tmp_path / "a", study)
    other = replace(study, methods=("fedavg", "fedprox"), settings=replace(study.settings, lr=0.5))
    write_study(tmp_path / "b", other)
    results = gather(tmp_path / "a", tmp_path / "b")
    assert results.methods == ["fedavg @ a", "fedavg @ b", "scaffold", "fedncv", "fedprox"]
    assert results.apart == ["lr: 0.01 in a; 0.5 in b"]
    assert [len(column.runs) for column in results.columns] == [5]  # lr does not change the samples: one column
    text = page_of(results)
    for said in ("FedAvg (a)", "FedAvg (b)", "lr: 0.01 in a; 0.5 in b", "<b>b</b> (FedAvg, FedProx)"):
        assert said in text
    assert "SCAFFOLD (a)" not in text


def test_other_samples_are_other_columns(study, tmp_path):
    write_study(tmp_path / "a", study)
    write_study(tmp_path / "b", replace(study, settings=replace(study.settings, partition="iid")))
    results = gather(tmp_path / "a", tmp_path / "b")
    assert [column.title for column in results.columns] == ["CIFAR-10 (a)", "CIFAR-10 (b)"]
    assert results.methods == list(study.methods)
    assert {entry.ours.num_seeds for entry in main_table(results).entries.values()} == {3}


def test_a_study_and_a_single_run(study, tmp_path):
    write_study(tmp_path / "a", study)
    config = replace(study.cells()[0].config, method="fedavg+prior")
    write_run(tmp_path / "one", config, 0.8)
    results = gather(tmp_path / "a", tmp_path / "one")
    assert results.methods[-1] == "fedavg+prior"
    assert len(results.columns) == 1
    assert results.title == "a, one"
    assert "fedncv run --data cifar10" in page_of(results)
    assert "fedncv study table1 --out" in page_of(results)


def test_what_is_missing_keeps_its_place(study, tmp_path):
    write_study(tmp_path / "a", study)
    other = replace(study, settings=replace(study.settings, lr=0.5))
    write_study(tmp_path / "b", other, skip=("cifar10/fedavg-seed2",))
    results = gather(tmp_path / "a", tmp_path / "b")
    ((column, method, seed, status, _),) = results.missing
    assert (column, method, seed, status) == ("cifar10", "fedavg @ b", 2, "not started")
    assert results.num_planned == 18


def test_folders_of_one_name_go_by_their_paths(study, tmp_path):
    write_study(tmp_path / "x/runs", study)
    write_study(tmp_path / "y/runs", replace(study, settings=replace(study.settings, lr=0.5)))
    results = gather(tmp_path / "x/runs", tmp_path / "y/runs")
    assert {source.label for source in results.sources} == {str(tmp_path / "x/runs"), str(tmp_path / "y/runs")}


def test_two_scores_cannot_share_a_page(study, tmp_path):
    write_study(tmp_path / "a", study)
    write_study(tmp_path / "b", study)
    for path in (tmp_path / "b").glob("*/*/metrics.jsonl"):
        path.write_text(path.read_text().replace('"label_prior"', '"score_name": "minus squared error", "label_prior"'))
    with pytest.raises(ValueError, match="accuracy in a, minus squared error in b"):
        gather(tmp_path / "a", tmp_path / "b")


def test_the_command_writes_one_page_for_both_and_refuses_in_one_line(study, tmp_path, capsys):
    write_study(tmp_path / "a", replace(study, seeds=(0,)))
    write_run(tmp_path / "one", replace(study.cells()[0].config, method="fedprox"), 0.8)
    (tmp_path / "empty").mkdir()
    a, one, both, empty = (str(tmp_path / name) for name in ("a", "one", "both", "empty"))
    for words, said in (
        ([a, one], "a report of 2 folders needs a place of its own: add --out FOLDER"),
        ([a, a, "--out", both], f"{a} is named twice; name every folder once"),
        ([a, empty, "--out", both], f"{empty} holds no run"),
        ([a, both, "--out", one], f"--out {one} is a run"),
        ([a, one, "--out", a], f"--out {a} is one of the reported folders"),
        ([a, "--out", one], f"--out {one} is a run"),
    ):
        assert main(["report", *words]) != 0
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert said in error
    assert not (tmp_path / "both").exists()
    assert main(["report", a, one, "--out", both]) == 0
    assert "FedProx" in (tmp_path / "both/report.html").read_text()
    assert not (tmp_path / "a/report.html").exists()


def test_the_same_seeds_on_another_stack_have_their_gaps_beside_those_of_the_seeds(study, tmp_path):
    """Of three seeds two are 1 and 3 points apart: mean 4/3, largest 3; another learning rate is no rerun."""
    write_study(tmp_path / "a", study)
    write_study(tmp_path / "b", study)
    write_study(tmp_path / "c", replace(study, settings=replace(study.settings, lr=0.5)))
    seeds = []
    for seed, gap in ((0, 0.0), (1, 0.01), (2, -0.03)):
        paths = [tmp_path / name / f"cifar10/scaffold-seed{seed}/metrics.jsonl" for name in ("a", "b")]
        *rows, last = (json.loads(line) for line in paths[0].read_text().splitlines())
        seeds.append(last["before"])
        last["before"] += gap
        paths[1].write_text("".join(json.dumps(row) + "\n" for row in (*rows, last)))
    found = [each for each in reruns(gather(tmp_path / "a", tmp_path / "b")) if each.metric == "before"]
    (gaps,) = found
    assert (gaps.method, gaps.seeds) == ("scaffold", 3)
    assert (gaps.mean, gaps.largest) == (pytest.approx(0.04 / 3), pytest.approx(0.03))
    assert gaps.deviation == pytest.approx(statistics.stdev(seeds))
    assert "mean gap 1.33 points, largest 3.00; between seeds" in page_of(gather(tmp_path / "a", tmp_path / "b"))
    assert reruns(gather(tmp_path / "a", tmp_path / "c")) == []
