"""Studies as values and files: which runs, where, and what may be added to them."""

import json
import re
import tarfile
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fedncv.config import RunConfig, Settings, named, write_toml
from fedncv.data import DATASETS
from fedncv.methods import METHODS
from fedncv.studies import (
    FIG3,
    STUDIES,
    TABLE1,
    TUNED_FOR_ABLATION,
    TUNED_ON_CIFAR10,
    TUNED_ON_FASHION_MNIST,
    cost,
)
from fedncv.studies.cells import check_study
from fedncv.studies.cost import expected_samples, measured_samples
from fedncv.studies.tuning import choose, score, trial_cells
from fedncv.study import FILE, Cell, Study, Tuning, extend, read_study, to_toml


@pytest.fixture
def study():
    settings = Settings(clients=20, per_round=5)
    return Study(
        name="mine", title='A "quoted" title', settings=settings, datasets=("mnist", "digits"),
        methods=("fedavg", "fedprox:mu=0.1"), seeds=(0, 1),
    )  # fmt: skip


@pytest.mark.parametrize("name", STUDIES)
def test_every_named_study_is_sound(name):
    study = STUDIES[name]()
    assert study.name == name
    assert set(study.datasets) <= set(DATASETS)
    check_study(study)


def test_the_papers_grids():
    table1, fig2, fig3 = (STUDIES[name]() for name in ("table1", "fig2", "fig3"))
    assert (len(TABLE1), len(FIG3)) == (7, 12)
    assert set(TABLE1) <= set(table1.methods)
    assert set(FIG3) <= set(fig3.methods)
    assert len(table1.seeds) >= 10
    assert (min(fig2.clients), max(fig2.clients)) == (100, 1000)
    protocol = Settings()
    for each in (table1, fig3):
        assert replace(each.settings, eval_every=protocol.eval_every) == protocol


def test_table_1_has_its_controls_ten_seeds_on_two_datasets_and_five_on_the_others():
    table1 = STUDIES["table1"]()
    extras = [method for method in table1.methods if method.endswith("+average+blend")]
    assert [method.partition("+")[0] for method in extras] == ["fedavg", "fedavgm", "scaffold:weights=samples"]
    assert "feddyn+prior" in table1.methods
    runs = Counter(cell.config.data for cell in table1.cells())
    assert {data: number / len(table1.methods) for data, number in runs.items()} == {
        "cifar10": 10, "cifar100": 10, "tiny_imagenet": 5, "emnist": 5, "fashion_mnist": 5, "mnist": 5,
    }  # fmt: skip
    assert set(table1.transfers.values()) == {"cifar100", "fashion_mnist"}


def test_methods_of_studies_are_there_and_the_ablation_has_rates_on_every_dataset():
    for make in STUDIES.values():
        assert {re.split(r"[:+]", method)[0] for method in make().methods} <= set(METHODS)
    ablation = STUDIES["ablation"]()
    assert set(ablation.lr) == set(ablation.datasets)
    assert len(ablation.seeds) == 5


def test_learning_rates_are_those_that_tuning_chose_for_table_1():
    with tarfile.open(Path(__file__).parents[2] / "docs" / "results" / "table1.tar.xz") as archive:
        chosen = tomllib.load(archive.extractfile("table1/study.toml"))["lr"]
    for data, tuned in (("cifar10", TUNED_ON_CIFAR10), ("fashion_mnist", TUNED_ON_FASHION_MNIST)):
        assert tuned == {method: lr for method, lr in chosen[data].items() if lr != Settings().lr}


def test_learning_rates_are_those_that_tuning_chose_for_the_ablation():
    scores: dict[str, dict[float, float]] = {}
    for line in (Path(__file__).parents[2] / "docs" / "results" / "ablation_tuning.jsonl").read_text().splitlines():
        row = json.loads(line)
        scores.setdefault(row["method"], {})[row["lr"]] = row["before"]
    assert set(scores) <= set(STUDIES["ablation"]().methods)
    chosen = {method: choose(of_rates) for method, of_rates in scores.items()}
    assert {method: lr for method, lr in chosen.items() if lr != Settings().lr} == TUNED_FOR_ABLATION


def test_a_method_that_is_added_runs_as_it_was_tuned():
    study = replace(STUDIES["robustness"](), methods=("fedprox", "fedlc"), seeds=(0,))
    assert {cell.config.method: cell.config.lr for cell in study.cells()} == {"fedprox": 0.03, "fedlc": 0.01}


def test_fedncv_is_in_every_study_that_trains():
    if "fedncv" in METHODS:
        assert all("fedncv" in study().methods for study in STUDIES.values() if study().methods)


def test_cells_are_columns_times_methods_times_seeds(study):
    folders = [str(cell.folder) for cell in study.cells()]
    assert folders[:4] == [
        "mnist/fedavg-seed0", "mnist/fedavg-seed1", "mnist/fedprox-mu-0.1-seed0", "mnist/fedprox-mu-0.1-seed1",
    ]  # fmt: skip
    assert len(set(folders)) == 2 * 2 * 2


