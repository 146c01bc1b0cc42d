"""Metrics equal scikit-learn's, over clients and all samples, in every engine; undefined is null and counted."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import Tiny, everyone, tiny, tiny_dataset, train
from sklearn import metrics as theirs
from torch import nn

import fedncv
from fedncv.cli import main
from fedncv.engine import evaluate, stacked_scores
from fedncv.engine.problem import arrivals, start
from fedncv.engine.processes import ProcessesEngine, can_fork
from fedncv.metrics import BUILT_IN, CLASSIFICATION, Metric, find_metrics, measure, value
from fedncv.results import LOWER_IS_BETTER, metrics_of, read_rows, read_run

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
QUICK = {"model": Tiny, "clients": 4, "per_round": 2, "rounds": 1, "epochs": 1, "batch_size": 8, "partition": "iid"}
RNG = np.random.default_rng(0)


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def drawn(num_classes, n=80):
    y = RNG.integers(num_classes, size=n)
    return RNG.normal(size=(n, num_classes)) + 1.5 * np.eye(num_classes)[y], y


def macro(score, y, p):
    return score(y, p[:, 1]) if p.shape[1] == 2 else score(np.eye(p.shape[1])[y], p, average="macro")


THEIRS = {
    "accuracy": lambda y, p, g: theirs.accuracy_score(y, g),
    "balanced_accuracy": lambda y, p, g: theirs.balanced_accuracy_score(y, g),
    "f1_macro": lambda y, p, g: theirs.f1_score(y, g, average="macro"),
    "f1_weighted": lambda y, p, g: theirs.f1_score(y, g, average="weighted"),
    "f1_micro": lambda y, p, g: theirs.f1_score(y, g, average="micro"),
    "precision_macro": lambda y, p, g: theirs.precision_score(y, g, average="macro"),
    "recall_macro": lambda y, p, g: theirs.recall_score(y, g, average="macro"),
    "auroc": lambda y, p, g: theirs.roc_auc_score(y, p[:, 1] if p.shape[1] == 2 else p, multi_class="ovr"),
    "average_precision": lambda y, p, g: macro(theirs.average_precision_score, y, p),
    "log_loss": lambda y, p, g: theirs.log_loss(y, p),
    "brier": lambda y, p, g: theirs.brier_score_loss(y, p[:, 1] if p.shape[1] == 2 else p),
    "mcc": lambda y, p, g: theirs.matthews_corrcoef(y, g),
    "kappa": lambda y, p, g: theirs.cohen_kappa_score(y, g),
    "top5": lambda y, p, g: theirs.top_k_accuracy_score(y, p, k=5),
}


@pytest.mark.parametrize(
    ("name", "num_classes"), [(name, c) for name in THEIRS for c in (2, 3, 7) if name != "top5" or c > 5]
)
def test_numbers_are_scikit_learns(name, num_classes):
    outputs, y = drawn(num_classes)
    (metric,) = find_metrics([name])
    expected = THEIRS[name](y, softmax(outputs), outputs.argmax(1))
    assert value(metric, outputs.astype(np.float64), y, of="all") == pytest.approx(expected, abs=1e-12)


def test_every_built_in_metric_is_tested_and_on_the_page():
    assert set(THEIRS) | {"ece"} == set(CLASSIFICATION)
    text = PAGE.read_text(encoding="utf-8")
    for kind, known in BUILT_IN.items():
        assert f"| {kind} | {', '.join(f'`{name}`' for name in known)} |" in text
    assert set(LOWER_IS_BETTER) < {name for known in BUILT_IN.values() for name in known}


def test_ece_is_the_gap_between_confidence_and_accuracy_bin_by_bin():
    """Four samples at confidence 0.9, half of them right; two at 0.6, both right: 4/6 * 0.4 + 2/6 * 0.4."""
    p = np.array([[0.9, 0.1]] * 4 + [[0.6, 0.4]] * 2)
    y = np.array([0, 0, 1, 1, 0, 0])
    assert value(*find_metrics(["ece"]), np.log(p), y, of="all") == pytest.approx(0.4)


@pytest.mark.parametrize(("name", "theirs"), [("mae", theirs.mean_absolute_error), ("r2", theirs.r2_score)])
def test_numbers_of_a_regression_are_scikit_learns(name, theirs):
    y, guess = RNG.normal(size=(20, 1)), RNG.normal(size=(20, 1))
    assert value(*find_metrics([name]), guess, y[:, 0], of="all") == pytest.approx(theirs(y, guess))
    assert value(*find_metrics(["rmse"]), guess, y, of="all") == pytest.approx(np.sqrt(np.mean((y - guess) ** 2)))


def test_further_axes_count_as_samples():
    outputs, y = drawn(3, 60)
    sentences = outputs.reshape(6, 10, 3).transpose(0, 2, 1)
    for metric in find_metrics(["f1_macro", "auroc", "log_loss"]):
        assert value(metric, sentences, y.reshape(6, 10), of="all") == pytest.approx(
            value(metric, outputs, y, of="all")
        )


# ---- undefined -----------------------------------------------------------------------------------------


def test_a_metric_that_is_not_defined_is_null_and_counted():
    outputs, y = drawn(3, 30)
    y[:10] = 1  # client 0 holds one class; client 2 has no test samples
    parts = {0: slice(0, 10), 1: slice(10, 30)}
    row = measure(
        find_metrics(["auroc", "f1_macro"]),
        {u: outputs[part] for u, part in parts.items()},
        {u: y[part] for u, part in parts.items()},
        clients=range(3),
    )
    assert row["auroc_clients"][0] is row["auroc_clients"][2] is None
    assert row["auroc_client_mean"] == row["auroc_clients"][1]
    assert (row["auroc_defined"], row["f1_macro_defined"]) == (1, 2)
    assert row["f1_macro_client_mean"] == pytest.approx(np.mean(row["f1_macro_clients"][:2]))
    assert row["auroc"] == pytest.approx(THEIRS["auroc"](y, softmax(outputs), None))


ONE_CLASS = np.array([[2.0, 1.0], [3.0, 0.0]]), np.array([0, 0])


@pytest.mark.parametrize("name", ["auroc", "average_precision", "mcc", "kappa"])
def test_one_class_leaves_a_metric_undefined_without_a_warning(name, recwarn):
    assert value(*find_metrics([name]), *ONE_CLASS, of="client 0") is None
    assert not recwarn


@pytest.mark.parametrize(
    "name", [name for name in THEIRS if name not in ("auroc", "average_precision", "mcc", "kappa")]
)
def test_other_metrics_are_defined_for_one_class(name):
    outputs, y = np.pad(ONE_CLASS[0], ((0, 0), (0, 4)), constant_values=-9), ONE_CLASS[1]
    assert value(*find_metrics([name]), outputs, y, of="client 0") is not None


def test_a_single_predicted_class_leaves_mcc_undefined():
    assert value(*find_metrics(["mcc"]), ONE_CLASS[0], np.array([0, 1]), of="client 0") is None


def test_a_class_that_is_predicted_and_does_not_occur_does_not_lower_balanced_accuracy():
    """Class 0: one of two samples right. Class 1: right. The other sample of class 0 is taken for class 2."""
    outputs, y = np.eye(3)[[0, 2, 1]], np.array([0, 0, 1])
    assert value(*find_metrics(["balanced_accuracy"]), outputs, y, of="all") == pytest.approx((1 / 2 + 1) / 2)


def test_constant_targets_leave_r2_undefined():
    assert value(*find_metrics(["r2"]), np.ones((4, 1)), np.full((4, 1), 2.0), of="client 0") is None


def test_outputs_that_are_not_finite_leave_every_metric_undefined():
    outputs = np.array([[np.nan, 1.0], [0.0, 1.0]])
    assert all(value(m, outputs, np.array([0, 1]), of="x") is None for m in find_metrics(["f1_macro", "log_loss"]))


# ---- rows ----------------------------------------------------------------------------------------------

NAMES = ("f1_macro", "auroc", "log_loss", "balanced_accuracy")


def test_a_row_is_scikit_learns_over_the_models_that_clients_use():
    problem = tiny("fedper+prior", metrics=NAMES)  # personal heads and a personal offset
    state = train(problem, rounds=2)
    row = evaluate.before(problem, state)
    together = []
    for arrival in arrivals(problem, state, everyone(0, 1, 2, 3).ids):
        ask = problem.ask(arrival.client, arrival.buffers_R, 2)
        y_P, _ = problem.method.begin(ask, arrival.down, arrival.kept.own)
        used = problem.method.predict(ask, y_P, arrival.down, arrival.kept.own)
        test = torch.from_numpy(problem.clients.test[arrival.client])
        output, _ = problem.model.forward(used.x_P, used.buffers_R, problem.dataset.x[test], mode="eval")
        y, guess = problem.dataset.y[test].numpy(), (output.logits_BC + used.offset_C).argmax(1).numpy()
        together.append((y, guess))
        found = row["before_f1_macro_clients"][arrival.client]
        assert found == pytest.approx(theirs.f1_score(y, guess, average="macro", zero_division=0))
    y, guess = map(np.concatenate, zip(*together, strict=True))
    assert row["before_f1_macro"] == pytest.approx(theirs.f1_score(y, guess, average="macro", zero_division=0))
    assert row["before_f1_macro_defined"] == 4
    assert "pooled" not in row


@pytest.mark.parametrize("name", ["fedavg", "fedncv", "fedper+prior"])
def test_engines_measure_the_same(name):
    """Two runs in the stack; a client without test samples; blocks smaller than a client's samples."""
    problems = [tiny(name, metrics=NAMES, seed=seed, sizes=(20, 3, 300, 18), batch_size=64) for seed in (0, 1)]
    states = [train(problem, rounds=1) for problem in problems]
    engine = stacked_scores.ScoringEngine(problems)
    for ours, measured in ((evaluate.before, engine.before), (evaluate.after, engine.after)):
        for problem, state, row in zip(problems, states, measured(states), strict=True):
            expected = ours(problem, state)
            assert row.keys() == expected.keys()
            for key, number in row.items():
                assert number == pytest.approx(expected[key], abs=1e-10), key
            assert expected[f"{ours.__name__}_log_loss_clients"][1] is None  # no test samples


