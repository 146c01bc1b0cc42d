"""A sample of the clients is scored: one sample everywhere, with the right standard error, named in every table."""

import itertools
import json
import math

import numpy as np
import pytest

import fedncv
from fedncv.cli import main
from fedncv.config import RunConfig
from fedncv.data import prior_accuracy
from fedncv.engine.evaluate import sampled
from fedncv.engine.problem import build
from fedncv.engine.scored import sample, standard_error
from fedncv.results import by_method, read_rows, read_run, sampling_error

QUICK = {
    "model": "mlp", "clients": 24, "per_round": 4, "rounds": 2, "epochs": 1, "eval_every": 1, "after_every": 1,
    "partition": "dirichlet:alpha=0.3,min_samples=1", "progress": False,
}  # fmt: skip


def every_sample(totals, sizes, m):
    """Return the ratio and its squared standard error of every sample of m clients."""
    picks = [list(pick) for pick in itertools.combinations(range(len(totals)), m)]
    ratios = np.array([totals[pick].sum() / sizes[pick].sum() for pick in picks])
    errors = np.array([standard_error(totals[pick], sizes[pick], len(totals)) for pick in picks])
    return ratios, errors**2


@pytest.mark.parametrize("m", [2, 3, 5, 6])
def test_with_equal_sizes_the_squared_error_is_unbiased_over_all_samples(m):
    """Then r is the mean of m of 7 numbers without replacement; all C(7, m) samples are enumerated."""
    totals, sizes = np.array([0.0, 1.0, 4.0, 2.0, 2.0, 3.0, 1.0]), np.full(7, 4)
    ratios, squares = every_sample(totals, sizes, m)
    assert math.isclose(ratios.mean(), totals.sum() / sizes.sum())
    assert math.isclose(squares.mean(), ratios.var(), rel_tol=1e-12)


