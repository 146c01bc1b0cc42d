"""What a report is made from: only finished runs of one protocol, everything else named."""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_runs import made_up_study, write_run, write_study

import fedncv.report
from fedncv.report.gather import gather, seconds
from fedncv.report.repeat import again
from fedncv.report.table import main_table, to_latex
from fedncv.report.write import write
from fedncv.study import FILE, Tuning, to_toml


@pytest.fixture
def study():
    return made_up_study()


def config_of(study, folder):
    return next(cell.config for cell in study.cells() if str(cell.folder) == folder)


def test_a_whole_study_has_nothing_missing(study, tmp_path):
    results = gather(write_study(tmp_path, study))
    assert results.num_finished == results.num_planned == 9
    assert results.missing == []
    assert results.methods == list(study.methods)
    assert [column.title for column in results.columns] == ["CIFAR-10"]
    assert seconds(results.columns[0].runs["fedavg"][0]) == pytest.approx(21 * 0.25)


def test_what_is_not_finished_is_named_and_never_averaged(study, tmp_path):
    folder = "cifar10/fedavg-seed"
    write_study(tmp_path, study, skip=(f"{folder}0", f"{folder}1"))
    write_run(tmp_path / f"{folder}1", config_of(study, f"{folder}1"), 0.01, until=7)
    results = gather(tmp_path)
    assert {(m.seed, m.status) for m in results.missing} == {(0, "not started"), (1, "unfinished")}
    assert "round 7 of 20" in results.missing[0].reason
    entry = main_table(results).entries["cifar10", "before", "fedavg"]
    assert entry.missing == 2
    assert entry.ours.num_seeds == 1
    assert entry.ours.mean > 50  # the run that stands at round 7 would pull it down


def test_a_failed_run_is_shown_with_its_reason(study, tmp_path):
    write_study(tmp_path, study)
    with (tmp_path / "cifar10/fedavg-seed2/metrics.jsonl").open("a") as file:
        file.write('{"round": 21, "failed": "client 3 diverged in round 21"}\n')
    (missing,) = gather(tmp_path).missing
    assert missing[:4] == ("cifar10", "fedavg", 2, "failed")
    assert "client 3 diverged in round 21" in missing.reason


@pytest.mark.parametrize("cut", [1, 10, 400])
def test_metrics_cut_in_the_last_line_are_an_unfinished_run(study, tmp_path, cut):
    write_study(tmp_path, study)
    path = tmp_path / "cifar10/fedavg-seed2/metrics.jsonl"
    os.truncate(path, path.stat().st_size - cut)
    (missing,) = gather(tmp_path).missing
    assert missing[:4] == ("cifar10", "fedavg", 2, "unfinished")


def test_metrics_damaged_in_the_middle_are_named_and_the_rest_is_shown(study, tmp_path, capsys):
    write_study(tmp_path, study)
    path = tmp_path / "cifar10/fedavg-seed2/metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'{"round": 5', b"garbage", 1))
    results = gather(tmp_path)
    (missing,) = results.missing
    assert missing[:4] == ("cifar10", "fedavg", 2, "unreadable")
    assert missing.reason.startswith(f"{path}, line 6, is not a row of metrics: it is not JSON; ")
    assert results.num_finished == 8
    assert capsys.readouterr().err == f"left out: {missing.reason}\n"


@pytest.mark.parametrize("value", ['"0.5"', "[0.5]", "NaN", "1e999", '{"a": 1}'])
def test_a_score_of_a_wrong_kind_is_left_out_with_its_reason(study, tmp_path, value):
    write_study(tmp_path, study)
    path = tmp_path / "cifar10/fedavg-seed2/metrics.jsonl"
    path.write_text(re.sub(r'"before": [\d.]+', f'"before": {value}', path.read_text(), count=1))
    page = write(tmp_path)[0].read_text()
    assert "8 of 9 runs finished, 1 unreadable" in page
    assert "line 1, has before " in page


def test_an_unreadable_run_without_a_study_goes_by_its_config_or_else_by_its_folder(study, tmp_path):
    write_study(tmp_path, study)
    (tmp_path / FILE).unlink()
    (tmp_path / "cifar10/fedavg-seed1/metrics.jsonl").write_text("?\n")
    (tmp_path / "cifar10/fedavg-seed2/config.toml").write_text("?")
    named = {(m.column, m.name, m.status) for m in gather(tmp_path).missing}
    assert named == {("cifar10", "fedavg seed 1", "unreadable"), ("cifar10", "fedavg-seed2", "unreadable")}


@pytest.mark.parametrize("value", ["NaN", '"x"', "[1]"])
def test_clocks_that_are_damaged_are_lost(study, tmp_path, value):
    write_study(tmp_path, study)
    with (tmp_path / "cifar10/fedavg-seed0/timing.jsonl").open("a") as file:
        file.write(f'{{"round": 21, "seconds": {value}}}\n')
    assert seconds(gather(tmp_path).columns[0].runs["fedavg"][0]) is None


def test_other_protocols_are_refused_with_the_fields(study, tmp_path):
    write_study(tmp_path / "a", study)
    other = config_of(study, "cifar10/fedavg-seed0")
    write_run(tmp_path / "a/cifar10/longer", replace(other, seed=9, rounds=40, lr=0.5), 0.5)
    with pytest.raises(ValueError, match=r"rounds \(20 in .*, 40 in cifar10/longer\); lr .*--allow rounds lr"):
        gather(tmp_path / "a")
    assert gather(tmp_path / "a", allow=("rounds", "lr")).differing == ["rounds", "lr"]