@pytest.mark.skipif(not can_fork(), reason="workers are forked")
def test_processes_measure_the_same_bits():
    problem = tiny("fedavg", metrics=NAMES)
    state = start(problem)
    with ProcessesEngine([problem], workers=2) as engine:
        assert engine.before([state]) == [evaluate.before(problem, state)]
        assert engine.after([state]) == [evaluate.after(problem, state)]


def test_without_metrics_rows_are_as_they_were():
    assert not any("_defined" in key for key in evaluate.before(tiny("fedavg"), start(tiny("fedavg"))))


def test_metrics_change_no_score_and_no_model():
    plain, measured = (fedncv.simulate(data=tiny_dataset(80), metrics=names, **QUICK) for names in ((), NAMES))
    assert torch.equal(plain.state.server.x_P, measured.state.server.x_P)
    assert {key: measured.last[key] for key in plain.last} == plain.last


# ---- names, one's own, bad input -----------------------------------------------------------------------


def test_the_page_s_own_metric_runs_and_is_resumed(tmp_path, capsys, monkeypatch):
    (code,) = re.findall(
        r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8").partition("## Callbacks")[0], re.DOTALL
    )
    there = {}
    exec(code, there)
    assert "before_sensitivity_defined" in there["result"].last
    data = tiny_dataset(80)
    fedncv.simulate(metrics=[there["sensitivity"]], data=data, out=tmp_path / "run", **QUICK)
    with pytest.raises(ValueError, match=r"objects of your own \(metrics sensitivity\); pass them again"):
        fedncv.resume(tmp_path / "run", data=data, model=Tiny)
    assert len(fedncv.resume(tmp_path / "run", data=data, model=Tiny, metrics=[there["sensitivity"]]).rows) == 2
    (tmp_path / "of_mine.py").write_text(code.partition("\n\nresult")[0])
    monkeypatch.chdir(tmp_path)
    options = [
        "--model",
        "mlp",
        "--clients",
        "5",
        "--per-round",
        "2",
        "--rounds",
        "1",
        "--epochs",
        "1",
        "--out",
        "runs",
    ]
    assert main(["run", "--metrics", "of_mine:sensitivity", "ece", *options]) == 0
    run = read_run(tmp_path / "runs" / "fedavg-seed0")
    assert run.config.metrics == ("of_mine:sensitivity", "ece")
    assert metrics_of([run]) == ["sensitivity", "ece"]
    assert "ece (lower is better)" in capsys.readouterr().out
    assert main(["show", "runs", "--metric", "sensitivity"]) == 0
    assert "before_sensitivity, mean over seeds" in capsys.readouterr().out
    assert main(["show", "runs", "--metric", "sensitivitty"]) == 2
    assert "unknown metric of these runs 'sensitivitty'; did you mean 'sensitivity'?" in capsys.readouterr().err


