"""Gain and cost side by side, and the sentences of the verdict: on scores that were written by hand.

Two seeds whose differences are m - d and m + d have deviation d √2, so the paired interval is m ± 12.7062 d.
"""

import json
import re

import pytest
from made_up_runs import made_up_study

from fedncv.comparison import Paired, holm
from fedncv.config import Settings, write_toml
from fedncv.report import parts
from fedncv.report.findings import findings
from fedncv.report.gather import gather
from fedncv.report.series import Spent
from fedncv.report.write import write
from fedncv.results import PERCENT
from fedncv.study import FILE, to_toml

ONE = {
    "fedavg": [(0.40, 0.80), (0.42, 0.82)],
    "fedavg+prior": [(0.70, 0.79), (0.74, 0.80)],
    "fedncv": [(0.80, 0.85), (0.82, 0.87)],
    "fedncv:tau=0": [(0.50, 0.65), (0.52, 0.67)],
    "fedncv:drift=off": [(0.75, 0.85), (0.79, 0.87)],
}
SPENT = Spent(*[3] * 5, None, None, None, 0.5, 0, None, None, None)
VARIANCE = {"fedavg": [(8.0, 4.0), (12.0, 4.0)], "fedncv": [(1.0, 1.0), (3.0, 1.0)]}  # between, within


def written(folder, scores, *, variance=VARIANCE):
    """scores: dataset -> method -> (before, after) of seeds 0 and 1. SCAFFOLD's rows are nowhere: it is another's."""
    methods = tuple(dict.fromkeys(method for by_method in scores.values() for method in by_method))
    study = made_up_study(settings=Settings(rounds=1), datasets=tuple(scores), methods=methods, seeds=(0, 1))
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text(to_toml(study))
    for cell in study.cells():
        config, where = cell.config, folder / cell.folder
        where.mkdir(parents=True)
        (where / "config.toml").write_text(write_toml(config))
        before, after = scores[config.data][config.method][config.seed]
        row = {"round": 1, "before": before, "after": after, "gradients": 1000 * (1 + 2 * config.seed)}
        row |= {"bytes_down": 3_000_000, "bytes_up": 1_000_000}
        if config.method in variance:
            between, within = variance[config.method][config.seed]
            row |= {"variance_between": between, "variance_within": within}
        (where / "metrics.jsonl").write_text(json.dumps({"round": 0}) + "\n" + json.dumps(row) + "\n")
    return gather(folder)


def line(markdown, name):
    (found,) = (each for each in markdown.splitlines() if each.startswith(f"| {name} |"))
    return [cell.strip() for cell in found.split("|")[2:-1]]


def test_every_number_of_a_row(tmp_path):
    """FedAvg - FedNCV: -0.4 with every seed, so the interval is a point; after, -0.05 twice."""
    text = parts.to_markdown(written(tmp_path, {"cifar10": ONE}))
    assert line(text, "FedAvg") == [
        "41.00 ± 1.41", "81.00 ± 1.41", "**−40.00**", "**−5.00**", "1", "1", "3 MB", "1 MB", "2 k",
    ]  # fmt: skip
    assert line(text, "FedNCV")[2:6] == ["–", "–", "0.2", "0.25"]
    # before: -0.05 and -0.03, m = -4, 12.7062 d = 12.71; after: no difference at all
    assert line(text, "FedNCV without drift correction")[2:6] == ["−4.00 (−16.71 to +8.71)", "0.00", "–", "–"]


def test_a_method_that_is_surely_ahead_of_fedncv_is_bold_too(tmp_path):
    """Before: 10 points with every seed; after: 1 and 3, m = 2, 12.7062 d = 12.71."""
    scores = {"fedavg": [(0.90, 0.86), (0.92, 0.90)], "fedncv": [(0.80, 0.85), (0.82, 0.87)]}
    text = parts.to_markdown(written(tmp_path, {"cifar10": scores}))
    assert line(text, "FedAvg")[2:4] == ["**+10.00**", "+2.00 (−10.71 to +14.71)"]


def test_the_page_has_the_same_numbers_to_sort_by(tmp_path):
    text = parts.section(written(tmp_path, {"cifar10": ONE}))
    row = re.search(r'<tr data-method="fedncv:drift=off">.*?</tr>', text).group()
    values = [float(value) if value else None for value in re.findall(r'<td[^>]*data-value="(.*?)"', row)]
    assert values == pytest.approx([77, 86, -0.04, 0, None, None, 3e6, 1e6, 2000])
    assert row.count("<b>") == 0
    fedavg = re.search(r'<tr data-method="fedavg">.*?</tr>', text).group()
    assert fedavg.count("<b>") == 2


def test_variances_are_plain_without_fedavg_and_absent_without_a_probe(tmp_path):
    alone = {method: ONE[method] for method in ("fedncv", "fedncv:tau=0")}
    text = parts.to_markdown(written(tmp_path / "a", {"cifar10": alone}))
    assert "/ FedAvg" not in text
    assert line(text, "FedNCV")[4:6] == ["2", "1"]
    text = parts.to_markdown(written(tmp_path / "b", {"cifar10": ONE}, variance={}))
    assert "variance" not in text.lower()
    assert len(line(text, "FedNCV")) == 7


