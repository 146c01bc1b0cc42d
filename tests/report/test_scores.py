"""Scores that are no accuracy are shown as they are, under their own name: nothing of them is a per cent."""

import json

import pytest

from fedncv.cli.show import main as show
from fedncv.config import RunConfig, write_toml
from fedncv.figures import picture
from fedncv.report import figures
from fedncv.report.gather import gather
from fedncv.report.page import chart_data, page
from fedncv.report.table import main_table, to_markdown
from fedncv.report.verdict import claims
from fedncv.results import read_run


@pytest.fixture
def regression(tmp_path):
    """Two methods, two seeds of one round: before -0.25 and -0.75, of mean -0.5 and deviation 0.5 / sqrt 2."""
    for method, shift in (("fedavg", 0.0), ("fedprox", -1.0)):
        for seed, before in ((0, -0.25), (1, -0.75)):
            folder = tmp_path / f"{method}-{seed}"
            folder.mkdir()
            config = RunConfig(data="cifar10", task="regression", rounds=1, method=method, seed=seed)
            (folder / "config.toml").write_text(write_toml(config))
            scores = {"before": before + shift, "after": -0.125, "before_clients": [-1.0, 0.0]}
            rows = [{"round": 0, "score_name": "minus squared error"}, {"round": 1, **scores}]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_terminal_shows_them_plainly(regression, capsys):
    assert show([str(regression)]) == 0
    said = capsys.readouterr().out
    assert "%" not in said
    assert "(minus squared error, mean" in said
    assert "-0.5 ± 0.3536" in said
    assert "minus squared error before, mean over seeds" in said


def test_the_picture_of_runs_has_their_name_and_values(regression):
    axes = picture([read_run(regression / "fedavg-0")])
    assert axes.get_ylabel() == "minus squared error before local training\n(o after it)"
    assert [line.get_ydata().tolist() for line in axes.lines] == [[-0.25], [-0.125]]


def test_the_report_shows_them_plainly(regression):
    results = gather(regression)
    table = main_table(results)
    assert table.entries["cifar10", "before", "fedavg"].ours.mean == pytest.approx(-0.5)
    markdown = to_markdown(table)
    assert "| FedAvg | **-0.5 ± 0.3536 *** |" in markdown  # ahead by 1 and 1; nothing of the paper beside it
    assert "over seeds, minus squared error." in markdown
    assert claims(results, table) == []  # the paper has only accuracies
    assert chart_data(results)["percent"] == []
    text = page(results, table, [])
    assert "Minus squared error, over all clients" in text
    assert "left:0.00%;width:100.00%" in text  # the widest bar fills its track


def test_the_reports_figures_do_not_cut_them_off(regression):
    (panel,) = figures.curves(gather(regression)).axes
    assert panel.get_ylabel() == "minus squared error before"
    low, high = panel.get_ylim()
    assert low <= -1.5 < -0.5 <= high
