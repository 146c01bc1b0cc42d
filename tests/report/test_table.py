"""The main table and its files, the verdict, and the numbers behind charts."""

import csv
import doctest
import io
import json
from dataclasses import replace

import pytest
from made_up_runs import made_up_study, write_study

from fedncv.config import Settings
from fedncv.report import figures, findings, names, paper, series
from fedncv.report.gather import gather
from fedncv.report.page import chart_data, page
from fedncv.report.table import main_table, to_csv, to_latex, to_markdown
from fedncv.report.verdict import AGREES, DIFFERS, OPEN, PARTLY, claims, headline
from fedncv.report.write import write
from fedncv.studies import FIG3, ablation

SEVEN = ("fedavg", "fedprox", "scaffold", "fedrep", "fedper", "pfedsim", "fedncv")
HIGH = {"fedncv": 0.9, "fedper": 0.8}
AS_IN_PAPER = Settings(eval_every=50)


def gathered(tmp_path, *, level=None, **changes):
    return gather(write_study(tmp_path, made_up_study(**changes), level=level))


def test_the_paper_is_printed_as_it_stands():
    assert paper.printed("cifar10", "fedncv", "after") == (55.79, 0.92)
    assert paper.printed("emnist", "fedavg", "before") == (74.25, 5.01)
    assert paper.printed("tiny_imagenet", "scaffold", "after") == (5.97, 1.79)
    assert paper.printed("digits", "fedavg", "before") is None
    assert paper.printed("cifar10", "moon", "before") is None
    assert len(paper.table1()) == 4 * 8 * 2