def test_metrics_are_a_list_in_the_config_and_may_change_on_resume(tmp_path):
    (tmp_path / "study.toml").write_text('metrics = ["auroc"]\nmodel = "mlp"\nrounds = 1\nclients = 5\nper_round = 2\n')
    options = ["--config", str(tmp_path / "study.toml"), "--epochs", "1", "--out", str(tmp_path / "runs")]
    assert main(["run", *options]) == 0
    run = tmp_path / "runs" / "fedavg-seed0"
    config = (run / "config.toml").read_text()
    assert 'metrics = ["auroc"]\n' in config
    (run / "config.toml").write_text(config.replace('["auroc"]', '["auroc", "mcc"]'))
    assert fedncv.resume(run).problem.config.metrics == ("auroc", "mcc")


def test_regression_has_its_own():
    x = torch.from_numpy(RNG.normal(size=(80, 2)))
    data = fedncv.Dataset("line", x, x[:, :1] - x[:, 1:], 1)
    linear = {"data": data, "task": "regression", **QUICK, "model": lambda _shape, outputs: nn.Linear(2, outputs)}
    row = fedncv.simulate(metrics=["rmse", "r2"], **linear).last
    assert row["before_rmse"] == pytest.approx(np.sqrt(-row["before"]), abs=1e-6)
    with pytest.raises(
        ValueError, match=r"f1_macro is for classification .*this task is a regression; metrics that fit: rmse"
    ):
        fedncv.simulate(metrics=["f1_macro"], **linear)


