"""Equal budgets: the same number of runs for every method, the same draws, and what is chosen from them."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fedncv.config import RunConfig, Settings, write_toml
from fedncv.files import parse
from fedncv.methods import METHODS, SWITCHES, find_method, in_full
from fedncv.methods.space import RATE, SETTINGS, Even, Log, value_at
from fedncv.methods.spaces import space_of, with_values
from fedncv.report import tuning as page
from fedncv.spec import knobs
from fedncv.studies.command import budget
from fedncv.studies.trials import shares, space, trials
from fedncv.studies.tuning import cells_of, rows, score_by, trial_cells, tune, write_trials
from fedncv.study import FILE, Study, Tuning, extend, read_study, read_trials, to_toml

EIGHT = Tuning(grid=(), trials=8)
PAPER = Settings()


@pytest.fixture
def study():
    return Study(
        name="mine", title="mine", settings=Settings(clients=20, per_round=5), datasets=("mnist", "digits"),
        methods=("fedavg", "fedprox+prior", "fedncv", "local"), seeds=(0, 1), tuning=EIGHT,
    )  # fmt: skip


@pytest.mark.parametrize("name", [*METHODS, *(f"fedavg+{switch}" for switch in SWITCHES)])
def test_every_method_has_the_rate_and_another_knob_and_every_value_of_them_is_sound(name):
    found = space_of(name)
    assert found.pop("lr") == RATE
    assert found
    for knob, over in found.items():
        for u in (0.0, 0.5, 1 - 1e-9):
            value = value_at(over, u)
            text = with_values(name, {knob: value})
            find_method(text)
            if knob not in SETTINGS:
                assert f"{knob.rpartition('.')[2]}={value}".lower() in in_full(text).lower()
            else:
                assert text == name


def test_no_knob_has_the_name_of_a_setting_that_tuning_sets():
    """A switch may: its knobs are called switch.knob."""
    for each in METHODS.values():
        assert not set(SETTINGS) & set(knobs(each.config) if each.config else ())


def test_a_chain_has_the_spaces_of_its_parts_without_those_that_are_off_or_set():
    parts = {"drift.alpha", "prior.tau", "momentum.beta", "average.share", "blend.rate"}
    assert set(space_of("fedncv")) == {"lr", *parts}
    assert set(space_of("fedncv:prior=off,momentum=0.9,average.share=0.1")) == {"lr", "drift.alpha", "blend.rate"}
    assert set(space_of("fedncv+memory:forget=0.5")) == {"lr", *parts, "memory.beta"}
    assert set(space_of("fedprox:mu=0.1+prior")) == {"lr", "prior.tau"}
    assert set(space_of("my.module:mine")) == {"lr", "weight_decay"}


def test_ranges_at_their_ends_and_in_the_middle():
    assert (value_at(Log(0.01, 1), 0), value_at(Log(0.01, 1), 0.25)) == (0.01, 0.0316)
    assert (value_at(Even(1, 3), 0), value_at(Even(1, 3), 0.5)) == (1, 2)
    assert [value_at((1, 2, 4), u) for u in (0, 0.34, 0.99)] == [1, 2, 4]


def test_every_method_has_the_same_number_of_runs_and_fedncv_no_more(study):
    runs = Counter((cell.folder.parts[1], cell.method) for cell in trial_cells(study))
    assert set(runs) == {(column, method) for column in study.datasets for method in study.methods}
    assert set(runs.values()) == {8 * 2}
    cells = trial_cells(study)
    assert len({cell.folder for cell in cells}) == len(cells)
    assert {cell.config.seed for cell in cells} == {1000, 1001}


def test_the_first_trial_is_the_method_as_it_is_named_and_the_last_half_has_other_knobs(study):
    first, *others = trials("fedprox+prior", EIGHT, PAPER)
    assert first == {"lr": PAPER.lr}
    assert [set(each) for each in others] == 3 * [{"lr"}] + 4 * [{"lr", "mu", "prior.tau"}]
    cell = cells_of(study, "digits", "fedprox+prior")["trial-1"][0]
    assert (cell.config.method, str(cell.folder)) == (
        "fedprox+prior", "tuning/digits/trial-1/fedprox-prior-seed1000",
    )  # fmt: skip


def test_methods_share_the_draws_of_a_rate_and_of_a_common_part_and_a_late_one_gets_them_too():
    by_method = {method: trials(method, EIGHT, PAPER) for method in ("fedncv", "scaffold+prior", "local")}
    rates = {tuple(each["lr"] for each in found) for found in by_method.values()}
    assert len(rates) == 1
    taus = {tuple(each.get("prior.tau") for each in by_method[m]) for m in ("fedncv", "scaffold+prior")}
    assert len(taus) == 1
    assert trials("fedncv", EIGHT._replace(seeds=(2000,)), PAPER) != by_method["fedncv"]


def test_shares_have_one_in_each_part_and_differ_between_knobs():
    """Latin hypercube: of n numbers one is in each n-th of [0, 1)."""
    found = shares(1000, "lr", 7)
    assert sorted(int(7 * u) for u in found) == list(range(7))
    assert found != sorted(found)
    assert found != shares(1000, "mu", 7)


def test_values_that_need_more_epochs_than_the_default_are_left_out():
    assert space("fedrep", PAPER)["body_epochs"] == (1, 2, 3, 4)
    assert space("fedrep", replace(PAPER, epochs=2))["body_epochs"] == (1,)


def scored(folder: Path, cells, before, after):
    for cell in cells:
        (folder / cell.folder).mkdir(parents=True)
        (folder / cell.folder / "config.toml").write_text(write_toml(cell.config))
        row = f'{{"round": {cell.config.rounds}, "before": {before}, "after": {after}}}\n'
        (folder / cell.folder / "metrics.jsonl").write_text(row)


@pytest.fixture
def tuned(study, tmp_path):
    """Digits with three trials of FedProx and FedAvg: the second is best before, the third after and in the mean."""

    def make(by, on=(), datasets=("digits",)):
        asked = replace(
            study, datasets=datasets, methods=("fedavg", "fedprox"),
            tuning=Tuning(grid=(), seeds=(1000,), by=by, trials=3, rounds=4, on=on),
        )  # fmt: skip
        saved = []

        def run(cells):
            for cell in cells:
                trial = int(cell.folder.parts[-2].removeprefix("trial-"))
                scored(tmp_path, [cell], (0.5, 0.6, 0.55)[trial - 1], (0.5, 0.6, 0.9)[trial - 1])

        return tune(asked, tmp_path, run, saved.append), saved

    return make


@pytest.mark.parametrize(("by", "best"), [("before", 2), ("after", 3), ("mean", 3)])
def test_the_best_by_the_rule_is_chosen_and_runs_with_its_knobs(tuned, by, best):
    study, saved = tuned(by)
    assert saved == [study]
    values = trials("fedprox", study.tuning, study.settings)[best - 1]
    config = next(cell.config for cell in study.cells() if cell.method == "fedprox")
    assert config == RunConfig(
        **vars(study.settings) | {"data": "digits"}
        | {"method": with_values("fedprox", values), "lr": values["lr"], "seed": 0},
    )  # fmt: skip
    assert "mu=" in config.method
    assert {str(cell.folder) for cell in study.cells() if cell.method == "fedprox"} == {
        "digits/fedprox-seed0", "digits/fedprox-seed1",
    }  # fmt: skip
    assert study.untuned() == []


def test_each_has_a_column_for_before_and_one_for_after_with_the_same_trials(tuned):
    study, _ = tuned("each")
    assert list(study.columns()) == ["digits/by-before", "digits/by-after"]
    rates = {column: study.lr[column]["fedprox"] for column in study.columns()}
    all_values = trials("fedprox", study.tuning, study.settings)
    assert rates == {"digits/by-before": all_values[1]["lr"], "digits/by-after": all_values[2]["lr"]}


def test_a_column_that_is_not_tuned_takes_the_settings_of_the_other(tuned, tmp_path):
    study, _ = tuned("before", on=("mnist=digits",), datasets=("digits", "mnist"))
    assert not (tmp_path / "tuning" / "mnist").exists()
    assert study.lr["mnist"] == study.lr["digits"]
    assert study.tuned["mnist"] == study.tuned["digits"]
    assert {tuple(row["chosen_for"]) for row in read_trials(tmp_path)} == {(), ("digits", "mnist")}
    all_alike = replace(study, tuning=study.tuning._replace(on=("digits",)))
    assert [all_alike.source(column) for column in study.columns()] == ["digits", "digits"]


@pytest.mark.parametrize(
    ("on", "message"),
    [
        (("cifar",), "unknown column in --tuned-on 'cifar'"),
        (("mnist=digit",), "did you mean 'digits'"),
        (("digits", "mnist=digits"), "name one column whose settings all take, or pairs"),
        (("mnist=digits", "digits=mnist"), "is not tuned itself"),
    ],
)
def test_a_transfer_that_cannot_be_is_refused(study, on, message):
    with pytest.raises(ValueError, match=message):
        replace(study, tuning=EIGHT._replace(on=on)).check()


def test_every_trial_is_a_line_and_keeps_it_when_its_run_is_gone(tuned, tmp_path):
    study, _ = tuned("before")
    lines = [parse(line) for line in (tmp_path / "tuning.jsonl").read_bytes().splitlines()]
    assert lines == rows(study, tmp_path)
    assert Counter((row["method"], bool(row["chosen_for"])) for row in lines) == {
        ("fedavg", False): 2, ("fedavg", True): 1, ("fedprox", False): 2, ("fedprox", True): 1,
    }  # fmt: skip
    gone = tmp_path / cells_of(study, "digits", "fedavg")["trial-3"][0].folder / "config.toml"
    gone.unlink()
    write_trials(study, tmp_path)
    kept = read_trials(tmp_path)
    assert sorted(map(str, kept)) == sorted(map(str, lines))


def test_a_failed_seed_loses_and_equal_scores_go_to_the_first(study, tmp_path):
    asked = replace(study, datasets=("digits",), methods=("fedavg",), tuning=Tuning(grid=(), seeds=(1000,), trials=2))

    def run(cells):
        scored(tmp_path, cells, 0.5, 0.5)

    assert tune(asked, tmp_path, run, lambda _: None).lr == {"digits": {"fedavg": asked.settings.lr}}
    cells = cells_of(asked, "digits", "fedavg")["trial-1"]
    with (tmp_path / cells[0].folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 101, "failed": "client 1 diverged"}\n')
    assert score_by(tmp_path, cells, "mean") == float("-inf")


def test_a_trial_that_will_never_finish_is_said_so_with_its_reason(study, tmp_path):
    """Running the same command again would not help."""
    asked = replace(study, datasets=("digits",), methods=("fedavg",), tuning=Tuning(grid=(), seeds=(1000,), trials=2))

    def run(cells):
        for cell in cells:
            scored(tmp_path, [cell], 0.5, 0.5)
            (tmp_path / cell.folder / "metrics.jsonl").write_text('{"round": 3, "stopped": "the budget is spent"}\n')

    reason = r"trial-1.* stopped after round 3 of \d+: the budget is spent; change its method"
    with pytest.raises(ValueError, match=reason):
        tune(asked, tmp_path, run, lambda _: None)


def test_the_page_says_the_edge_and_the_trial(tuned, tmp_path):
    study, _ = tuned("before")
    lines = read_trials(tmp_path)
    said = page.choice(study, lines, "digits", "fedprox")
    values = trials("fedprox", study.tuning, study.settings)
    ends = [knob for knob in values[1] if values[1][knob] in (min(w := [v[knob] for v in values if knob in v]), max(w))]
    words = ", ".join(f"{knob} {value:g}" for knob, value in values[1].items())
    edge = f"; edge: {', '.join(ends)}" if ends else ""
    assert said == f"{words} (trial 2 of 3{edge})"
    assert "3 runs, 4 rounds each, on seeds 1000" in " ".join(page.about(study))


def test_a_tuned_study_is_read_back_and_its_command_gives_the_budget(tuned, tmp_path):
    study, _ = tuned("mean", on=("mnist=digits",), datasets=("digits", "mnist"))
    (tmp_path / FILE).write_text(to_toml(study))
    assert read_study(tmp_path) == study
    assert budget(study.tuning) == [
        "--tuning-trials", "3", "--tuning-seeds", "1", "--tuning-rounds", "4", "--tune-by", "mean",
        "--tuned-on", "mnist=digits",
    ]  # fmt: skip


def test_a_study_with_a_grid_says_how_to_ask_for_it_again(study):
    old = replace(study, tuning=Tuning(seeds=(1000,)))
    with pytest.raises(ValueError, match=r"the study's is --tuning-lr 0.01 0.03 0.1 --tuning-seeds 1"):
        extend(old, study, where=Path("out"))
    with pytest.raises(ValueError, match=r"seeds .*1000, 1001.* → .*1000,"):
        extend(study, replace(study, tuning=EIGHT._replace(seeds=(1000,))), where=Path("out"))
    with pytest.raises(ValueError, match="mnist tuned on mnist → digits"):
        extend(study, replace(study, tuning=EIGHT._replace(on=("mnist=digits",))), where=Path("out"))


def test_datasets_may_have_fewer_seeds(study, tmp_path):
    fewer = replace(study, tuning=None, seeds=tuple(range(5)), num_seeds={"mnist": 2})
    assert Counter(cell.config.data for cell in fewer.cells()) == {"mnist": 2 * 4, "digits": 5 * 4}
    (tmp_path / FILE).write_text(to_toml(fewer))
    assert read_study(tmp_path) == fewer
    grown = extend(fewer, replace(fewer, datasets=("mnist",), num_seeds={"mnist": 3}), where=tmp_path)
    assert grown.num_seeds == {"mnist": 3}
    assert extend(fewer, replace(fewer, num_seeds={}), where=tmp_path).num_seeds == {}