@pytest.mark.parametrize("name", ["clients", "partition", "per_round", "rounds", "epochs"])
def test_a_column_at_another_protocol_has_nothing_of_the_paper_beside_it(tmp_path, name):
    other = {name: "dirichlet:alpha=1" if name == "partition" else getattr(AS_IN_PAPER, name) // 2}
    variants = {"same": {"lr": 0.1}, "other": other}
    results = gathered(tmp_path, settings=AS_IN_PAPER, seeds=(0, 1), methods=("fedavg", "fedncv"), variants=variants)
    table = main_table(results)
    rows = csv.DictReader(io.StringIO(to_csv(table)))
    assert {row["column"] for row in rows if row["paper"]} == {"cifar10/same"}
    assert to_markdown(table).count("[") == 4  # two methods, before and after
    found = claims(results, table)
    assert page(results, table, found).count('<span class="paper">') == 4
    assert [claim.where for claim in found] == ["Table 1, CIFAR-10, same", "Table 1, CIFAR-10, same, the numbers"]


def test_without_the_papers_values_nothing_speaks_of_them(tmp_path):
    results = gathered(tmp_path)  # 20 clients
    table = main_table(results)
    assert "paper" not in to_markdown(table)
    assert "beneath it the paper" not in page(results, table, [])
    assert headline(results, table, []).startswith("These runs do not follow the paper's protocol")


def test_best_second_and_first(tmp_path):
    results = gathered(tmp_path, settings=AS_IN_PAPER, methods=SEVEN, level=lambda _, m: HIGH.get(m, 0.5))
    table = main_table(results)
    entry = table.entries["cifar10", "before", "fedncv"]
    assert (entry.place, entry.first) == (1, True)
    assert (table.entries["cifar10", "before", "fedper"].place) == 2
    assert entry.ours.mean == pytest.approx(90, abs=3)
    assert entry.paper.mean == 53.49
    assert table.ranks["fedncv"] == 1
    markdown, latex = to_markdown(table), to_latex(table)
    assert f"**{entry.ours.mean:.2f} ± {entry.ours.deviation:.2f} *** [53.49]" in markdown
    assert rf"\textbf{{{entry.ours.mean:.2f}}}({entry.ours.deviation:.2f})" in latex
    assert latex.count(r"\underline") == 2
    assert r"\multicolumn{2}{c}{CIFAR-10}" in latex


def test_equal_means_share_their_place(tmp_path):
    """Two runs of the same bytes are both the best, and the next is third."""
    write_study(tmp_path, made_up_study(), level=lambda _, m: 0.5 if m == "scaffold" else 0.9)
    for seed in range(3):
        one, other = (
            tmp_path / "cifar10" / f"{method}-seed{seed}" / "metrics.jsonl" for method in ("fedavg", "fedncv")
        )
        other.write_bytes(one.read_bytes())
    table = main_table(gather(tmp_path))
    places = [table.entries["cifar10", "before", method].place for method in ("fedavg", "fedncv", "scaffold")]
    assert places == [1, 1, 3]
    assert table.standing("cifar10", "before").first is None
    assert to_markdown(table).count("**") == 2 * 4


def test_the_csv_holds_every_cell(tmp_path):
    tuned = {"cifar10": {"fedavg": 0.03}}
    results = gathered(tmp_path, settings=AS_IN_PAPER, datasets=("cifar10", "emnist"), lr=tuned)
    rows = list(csv.DictReader(io.StringIO(to_csv(main_table(results)))))
    assert len(rows) == 2 * 2 * 3
    rates = {(row["dataset"], row["method"]): row["lr"] for row in rows}
    assert (rates["cifar10", "fedavg"], rates["cifar10", "fedncv"], rates["emnist", "fedavg"]) == (
        "0.03",
        "0.01",
        "0.01",
    )
    by_hand = [run.last("before") for run in results.columns[0].runs["fedavg"]]
    assert float(rows[0]["mean"]) == pytest.approx(100 * sum(by_hand) / 3, abs=1e-4)
    assert (rows[0]["paper"], rows[0]["seeds"], rows[0]["missing_runs"]) == ("48.96", "3", "0")


def test_the_claim_of_table_1_needs_every_interval(tmp_path):
    def verdict(level, where):
        results = gathered(tmp_path / where, settings=AS_IN_PAPER, methods=SEVEN, level=lambda _, m: level.get(m, 0.5))
        return claims(results, main_table(results))[0].verdict

    assert verdict({"fedncv": 0.9}, "ahead") == AGREES
    assert verdict({"fedncv": 0.5, "fedper": 0.5}, "level") == DIFFERS
    assert verdict({"fedncv": 0.4}, "behind") == DIFFERS


def test_a_claim_without_all_its_rivals_agrees_in_part(tmp_path):
    results = gathered(tmp_path, settings=AS_IN_PAPER, level=lambda _, m: HIGH.get(m, 0.5))
    claim = claims(results, main_table(results))[0]
    assert claim.verdict == PARTLY
    assert "without FedProx, FedRep" in claim.why


def test_a_claim_about_a_method_that_was_not_run_is_open(tmp_path):
    results = gathered(tmp_path, settings=AS_IN_PAPER, methods=("fedavg", "scaffold"))
    found = claims(results, main_table(results))
    assert found[0].verdict == OPEN
    assert "1 run" not in headline(results, main_table(results), found)


def test_runs_without_a_test_sample_have_a_page_and_decide_nothing(tmp_path):
    write_study(tmp_path, made_up_study(settings=AS_IN_PAPER))
    for path in tmp_path.glob("*/*/metrics.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text(
            "".join(json.dumps({k: v for k, v in row.items() if k in ("round", "loss")}) + "\n" for row in rows)
        )
    results = gather(tmp_path)
    assert [claim.verdict for claim in claims(results, main_table(results))] == [OPEN, OPEN]
    assert "no finished run of FedNCV with a score here" in write(tmp_path)[0].read_text()


def test_a_column_below_the_label_prior_is_called_impossible(tmp_path):
    """The made-up prior is 55 %, above every value that the paper prints for CIFAR-100."""
    results = gathered(tmp_path, settings=AS_IN_PAPER, datasets=("cifar100",))
    numbers = claims(results, main_table(results))[1]
    assert numbers.verdict == DIFFERS
    assert "majority class reaches without learning" in numbers.why


def loses(column, method):
    return 0.9 - (0.00005 if method == "fedncv" else 0.0004) * int(column.split("-")[-1])


def test_the_claims_of_the_figures(tmp_path):
    four = ("fedncv", "fedper", "pfedsim", "fedrep")
    results = gathered(tmp_path / "2", settings=AS_IN_PAPER, methods=four, clients=(100, 1000), level=loses)
    (claim,) = claims(results, main_table(results))
    assert claim.verdict == AGREES
    assert claim.measured.startswith("points lost from 100 to 1,000 clients")
    assert "these runs CIFAR-10" in claim.why
    results = gathered(
        tmp_path / "3", settings=AS_IN_PAPER, datasets=("mnist",), methods=FIG3, level=lambda _, m: HIGH.get(m, 0.5)
    )
    (claim,) = claims(results, main_table(results))
    assert claim.verdict == AGREES
    assert claim.measured.startswith("1st of 12")


def test_among_fewer_methods_than_the_papers_the_figures_agree_in_part(tmp_path):
    """Second of two is among the best two whatever was measured."""
    two = ("fedncv", "fedper")
    results = gathered(tmp_path / "2", settings=AS_IN_PAPER, methods=two, clients=(100, 1000), level=loses)
    (claim,) = claims(results, main_table(results))
    assert (claim.verdict, "without pFedSim, FedRep" in claim.why) == (PARTLY, True)
    results = gathered(tmp_path / "3", settings=AS_IN_PAPER, datasets=("mnist",), methods=two)
    (claim,) = claims(results, main_table(results))
    assert claim.measured.startswith("2nd of 2")
    assert (claim.verdict, "without FedAvg, FedAvgM" in claim.why) == (PARTLY, True)


@pytest.mark.parametrize("other", [{"rounds": 50}, {"per_round": 20}, {"partition": "dirichlet:alpha=1"}])
def test_fig_2_is_judged_at_its_protocol_only(tmp_path, other):
    settings = replace(AS_IN_PAPER, **other)
    results = gathered(tmp_path, settings=settings, methods=("fedncv", "fedper"), clients=(100, 1000), level=loses)
    assert claims(results, main_table(results)) == []


def test_fig_2_needs_its_smallest_and_its_largest_federation(tmp_path):
    results = gathered(tmp_path, settings=AS_IN_PAPER, methods=("fedncv", "fedper"), clients=(100, 200), level=loses)
    (claim,) = claims(results, main_table(results))
    assert claim.verdict == OPEN


@pytest.mark.parametrize(("seeds", "methods"), [((0,), SEVEN), ((0, 1), ("fedncv",))])
def test_with_one_seed_or_one_method_nothing_is_decided(tmp_path, seeds, methods):
    results = gathered(
        tmp_path, settings=AS_IN_PAPER, seeds=seeds, methods=methods, level=lambda _, m: HIGH.get(m, 0.5)
    )
    table = main_table(results)
    found = claims(results, table)
    assert found[0].verdict == OPEN
    said = headline(results, table, found)
    assert ("No method is called first" in said) == (len(methods) > 1)
    assert "ignificantly first" not in said


def test_the_methods_of_fig_3_are_those_that_are_run():
    assert paper.TWELVE == FIG3


def test_a_study_of_fedncvs_parts_is_no_table_1(tmp_path):
    variants = ("fedncv:drift=off", "fedncv:tau=0", "fedncv:blend=0")
    results = gathered(tmp_path, settings=AS_IN_PAPER, methods=("fedavg", "fedncv", *variants))
    assert claims(results, main_table(results)) == []
    results = gathered(tmp_path / "both", settings=AS_IN_PAPER, methods=(*SEVEN, *variants))
    assert len(claims(results, main_table(results))) == 2


def test_where_the_paper_says_nothing_neither_do_we(tmp_path):
    results = gathered(tmp_path, datasets=("digits",))
    table = main_table(results)
    assert claims(results, table) == []
    assert "paper" not in page(results, table, []).split("<style>")[0].lower() + headline(results, table, []).lower()
    assert results.title == "Accuracy before and after local training"  # not Table 1


def test_curves_are_means_over_seeds_where_all_have_the_metric(tmp_path):
    results = gathered(tmp_path)
    (column,) = results.columns
    points = series.curves(column)["before"]["fedavg"]
    assert [p.round for p in points] == list(range(0, 21, 2))
    assert points[-1].samples == 500 * 20
    assert points[-1].bytes == 80_000 * 20
    by_hand = [run.rows[4]["before"] for run in column.runs["fedavg"]]
    assert points[2].mean == pytest.approx(sum(by_hand) / 3)
    assert points[2].low < points[2].mean < points[2].high
    assert [p.round for p in series.curves(column)["after"]["fedavg"]] == [20]
    assert "variance_other" not in series.curves(column)


def test_variance_has_a_section_when_it_was_measured(tmp_path):
    study = made_up_study()
    plain, measured = (
        chart_data(gather(write_study(tmp_path / str(v), study, variance=v))) for v in (False, True)
    )  # fmt: skip
    assert plain["variance"] == []
    assert set(measured["variance"][0]["metrics"]) == {"variance_other", "variance_drift"}
    assert "variance_other" not in measured["curves"][0]["metrics"]


def test_work_says_how_many_seeds_reached_the_target(tmp_path):
    results = gathered(tmp_path, level=lambda _, m: HIGH.get(m, 0.5))
    spent = series.work(results.columns[0], 0.7)
    assert (spent["fedavg"].reached, spent["fedavg"].rounds_to) == (0, None)
    assert spent["fedncv"].reached == spent["fedncv"].seeds == 3
    assert spent["fedncv"].samples_to == 500 * spent["fedncv"].rounds_to
    assert 0.55 < series.default_target(results.columns[0]) < 0.9


def test_figures_page_and_csv_hold_the_same_numbers(tmp_path):
    results = gathered(tmp_path)
    rows = list(csv.DictReader(io.StringIO(series.curves_csv(results))))
    drawn = {line.get_gid(): line.get_xydata() for line in figures.curves(results).axes[0].lines if line.get_gid()}
    charted = chart_data(results)["curves"][0]["metrics"]["before"]
    for method in results.methods:
        mine = [row for row in rows if (row["metric"], row["method"]) == ("before", method)]
        expected = [(float(row["round"]), float(row["mean"])) for row in mine]
        assert [(p[0], p[3]) for p in charted[method]] == expected
        assert [(x, y / 100) for x, y in drawn[method]] == [pytest.approx(pair, rel=1e-5) for pair in expected]


def test_what_an_earlier_report_had_and_this_one_has_not_is_gone(tmp_path):
    """Gain and cost are of a study with one column, accuracy against clients of one that varies them."""
    write_study(tmp_path, made_up_study())
    write(tmp_path)
    assert (tmp_path / "report" / "parts.md").exists()
    for name in ("scale.png", "scale.svg"):
        (tmp_path / "report" / name).touch()
    write_study(tmp_path, made_up_study(datasets=("cifar10", "mnist")))
    written = {path.name for path in write(tmp_path)[1:]}
    assert {path.name for path in (tmp_path / "report").iterdir()} == written
    assert not {"parts.md", "scale.png", "scale.svg"} & written


def test_equal_results_give_equal_files(tmp_path):
    write_study(tmp_path, made_up_study(seeds=(0, 1)))
    first = {path: path.read_bytes() for path in write(tmp_path)}
    assert {path.name for path in first} == {
        "report.html", "table.csv", "table.md", "table.tex", "parts.md", "curves.csv", "clients.csv", "work.csv",
        "curves.png", "curves.svg", "dots.png", "dots.svg", "clients.png", "clients.svg",
    }  # fmt: skip
    assert {path: path.read_bytes() for path in write(tmp_path)} == first


def test_the_page_stands_alone_and_no_text_breaks_out_of_it(tmp_path):
    evil = "</script><script>alert(1)</script>"
    results = gathered(tmp_path, title=evil)
    table = main_table(results)
    text = page(results, table, claims(results, table))
    assert evil not in text
    assert "@@" not in text
    for outside in ("http://", "https://", 'src="/', "@import"):
        assert outside not in text.replace("http://www.w3.org/2000/svg", "")
    block = text.split('id="data">')[1].split("</script>")[0]
    assert json.loads(block)["ours"] == "fedncv"


def test_variants_of_fedncv_are_named_by_what_they_lack_and_have():
    said = {
        "drift=off": "FedNCV without drift correction",
        "prior=off": "FedNCV without label prior",
        "drift.alpha=learned": "FedNCV, alpha learned",
        "drift=off+memory:beta=learned": "FedNCV without drift correction + memory, learned",
        "tau=0": "FedNCV without label prior",
        "memory=adaptive": "FedNCV with server memory",
        "drift=adaptive": "FedNCV, alpha learned",
        "samples=saga": "FedNCV with sample level (SAGA)",
        "drift=fixed,even=false,tau=0,momentum=0,average=0,blend=0": "FedAvg with drift correction",
        "drift=off,memory=adaptive,even=false,tau=0,momentum=0,average=0,blend=0": "FedAvg with server memory",
        "drift=off,even=false,tau=0,momentum=0,average=0,blend=0.03": "FedAvg with blend",
        "drift=fixed,even=false,momentum=0,average=0,blend=0":  # the label prior is still there
            "FedNCV with drift correction, without even samples, momentum, average, blend",
        "momentum=0.3,average=0": "FedNCV without average, momentum 0.3",
    }  # fmt: skip
    assert {knobs: names.method(f"fedncv:{knobs}") for knobs in said} == said
    assert names.method("fedncv") == "FedNCV"
    assert names.method("fedncv+prior") == "FedNCV + prior"


def test_the_ablations_methods_have_names_of_their_own():
    methods = [*ablation().methods, "fedncv:drift=off,even=false,tau=0,momentum=0,average=0,blend=0"]
    assert len({names.method(method) for method in methods}) == len(methods) == 30
    assert max(len(names.method(method)) for method in methods[:-1]) <= 51


def test_examples():
    assert doctest.testmod(names).failed == 0
    assert doctest.testmod(findings).failed == 0