def constant(result):
    def own(outputs, targets):
        return result

    return own


def broken(outputs, targets):
    raise KeyError("column")


def in_place(outputs, targets):
    outputs *= 0
    return 0.0


def in_place_by_torch(outputs, targets):
    return torch.from_numpy(outputs).mul_(0).sum().item()


def other(outputs, targets):
    return outputs.sum()


WRONG = [
    ([in_place], r"metric in_place changes its arguments, which are read-only.*copy first: outputs = outputs.copy"),
    (["f1_makro"], "unknown metric 'f1_makro'; did you mean 'f1_macro'.*package.module:function"),
    (["f1_macro,auroc"], "separate several metrics with spaces: f1_macro auroc"),
    (["rmse"], "metric rmse is for regression, and this task is a classification; metrics that fit: accuracy, "),
    (["top5"], "metric top5 is for more than 5 classes, and there are 3 outputs"),
    (["auroc", "auroc"], "two metrics are called 'auroc'"),
    ([constant(1), constant(2)], "two metrics are called 'own'"),
    ([3], r"metrics are names and functions of \(outputs, targets\), not 3"),
    (["fedncv.metrics:TAKEN"], "is a tuple, not a function"),
    ([constant(np.ones(3))], "metric own returns ndarray for all clients; one number is wanted, or nan|client 0"),
    ([broken], r"metric broken failed for client 0 \(KeyError: 'column'\); return nan where it is not defined"),
]


@pytest.mark.parametrize(("metrics", "message"), WRONG)
def test_bad_input_is_refused_in_one_line(metrics, message):
    with pytest.raises(ValueError, match=message) as caught:
        fedncv.simulate(metrics=metrics, data=tiny_dataset(80), **QUICK)
    assert "\n" not in str(caught.value)


def test_a_metric_that_works_in_place_changes_no_other():
    outputs, y = drawn(3)
    alone, after = (
        measure(tuple(Metric(f.__name__, f) for f in functions), {0: outputs}, {0: y}, clients=[0])
        for functions in ([other], [in_place_by_torch, other])
    )
    assert alone == {key: after[key] for key in alone}


def test_a_run_is_not_resumed_with_another_metric_of_the_same_name(tmp_path):
    data, function = tiny_dataset(80), constant(1)
    fedncv.simulate(metrics=[function], data=data, out=tmp_path / "run", **QUICK)
    with pytest.raises(
        ValueError, match=r"was started with another metric: own #\w+, now own #\w+; .*write \"custom:own"
    ):
        fedncv.resume(tmp_path / "run", data=data, model=Tiny, metrics=[constant(2)])
    assert fedncv.resume(tmp_path / "run", data=data, model=Tiny, metrics=[function]).last["before_own"] == 1


@pytest.mark.parametrize("name", ["clients", "x_client_mean", "defined"])
def test_a_name_that_rows_use_is_refused(name):
    def function(outputs, targets):
        return 0.0

    function.__name__ = name
    with pytest.raises(ValueError, match=f"a metric cannot be called '{name}'"):
        fedncv.simulate(metrics=[function], data=tiny_dataset(80), **QUICK)


def test_undefined_values_are_null_on_disk(tmp_path):
    fedncv.simulate(metrics=[constant(float("nan"))], data=tiny_dataset(80), out=tmp_path / "run", **QUICK)
    row = read_rows(tmp_path / "run")[-1]
    assert row["before_own"] is row["before_own_client_mean"] is row["before_own_clients"][0] is None
    assert row["before_own_defined"] == 0


def test_a_metric_is_a_value():
    assert find_metrics(["ece"]) == (Metric("ece", CLASSIFICATION["ece"]),)