def test_with_unequal_sizes_the_error_is_right_to_first_order_over_all_samples():
    """All 3,003 samples of 8 of 14 clients whose score goes with their size: linearised, so within some percent."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(10, 30, 14)
    totals = np.round(sizes * (0.3 + 0.02 * (sizes - 20) + 0.1 * rng.random(14)))
    ratios, squares = every_sample(totals, sizes, 8)
    truth = totals.sum() / sizes.sum()
    assert squares.mean() == pytest.approx(((ratios - truth) ** 2).mean(), rel=0.1)
    # as if the sizes were equal: the error of the mean of the totals, which is much larger
    assert squares.mean() < 0.5 * np.mean((1 - 8 / 14) / 8 * totals.var(ddof=1) / sizes.mean() ** 2)


def test_the_error_is_zero_where_sampling_cannot_matter_and_unknown_for_one_client():
    totals, sizes = np.array([1.0, 5.0, 2.0]), np.array([2, 6, 4])
    assert standard_error(totals, sizes, 3) == 0.0  # everybody
    assert standard_error(0.5 * sizes, sizes, 100) == 0.0  # all score the same
    assert standard_error(totals[:1], sizes[:1], 3) is None


def test_the_sample_has_only_clients_with_test_samples_each_as_often_as_any_other():
    test_sizes = np.array([3, 0, 1, 2, 0, 5, 1])
    drawn = [sample(seed, test_sizes, 2) for seed in range(600)]
    assert all(len(set(ids.tolist())) == 2 and list(ids) == sorted(ids) for ids in drawn)
    counts = np.bincount(np.concatenate(drawn), minlength=7)
    assert counts[[1, 4]].sum() == 0
    assert counts[[0, 2, 3, 5, 6]] == pytest.approx(240, abs=5 * math.sqrt(240 * 0.6))


@pytest.mark.parametrize("size", [0, 5, 6, 1000])
def test_none_or_enough_is_everybody(size):
    assert sample(0, np.array([1, 0, 1, 1, 1, 1]), size) is None


@pytest.mark.parametrize("method", [pytest.param("fedncv", marks=pytest.mark.slow), "fedper"])
def test_scores_of_the_sample_are_those_of_its_clients_in_a_run_that_scores_everybody(method):
    every = fedncv.simulate(method=method, metrics=["f1_macro"], **QUICK)
    some = fedncv.simulate(method=method, metrics=["f1_macro"], eval_clients=7, **QUICK)
    ids = some.rows[0]["scored_clients"]
    assert len(ids) == 7
    assert some.rows[0]["scored_of"] == len(every.problem.scored)
    sizes = every.problem.clients.test_sizes[ids]
    for full, row in zip(every.rows, some.rows, strict=True):
        for name in ("before", "after", "before_f1_macro"):
            if f"{name}_clients" in row:
                assert row[f"{name}_clients"] == [full[f"{name}_clients"][u] for u in ids]
        scores = np.array(row["before_clients"])
        assert row["before"] == pytest.approx((scores * sizes).sum() / sizes.sum())
        assert row["before_client_mean"] == pytest.approx(scores.mean())
        error = standard_error(scores * sizes, sizes, some.rows[0]["scored_of"])
        assert row["before_standard_error"] == pytest.approx(error)
        assert row.get("loss") == full.get("loss")  # training is not affected
    prior = prior_accuracy(every.problem.dataset.y.numpy(), every.problem.clients.only(np.array(ids)), 10)
    assert some.rows[0]["label_prior"] == prior


@pytest.mark.parametrize("engine", [pytest.param("processes", marks=pytest.mark.slow), "stacked", "streams"])
def test_every_engine_scores_the_same_sample(engine):
    settings = QUICK | {"metrics": ["f1_macro"], "dtype": "float64", "eval_clients": 5, "method": "fedncv"}
    ours, theirs = (fedncv.simulate(engine=each, **settings).rows for each in ("sequential", engine))
    for row, other in zip(ours, theirs, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            assert other[name] == pytest.approx(value, rel=1e-9), name
        assert row["scored_clients"] == other["scored_clients"] if row["round"] == 0 else True


def test_only_the_sample_is_trained_for_the_scores_after(monkeypatch):
    from fedncv.engine import evaluate

    asked = []
    train = evaluate.train
    monkeypatch.setattr(evaluate, "train", lambda p, r, arrival: asked.append(arrival.client) or train(p, r, arrival))
    result = fedncv.simulate(engine="sequential", eval_clients=3, **QUICK | {"after_every": 0})
    assert asked == result.rows[0]["scored_clients"]


def test_the_sample_depends_on_the_seed_but_not_on_the_method_or_the_round():
    def ids(**more):
        config = RunConfig(model="mlp", partition="iid", eval_clients=6, **more)
        return sampled(build(config))["scored_clients"]

    assert ids() == ids(method="scaffold") == ids(rounds=7, per_round=3)
    assert ids() != ids(seed=1)


def test_enough_clients_give_the_bytes_of_a_run_that_scores_everybody(tmp_path):
    for name, scored in (("all", 0), ("enough", 24), ("more", 10**9)):
        fedncv.simulate(out=tmp_path / name, eval_clients=scored, **QUICK)
    everybody = (tmp_path / "all" / "metrics.jsonl").read_bytes()
    assert b"scored_clients" not in everybody
    assert all((tmp_path / name / "metrics.jsonl").read_bytes() == everybody for name in ("enough", "more"))


def test_a_stopped_run_is_resumed_with_the_same_bytes(tmp_path):
    settings = QUICK | {"rounds": 4, "eval_clients": 6, "checkpoint_every": 2, "method": "scaffold", "rows": "disk"}
    fedncv.simulate(out=tmp_path / "whole", **settings)

    def stop(row, run):
        if row["round"] == 3:
            run.stop("enough")

    fedncv.simulate(out=tmp_path / "stopped", on_round=stop, **settings)
    fedncv.resume(tmp_path / "stopped", progress=False)
    for name in ("metrics.jsonl", "state.safetensors"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_negative_number_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"^eval_clients must be at least 0 \(0: all clients\), not -1$"):
        fedncv.simulate(eval_clients=-1, **QUICK)


def test_runs_with_samples_of_different_sizes_are_never_averaged(tmp_path, capsys):
    for seed, scored in ((0, 4), (1, 6)):
        fedncv.simulate(out=tmp_path / f"seed{seed}", seed=seed, eval_clients=scored, **QUICK)
    runs = [read_run(tmp_path / f"seed{seed}") for seed in (0, 1)]
    assert sorted(by_method(runs)) == ["fedavg, eval_clients 4", "fedavg, eval_clients 6"]
    folders = [str(tmp_path / f"seed{seed}") for seed in (0, 1)]
    for given in (
        [str(tmp_path)],
        [str(tmp_path), "--allow", "eval_clients"],
        [*folders, "--out", str(tmp_path / "both")],
    ):
        assert main(["report", *given]) == 2
        said = capsys.readouterr().err
        assert f"scored different numbers of clients (4 in {folders[0]}, 6 in {folders[1]})" in " ".join(said.split())


def test_the_error_of_a_mean_over_seeds_is_that_of_independent_samples(tmp_path):
    runs = []
    for seed in range(3):
        fedncv.simulate(out=tmp_path / str(seed), seed=seed, eval_clients=5, **QUICK)
        runs.append(read_run(tmp_path / str(seed)))
    errors = [read_rows(run.folder)[-1]["after_standard_error"] for run in runs]
    assert sampling_error(runs, "after") == pytest.approx(math.sqrt(sum(e * e for e in errors)) / 3)
    assert sampling_error(runs[:1], "after") == errors[0]


def test_tables_and_the_page_say_how_many_clients_were_scored(tmp_path, capsys):
    for seed in (0, 1):
        fedncv.simulate(out=tmp_path / f"seed{seed}", seed=seed, eval_clients=9, **QUICK)
    said = "scored on 9 of 24 clients"
    assert main(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert said in shown
    assert "(s.e. " in shown
    assert main(["report", str(tmp_path)]) == 0
    files = tmp_path / "report"
    for path in (tmp_path / "report.html", files / "table.md", files / "table.tex"):
        assert said in path.read_text().replace("Scored", "scored"), path
        assert "all clients' own" not in path.read_text()
    header, *lines = [line.split(",") for line in (files / "table.csv").read_text().splitlines()]
    error = sampling_error([read_run(tmp_path / f"seed{seed}") for seed in (0, 1)], "before")
    assert float(lines[0][header.index("standard_error")]) == pytest.approx(100 * error, abs=1e-4)
    assert "standard_error" not in json.dumps((files / "curves.csv").read_text())
    assert not (files / "metrics.csv").exists()  # an error is not a metric
    assert "9 of 24 clients" in repr(fedncv.resume(tmp_path / "seed0"))


def test_old_rows_without_a_sample_are_read_as_before(tmp_path):
    fedncv.simulate(out=tmp_path / "run", **QUICK)
    run = read_run(tmp_path / "run")
    assert run.sample is None
    assert sampling_error([run], "before") is None
    assert len(run.last("before_clients")) == 24