def test_only_a_single_column_with_something_to_compare_has_it(tmp_path):
    assert parts.to_markdown(written(tmp_path / "two", {"mnist": ONE, "svhn": ONE})) == ""
    assert parts.section(gather(tmp_path / "two")) == ""
    assert parts.parts(written(tmp_path / "one", {"mnist": {"fedncv": ONE["fedncv"]}})) == []
    without = {m: ONE[m] for m in ("fedavg", "fedavg+prior")}
    assert parts.reference(written(tmp_path / "none", {"mnist": without})) == "fedavg"
    assert parts.parts(written(tmp_path / "neither", {"mnist": {"fedavg+prior": ONE["fedavg+prior"]}})) == []
    assert "parts.md" not in {path.name for path in write(tmp_path / "two")}


def test_what_the_parts_give_is_said(tmp_path):
    """Prior on FedAvg: 30 and 32 before, -1 and -2 after; the drift correction: 5 and 3 before, 0 after."""
    prior, drift = findings(written(tmp_path, {"cifar10": ONE}))
    assert prior == (
        "The label prior gives FedAvg +31.00 points before (95 %: +18.29 to +43.71) and −1.50 after "
        "(95 %: −7.85 to +4.85); it gives FedNCV's other parts +30.00 points before (95 %: +30.00 to +30.00) "
        "and +20.00 after (95 %: +20.00 to +20.00)."
    )
    assert drift.startswith("The drift correction adds +4.00 points before (95 %: −8.71 to +16.71) and 0.00 after")


def test_where_the_rows_are_missing_nothing_is_said(tmp_path):
    some = {method: ONE[method] for method in ("fedavg", "fedncv", "fedncv:tau=0")}
    (prior,) = findings(written(tmp_path / "some", {"cifar10": some}))
    assert prior.startswith("The label prior gives FedNCV's other parts +30.00")
    assert findings(written(tmp_path / "none", {"cifar10": {"fedavg": ONE["fedavg"]}})) == []


def test_the_worst_of_several_columns_is_named(tmp_path):
    """SVHN before: 50 - 51 and 52 - 55, m = -2, d = 1. A variant of FedNCV is no other method."""
    best = {"fedncv:drift=off": [(0.99, 0.99), (0.99, 0.99)]}
    mnist = {"fedncv": [(0.90, 0.91), (0.92, 0.93)], "fedavg": [(0.8, 0.8), (0.82, 0.82)]}
    svhn = {"fedncv": [(0.50, 0.60), (0.52, 0.62)], "fedavg": [(0.3, 0.5), (0.3, 0.61)]}
    mnist["fedper"], svhn["fedper"] = [(0.70, 0.7), (0.72, 0.7)], [(0.51, 0.4), (0.55, 0.4)]
    first, worst = findings(written(tmp_path, {"mnist": mnist | best, "svhn": svhn | best}))
    # SVHN after: ahead of FedAvg by 10 and 1, which two seeds do not tell
    assert first.startswith("FedNCV is better than the best other method in 3 of 4 columns; in 2 of them every paired")
    assert worst == "At worst it is 2.00 points below FedPer (95 %: −14.71 to +10.71): SVHN, before local training."


def test_equal_scores_are_level(tmp_path):
    scores = {"fedncv": [(0.90, 0.95), (0.92, 0.97)], "fedavg": [(0.90, 0.94), (0.92, 0.96)]}
    _, worst = findings(written(tmp_path, {"mnist": scores, "svhn": scores}))
    assert worst.startswith("At worst it is level with FedAvg")


def test_where_it_is_never_behind_the_worst_is_the_least_ahead(tmp_path):
    scores = {"fedncv": [(0.90, 0.95), (0.92, 0.97)], "fedavg": [(0.8, 0.94), (0.82, 0.96)]}
    _, worst = findings(written(tmp_path, {"mnist": scores, "svhn": {m: scores[m] for m in scores}}))
    assert worst.startswith("At worst it is 1.00 points above FedAvg (95 %: +1.00 to +1.00): MNIST, after")


def test_a_table_about_parts_has_one_for_each_column_and_holm_over_all_of_them(tmp_path):
    more = {f"fedncv:{part}=off": ONE["fedncv:drift=off"] for part in ("even", "blend", "average")}
    found = parts.tables(written(tmp_path / "two", {"mnist": ONE | more, "svhn": ONE | more}))
    assert [title for title, _ in found] == ["MNIST", "SVHN"]
    every = [p for _, rows in found for row in rows for p in row.adjusted if p == p]
    plain = [gap.p for _, rows in found for row in rows for gap in row.against if gap]
    assert every == holm(plain)
    text = parts.to_markdown(gather(tmp_path / "two"))
    assert text.count("## ") == 2
    assert line(text.split("## ")[1], "FedAvg")[2] == "**−40.00**"


def test_what_does_not_survive_holm_is_marked():
    gap = Paired(-0.1, -0.19, -0.01, 0.04, 3)
    row = parts.Part("fedavg", [None, None], [gap, gap], [None, None], SPENT, [0.04, 0.08])
    before, after = [text for _, text in parts.cells(row, [row], PERCENT)][2:4]
    assert (before, after) == ("−10.00 (−19.00 to −1.00)", "−10.00 (−19.00 to −1.00) °")