def test_more_clients_are_columns_with_as_many_more_drawn(study):
    columns = replace(study, clients=(20, 100, 2)).columns()
    assert [(c.clients, c.per_round) for c in columns.values()][:3] == [(20, 5), (100, 25), (2, 1)]
    assert next(iter(columns)) == "mnist/clients-20"


def test_a_study_is_read_back_as_it_was_written(study, tmp_path):
    tuned = replace(study, tuning=Tuning((0.1, 1.0), (1000,)), lr={"mnist": {"fedprox:mu=0.1": 0.1}}, clients=(5, 9))
    for each in (study, tuned):
        text = to_toml(each, {"made_with": {"command": 'fedncv "x" \\ ü'}})
        assert tomllib.loads(text)["made_with"] == {"command": 'fedncv "x" \\ ü'}
        (tmp_path / FILE).write_text(text)
        assert read_study(tmp_path) == each


@pytest.mark.parametrize("lost", ["name", "seeds", "settings"])
def test_a_study_file_with_a_gap_is_named(study, tmp_path, lost):
    text = to_toml(study).replace(f"[{lost}]", "[other]") if lost == "settings" else to_toml(study)
    lines = [line for line in text.splitlines() if not line.startswith(f"{lost} =")]
    (tmp_path / FILE).write_text("\n".join(lines))
    with pytest.raises(ValueError, match=lost):
        read_study(tmp_path)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ('seeds = [0, "1"]', r"seeds must be a list of whole numbers, not \[0, '1'\]"),
        ("seeds = 3", "seeds must be a list of whole numbers, not 3"),
        ('methods = "fedavg"', "methods must be a list of names, not 'fedavg'"),
        ("clients = [20.0]", r"clients must be a list of whole numbers, not \[20.0\]"),
    ],
)
def test_a_study_file_with_a_list_of_another_kind_is_named(study, tmp_path, line, wrong):
    name = line.partition(" ")[0]
    lines = to_toml(study).splitlines()
    (tmp_path / FILE).write_text("\n".join(line if each.startswith(f"{name} = [") else each for each in lines))
    with pytest.raises(ValueError, match=f"{FILE}: {wrong}"):
        read_study(tmp_path)


def test_datasets_methods_and_seeds_can_be_added_and_nothing_else(study):
    more = replace(study, datasets=("cifar10",), methods=("scaffold",), seeds=(0, 1, 2))
    grown = extend(study, more, where=Path("out"))
    assert grown.datasets == ("mnist", "digits", "cifar10")
    assert grown.methods == ("fedavg", "fedprox:mu=0.1", "scaffold")
    assert grown.seeds == (0, 1, 2)
    other = replace(study, settings=replace(study.settings, rounds=7, lr=0.5))
    with pytest.raises(ValueError, match=r"out holds a study with another protocol \(rounds 100 → 7, lr 0.01 → 0.5\)"):
        extend(study, other, where=Path("out"))
    with pytest.raises(ValueError, match="tuning, which must come before"):
        extend(study, replace(study, tuning=Tuning()), where=Path("out"))
    moved = replace(study, settings=replace(study.settings, device="cuda", data="digits"))
    assert extend(study, moved, where=Path("out")).settings.device == "cuda"


OTHER_MACHINE = {
    "device": "cuda", "engine": "stacked", "layers": "torch", "rows": "disk", "data_dir": "elsewhere",
    "checkpoint_every": 3, "code_dir": "elsewhere", "cluster": "10.0.0.5:6379", "workers": 2, "block": 5,
}  # fmt: skip


@pytest.mark.parametrize("name", named("machine", "measurement"))
def test_another_machine_or_measurement_is_no_other_protocol(study, name):
    """Also one that has a study already: it goes on with the new value."""
    value = (OTHER_MACHINE | {"probe": "every=5", "metrics": ("auroc",)})[name]
    changed = replace(study, settings=replace(study.settings, **{name: value}))
    assert getattr(extend(study, changed, where=Path("out")).settings, name) == value


def test_mistakes_are_found_before_a_folder_is_made(study):
    for changes, message in (
        ({"seeds": ()}, "at least one value to --seeds"),
        ({"datasets": ("digits", "digits")}, "--datasets repeats a value"),
        ({"methods": ("fedavg", "fedavg")}, "--methods repeats a value"),
        ({"methods": ("fedavgg",)}, "did you mean 'fedavg'"),
        ({"tuning": Tuning(seeds=(0,))}, "seed 0 is used for tuning"),
    ):
        with pytest.raises(ValueError, match=message):
            check_study(replace(study, **changes))