def test_what_does_not_change_a_result_may_differ(study, tmp_path):
    write_study(tmp_path, study)
    config = config_of(study, "cifar10/fedavg-seed0")
    elsewhere = replace(config, device="cuda", data_dir="/elsewhere", checkpoint_every=3)
    write_run(tmp_path / "cifar10/fedavg-seed0", elsewhere, 0.5)
    assert gather(tmp_path).differing == []


def test_tuned_learning_rates_may_differ(study, tmp_path):
    rates = {"cifar10": {"fedavg": 0.03, "scaffold": 0.01, "fedncv": 0.1}}
    tuned = replace(study, tuning=Tuning(), lr=rates)
    write_study(tmp_path, tuned)
    write_run(tmp_path / "tuning/cifar10/lr-0.03/fedavg-seed1000", tuned.cells()[0].config, 0.9)
    results = gather(tmp_path)
    assert results.differing == ["lr"]
    assert results.num_finished == 9  # tuning runs are not results


def test_the_number_of_clients_makes_columns_in_a_study_of_it_only(tmp_path):
    write_study(tmp_path, made_up_study(clients=(20, 40)))
    assert [column.title for column in gather(tmp_path).columns] == ["CIFAR-10, 20 clients", "CIFAR-10, 40 clients"]
    (tmp_path / FILE).unlink()
    with pytest.raises(ValueError, match=r"clients \(20 in"):
        gather(tmp_path)


def test_plain_runs_need_no_study(study, tmp_path):
    write_study(tmp_path, study)
    (tmp_path / FILE).unlink()
    results = gather(tmp_path)
    assert results.num_finished == 9
    command = again(results)[0].text
    assert "fedncv run --data cifar10 --clients 20" in command
    assert "--seeds 0 1 2" in command


def test_the_same_run_twice_is_refused(study, tmp_path):
    write_study(tmp_path, study)
    shutil.copytree(tmp_path / "cifar10/fedavg-seed0", tmp_path / "cifar10/copy")
    with pytest.raises(ValueError, match="repeats fedavg on cifar10 with seed 0"):
        gather(tmp_path)


def test_nothing_to_report_is_said_in_one_line(study, tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        gather(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no run"):
        gather(tmp_path)
    write_run(tmp_path / "run", config_of(study, "cifar10/fedavg-seed0"), 0.5, until=3)
    with pytest.raises(ValueError, match=r"no finished run.*: fedavg seed 0 is unfinished \(round 3 of 20\)"):
        gather(tmp_path)
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "stopped": "the budget is spent"}\n')
    with pytest.raises(ValueError, match=r"is unfinished \(round 3 of 20, the budget is spent\)"):
        gather(tmp_path)
    (tmp_path / "run/config.toml").write_text("?")
    with pytest.raises(ValueError, match=r"no finished run.*: run is unreadable \(.*config.toml is not valid TOML"):
        gather(tmp_path)


def test_a_study_that_has_only_begun_has_a_page_that_says_so(study, tmp_path):
    write_study(tmp_path, study, skip=[str(cell.folder) for cell in study.cells()])
    text = write(tmp_path)[0].read_text()
    assert "0 of 9 runs finished, 9 not started" in text
    assert "No run is finished yet" in text


def test_the_report_imports_no_training_code():
    allowed = {"fedncv.report", "fedncv.results", "fedncv.comparison", "fedncv.config", "fedncv.study",
               "fedncv.catalogue", "fedncv.figures", "fedncv.files"}  # fmt: skip
    for path in Path(fedncv.report.__file__).parent.glob("*.py"):
        for name in re.findall(r"^\s*(?:from|import) (fedncv[\w.]*)", path.read_text(), flags=re.M):
            assert any(name == each or name.startswith(each + ".") for each in allowed), f"{path.name}: {name}"


def test_runs_with_knobs_that_tuning_chose_go_by_the_method_as_it_is_named(tmp_path):
    chosen = {"fedprox": {"method": "fedprox:mu=0.1", "weight_decay": 0.001}}
    study = made_up_study(
        methods=("fedavg", "fedprox"), tuning=Tuning(grid=(), trials=2), tuned={"cifar10": chosen},
        lr={"cifar10": {"fedavg": 0.1, "fedprox": 0.3}},
    )  # fmt: skip
    (tmp_path / FILE).write_text(to_toml(study))
    for cell in study.cells():
        write_run(tmp_path / cell.folder, cell.config, 0.8)
    results = gather(tmp_path)
    assert (results.methods, results.missing) == (["fedavg", "fedprox"], [])
    assert {run.folder.name for run in results.columns[0].runs["fedprox"]} == {f"fedprox-seed{k}" for k in range(3)}
    cell = study.cells()[-1]
    write_run(tmp_path / cell.folder, replace(cell.config, method="fedprox:mu=9"), 0.8)  # of another plan
    results = gather(tmp_path)
    assert "fedprox:mu=9" in results.methods
    assert [each.name for each in results.missing] == ["fedprox seed 2"]


def test_a_column_for_each_score_shows_the_one_that_its_settings_were_chosen_by(tmp_path):
    study = made_up_study(methods=("fedavg", "fedncv"), tuning=Tuning(by="each"))
    (tmp_path / FILE).write_text(to_toml(study))
    for cell in study.cells():
        write_run(tmp_path / cell.folder, cell.config, 0.8)
    results = gather(tmp_path)
    assert [column.title for column in results.columns] == ["CIFAR-10, tuned for before", "CIFAR-10, tuned for after"]
    keys = [(column.name, metric) for column, metric in main_table(results).keys]
    assert keys == [("cifar10/by-before", "before"), ("cifar10/by-after", "after")]
    assert [column.prior() is not None for column in results.columns] == [True, True]
    assert r"\multicolumn{1}{c}{CIFAR-10, tuned for after}" in to_latex(main_table(results))
