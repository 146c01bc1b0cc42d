"""A page about somebody's own data, model, method and metrics says nothing of the paper and calls things by name."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from made_up_runs import made_up_study, write_run, write_study

from fedncv.config import RunConfig, Settings
from fedncv.report import metrics, partition, series
from fedncv.report.gather import gather
from fedncv.report.page import chart_data, page
from fedncv.report.paper import PROTOCOL
from fedncv.report.table import main_table, to_markdown
from fedncv.report.verdict import claims
from fedncv.results import read_config

PAPER = Settings()  # the paper's protocol


def page_of(results):
    table = main_table(results)
    return page(results, table, claims(results, table))


def words_of(text):
    """What a reader sees, without style, script and settings."""
    body = text.split("<body>")[-1].split('<script type="application/json"')[0]
    return re.sub(r"<[^>]+>", " ", body)


def runs(tmp_path, config, methods=("fedavg", "fedncv"), seeds=(0, 1)):
    for method in methods:
        for seed in seeds:
            name = f"{re.sub(r'[^a-z]', '-', method)}-{seed}"
            write_run(tmp_path / name, replace(config, method=method, seed=seed), 0.6 + 0.05 * len(method))
    return tmp_path


# ---- the paper -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"data": "custom:patients#1f0a2b"}, {"data": 'table:path="/x/patients.csv",y=sick'}, {"data": "digits"},
        {"data": "cifar10", "model": "my.code:net"}, {"data": "cifar10", "task": "my.code:task"},
        {"data": "cifar10", "dropout": 0.1}, {"data": "mnist", "optimizer": "adamw"}, {"data": "cifar10", "rounds": 4},
    ],
)  # fmt: skip
def test_nothing_is_said_of_the_paper(tmp_path, changes):
    config = replace(RunConfig(**(vars(PAPER) | {"rounds": 4})), **changes)
    results = gather(runs(tmp_path, config))
    text = page_of(results)
    assert "paper" not in words_of(text).replace("fedncv-paper", "").lower()
    assert "[" not in to_markdown(main_table(results))


def test_own_comparison_on_a_dataset_of_the_paper_is_not_judged_by_its_claims(tmp_path):
    config = RunConfig(**(vars(PAPER) | {"data": "cifar10"}))
    results = gather(runs(tmp_path, config, methods=("fedavg", "my.code:mine")))
    assert claims(results, main_table(results)) == []


def test_every_setting_of_the_protocol_counts_unless_the_paper_leaves_it_open():
    assert {"model", "task", "optimizer", "partition", "clients", "rounds", "dropout", "sampling"} <= set(PROTOCOL)
    assert not {"lr", "data", "device", "metrics"} & set(PROTOCOL)


def test_a_study_named_after_a_table_has_its_number_only_with_its_data(tmp_path):
    own = made_up_study(datasets=("my.code:patients",))
    assert gather(write_study(tmp_path / "mine", own)).title == "mine: patients"
    assert gather(write_study(tmp_path / "digits", made_up_study(datasets=("digits",)))).title.startswith("Accuracy")
    assert gather(write_study(tmp_path / "paper", made_up_study())).title.startswith("Table 1: ")


# ---- names ---------------------------------------------------------------------------------------------


def test_own_things_go_by_their_short_names_and_longer_where_two_share_one(tmp_path):
    config = RunConfig(data="custom:breast cancer#1f0a2b", model="custom:net#222222", clients=4, per_round=2, rounds=4)
    methods = (
        "fedavg",
        "my.code:mine:mu=1+prior",
        "custom:theirs#1f0a2b",
        "custom:theirs#2e0a2b",
        "a:twice",
        "b:twice",
    )
    results = gather(runs(tmp_path, config, methods))
    text = words_of(page_of(results).split("</header>")[1].split('id="repeat"')[0])
    for name in ("FedAvg", "mine, mu 1 + prior", "theirs #1f0a2b", "theirs #2e0a2b", "a:twice", "b:twice"):
        assert f" {name} " in text
    for hidden in ("my.code", "custom:", "breast cancer#"):
        assert hidden not in text
    assert results.columns[0].title == "breast cancer"
    assert {entry.ours.num_seeds for entry in main_table(results).entries.values()} == {2}  # nothing is pooled
    assert "· net" in page_of(results)


def test_a_table_has_the_name_of_its_file(tmp_path):
    config = RunConfig(rounds=4, data="table:path=/my/folder/patients.csv,y=sick")
    (column,) = gather(runs(tmp_path, config)).columns
    assert column.title == "patients.csv"


def test_the_page_is_about_the_only_method_of_ones_own(tmp_path):
    config = RunConfig(clients=4, per_round=2, rounds=4)
    results = gather(runs(tmp_path, config, methods=("fedavg", "fedncv", "my.code:mine")))
    assert results.focus == "mine"
    assert chart_data(results)["ours"] == "mine"
    assert "minus mine" in page_of(results)


# ---- few seeds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seeds", "said"), [(1, "One seed:"), (4, "Few seeds (4):"), (5, "")])
def test_few_seeds_have_a_word_of_caution(tmp_path, seeds, said):
    results = gather(runs(tmp_path, RunConfig(clients=4, per_round=2, rounds=4), seeds=tuple(range(seeds))))
    text = page_of(results)
    assert ("Few seeds" in text or "One seed:" in text) == bool(said)
    assert said in text


# ---- metrics -------------------------------------------------------------------------------------------


def test_metrics_of_ones_own_have_a_table_curves_and_a_file(tmp_path):
    runs(tmp_path, RunConfig(clients=4, per_round=2, rounds=4, eval_every=2))
    for path in tmp_path.glob("*/metrics.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            if "before" in row:
                row |= {"before_f1_macro": row["before"] / 2, "before_f1_macro_client_mean": 0.25}
                row |= {"before_f1_macro_clients": [0.1, None, 0.2, 0.3], "before_f1_macro_defined": 3}
            if "after" in row:
                row["after_auroc"] = None  # not defined
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = gather(tmp_path)
    (column,) = results.columns
    assert series.more_metrics(column) == ["before_f1_macro", "before_f1_macro_client_mean", "after_auroc"]
    assert "before_f1_macro" not in chart_data(results)["percent"]
    curve = series.curves(column)["before_f1_macro"]["fedavg"]
    assert [2 * point.mean for point in curve] == [p.mean for p in series.curves(column)["before"]["fedavg"]]
    assert chart_data(results)["metrics"]["before_f1_macro"] == "before, f1 macro"
    section = metrics.section(results)
    expected = np.mean([run.last("before") / 2 for run in column.runs["fedavg"]])
    assert f'<span class="mean">{expected:.4g}</span>' in section
    assert "after, auroc" in section
    assert "before_f1_macro,2," in metrics.to_csv(results)
    assert "More metrics" in page_of(results)
    runs(tmp_path / "plain", RunConfig(clients=4, per_round=2, rounds=4))
    assert "More metrics" not in page_of(gather(tmp_path / "plain"))


# ---- the partition -------------------------------------------------------------------------------------


def section_of(tmp_path, **held):
    runs(tmp_path, RunConfig(clients=4, per_round=2, rounds=4))
    if held:
        config = read_config(tmp_path / "fedavg-0")
        words = {"data": config.data, "partition": config.partition, "seed": config.seed} | held
        (tmp_path / "fedavg-0/partition.json").write_text(json.dumps(words))
    return partition.section(gather(tmp_path))


def labels(text, axis):
    part = text.split(f"class='{axis}'")[1].split("</div>")[0]
    return re.findall(r">([^<>]+)</", part)


def test_the_partition_has_axes_and_a_colour_scale(tmp_path):
    text = section_of(tmp_path, counts=[[5, 0, 1], [0, 7, 0], [2, 2, 2], [10, 0, 0]])
    assert labels(text, "axis sizes") == ["samples", "10", "5", "0"]
    assert labels(text, "xaxis") == ["0", "1", "2", "3", "client"]
    assert re.findall(r"top:[\d.]+%'>(\d+ %)<", text) == ["100 %", "50 %", "0 %"]
    assert "4 clients hold 6 to 10 samples, 29 in all" in text
    assert "holds 1 of 3 classes" in text or "holds 2 of 3 classes" in text


def test_many_clients_and_classes_stay_legible(tmp_path):
    rng = np.random.default_rng(0)
    text = section_of(tmp_path, counts=rng.integers(0, 9, (3000, 200)).tolist())
    assert labels(text, "xaxis")[-1] == "3,000 clients, sorted by their largest class, 1,500 of them drawn"
    classes = text.split("<b>class</b>")[1].split("</div>")[0].count("<span")
    assert classes <= 26
    assert len(text) < 400_000  # of noise, the worst to compress


def test_without_classes_the_sizes_are_drawn_and_without_a_record_the_page_says_so(tmp_path):
    text = section_of(tmp_path / "a", sizes=[3, 1, 4, 1])
    assert "<b>class</b>" not in text
    assert "Their classes are not recorded" in text
    assert labels(text, "axis sizes") == ["samples", "4", "2", "0"]
    assert "did not record their partition" in section_of(tmp_path / "b")


def test_a_run_records_its_partition_classes_or_sizes(tmp_path):
    import torch

    import fedncv
    from fedncv.data import Dataset, from_arrays, holdings

    x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
    settings = {"model": "mlp", "clients": 2, "per_round": 1, "rounds": 1, "epochs": 1, "partition": "iid"}
    named = from_arrays(x, np.arange(40) % 2, name="mine")._replace(classes=("well", "<ill>"))
    fedncv.simulate(data=named, out=tmp_path / "classes", **settings)
    found = json.loads((tmp_path / "classes/partition.json").read_text())
    assert found["classes"] == ["well", "<ill>"]
    assert "&lt;ill&gt;</span>" in partition.section(gather(tmp_path / "classes"))
    assert np.array(found["counts"]).sum(0).tolist() == [20, 20]
    assert "2 clients hold 20 to 20 samples, 40 in all" in partition.section(gather(tmp_path / "classes"))
    inputs, owners = torch.from_numpy(x), torch.arange(40) // 30
    numbers = Dataset("mine", inputs, inputs[:, :1], num_classes=1, owners=owners)
    settings["partition"] = "natural"
    fedncv.simulate(data=numbers, task="regression", out=tmp_path / "numbers", **settings)
    assert json.loads((tmp_path / "numbers/partition.json").read_text())["sizes"] == [30, 10]
    grouped = numbers._replace(groups=torch.arange(40) % 4)  # more groups than the model has outputs
    assert np.array(holdings(grouped, [np.arange(40)])["counts"]).tolist() == [[10, 10, 10, 10]]
    text = page_of(gather(tmp_path / "numbers"))
    assert "2 clients hold 10 to 30 samples, 40 in all" in text
    assert "label prior" not in words_of(text).lower()