def test_tuning_by_a_metric_knows_which_way_is_better(tmp_path):
    cell = Cell(Path("run"), RunConfig(rounds=0))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(write_toml(cell.config))
    (tmp_path / "run" / "metrics.jsonl").write_text(
        '{"round": 0, "before": 0.5, "before_auroc": 0.75, "after_ece": 0.25}\n'
    )
    assert [score(tmp_path, [cell], name) for name in ("before", "before_auroc", "after_ece")] == [0.5, 0.75, -0.25]


def test_tuning_gives_every_method_the_same_runs_on_other_seeds(study):
    tuned = replace(study, tuning=Tuning((0.01, 0.1), (1000, 1001)))
    assert len(tuned.untuned()) == 4
    cells = trial_cells(tuned)
    assert len({cell.folder for cell in cells}) == len(cells) == 4 * 2 * 2
    assert not {cell.config.seed for cell in cells} & {cell.config.seed for cell in tuned.cells()}
    assert str(cells[0].folder) == "tuning/mnist/lr-0.01/fedavg-seed1000"
    frozen = replace(tuned, lr={"mnist": {"fedavg": 0.1}})
    assert {cell.config.lr for cell in frozen.cells() if str(cell.folder).startswith("mnist/fedavg")} == {0.1}
    assert ("mnist", "fedavg") not in frozen.untuned()


def test_the_best_learning_rate_wins_and_the_smaller_of_equals():
    assert choose({0.1: 0.5, 0.01: 0.7, 0.03: 0.7}) == 0.01
    assert choose({0.1: float("-inf"), 0.01: float("-inf")}) == 0.01


def test_expected_samples_by_algebra():
    """1,797 digits, three quarters of them trained on, 5 of 20 clients, 3 epochs, 2 rounds."""
    config = Study(
        name="", title="", settings=Settings(clients=20, per_round=5, epochs=3, rounds=2), datasets=("digits",),
        methods=("fedavg",), seeds=(0,),
    ).cells()[0].config  # fmt: skip
    assert expected_samples(config) == pytest.approx(2 * 5 * 3 * 1797 * 0.75 / 20)
    assert measured_samples(config) == pytest.approx(3 * 1797 * 0.75)
    assert measured_samples(replace(config, rounds=10, after_every=5)) == pytest.approx(2 * 3 * 1797 * 0.75)


def test_variants_are_columns_of_their_own_and_survive_the_file(study, tmp_path):
    variants = {"alpha-1": {"partition": "dirichlet:alpha=1"}, "few": {"per_round": 2}}
    rates = {"digits/few": {"fedavg": 0.3}}
    study = replace(study, datasets=("digits",), seeds=(0,), variants=variants, lr=rates)
    assert list(study.columns()) == ["digits/alpha-1", "digits/few"]
    skewed, few = study.columns().values()
    assert (skewed.partition, skewed.per_round, few.per_round) == ("dirichlet:alpha=1", 5, 2)
    cells = {str(cell.folder): cell.config for cell in study.cells()}
    assert cells["digits/few/fedavg-seed0"].lr == 0.3
    assert cells["digits/alpha-1/fedavg-seed0"].lr == study.settings.lr
    (tmp_path / FILE).write_text(to_toml(study))
    assert read_study(tmp_path) == study
    with pytest.raises(ValueError, match="variants alpha-1, few → none"):
        extend(study, replace(study, variants={}), where=tmp_path)
    with pytest.raises(ValueError, match="give only one number to --clients"):
        check_study(replace(study, clients=(10, 20)))


def test_every_variant_has_a_line_of_its_own_in_the_costs_with_its_tuning(study, monkeypatch):
    """Two methods on two variants, two seeds and a trial each of three learning rates: four lines of five runs."""
    monkeypatch.setattr(cost, "calibrate", lambda configs: cost.Cost(len(configs), None, None))
    varied = replace(
        study,
        settings=replace(study.settings, probe="every=1"),
        datasets=("digits",),
        methods=("fedavg", "fedper"),
        seeds=(0, 1),
        variants={"iid": {"partition": "iid"}, "few": {"per_round": 1}},
        tuning=Tuning(seeds=(1000,)),
    )
    lines = cost.costs(varied.cells() + trial_cells(varied))
    assert [line[:3] for line in lines] == [(f"digits/{v}", m, 5) for v in ("iid", "few") for m in varied.methods]


def test_data_that_are_not_here_are_asked_for_once(study, monkeypatch):
    asked = []

    def absent(name, folder):
        asked.append((name, folder))
        raise ValueError(f"{name} is not here")

    monkeypatch.setattr(cost, "load", absent)
    lines = cost.costs(study.cells())
    assert asked == [("mnist", None), ("digits", None)]
    assert [(column, why) for column, _, _, _, why in lines] == [
        ("mnist", "mnist is not here"), ("mnist", "mnist is not here"),
        ("digits", "digits is not here"), ("digits", "digits is not here"),
    ]  # fmt: skip
    assert all(each.bytes is None and each.seconds is None for _, _, _, each, _ in lines)
