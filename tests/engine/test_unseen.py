"""Clients that never train: the others train as if they were alone, and both are scored by themselves."""

import numpy as np
import pytest
import torch

import fedncv
from fedncv.cli import main
from fedncv.config import RunConfig
from fedncv.data.unseen import order
from fedncv.engine import evaluate
from fedncv.engine.local import train
from fedncv.engine.problem import Arrival, arrivals, build, keeps, messages, start
from fedncv.engine.sequential import run_round
from fedncv.methods import METHODS, SWITCHES
from fedncv.methods.base import rows_at
from fedncv.methods.fedavg import Down, fedavg
from fedncv.report.gather import gather
from fedncv.report.table import main_table, to_csv, to_latex, to_markdown
from fedncv.results import by_method, read_run
from fedncv.tree import leaves

CONFIG = RunConfig(
    model="mlp", clients=10, unseen=0.3, per_round=3, rounds=2, epochs=1, partition="dirichlet:alpha=0.3", lr=0.05
)
SETTINGS = vars(CONFIG) | {"progress": False, "eval_every": 1, "after_every": 1}
SETTINGS = {name: value for name, value in SETTINGS.items() if name not in ("method", "seed")}


def of(method, **changes):
    return build(RunConfig(**vars(CONFIG) | {"method": method} | changes))


def ended(problem):
    state = start(problem)
    for _ in range(problem.config.rounds):
        state, _ = run_round(problem, state)
    return state


def test_the_order_is_one_of_all_clients_and_depends_on_the_seed_and_the_share_alone():
    found = order(3, 0.3, 10)
    assert sorted(found) == list(range(10))
    assert list(found[:7]) == sorted(found[:7])
    assert list(found[7:]) == sorted(found[7:])
    assert list(order(3, 0.3, 10)) == list(found)
    assert {tuple(order(seed, 0.3, 10)) for seed in range(20)} != {tuple(found)}
    counts = np.bincount(np.concatenate([order(seed, 0.3, 10)[7:] for seed in range(400)]), minlength=10)
    assert counts == pytest.approx(120, abs=5 * np.sqrt(400 * 0.21))  # each as often as any other


@pytest.mark.parametrize("method", ["scaffold", "fedncv", "pfedsim:warm_up=0", "fedavg+calibrated", "fedvarp"])
def test_the_others_train_as_a_federation_without_them(method):
    """The same bits, draws, sums over all clients and tables of clients included."""
    problem = of(method)
    members = problem.clients.only(np.arange(7))
    alone = build(RunConfig(**vars(CONFIG) | {"method": method, "clients": 7, "unseen": 0.0}), clients=members)
    ours, theirs = ended(problem), ended(alone)
    for (name, a), (_, b) in zip(leaves(ours.server), leaves(theirs.server), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name
    both = evaluate.before(problem, ours) | evaluate.after(problem, ours)
    without = evaluate.before(alone, theirs) | evaluate.after(alone, theirs)
    assert {name: value for name, value in both.items() if not name.startswith("unseen_")} == without
    assert {name.removeprefix("unseen_") for name in both if name.startswith("unseen_")} == set(without)


def test_they_score_the_shared_model_and_then_what_they_train_from_it():
    problem = of("fedavg")
    state, model = ended(problem), problem.model
    total = {"before": 0.0, "after": 0.0}
    for u in (7, 8, 9):
        index = torch.from_numpy(problem.clients.test[u])
        inputs, targets = problem.dataset.inputs(index, problem.dtype), problem.dataset.y[index]
        x_P = state.server.x_P
        arrival = Arrival(u, Down(x_P), model.start_R, keeps(problem, state, u))
        y_P = train(problem, state.round, arrival).y_P
        for name, parameters in (("before", x_P), ("after", y_P)):
            with torch.no_grad():
                output, _ = model.forward(parameters, model.start_R, inputs, mode="eval")
            total[name] += float((output.logits_BC.argmax(1) == targets).sum())
    row = evaluate.before(problem, state) | evaluate.after(problem, state)
    samples = problem.clients.test_sizes[7:].sum()
    for name, correct in total.items():
        assert row[f"unseen_{name}"] == pytest.approx(correct / samples)
    assert row["unseen_pooled"] == row["unseen_before"]
    assert len(row["unseen_before_clients"]) == 3


def test_a_personal_head_is_the_initial_one():
    problem = of("fedper")
    (arrival,) = arrivals(problem, ended(problem), np.array([8]))
    head = problem.model.layout.head
    y_P, _ = problem.method.begin(problem.ask(8, arrival.buffers_R, 2), arrival.down, arrival.kept.own)
    assert torch.equal(y_P[head], problem.model.start_P[head])
    assert not torch.equal(y_P[problem.model.layout.body], problem.model.start_P[problem.model.layout.body])


WITH_TABLES = ("fedncv", "fedncv-paper", "pfedsim", "pfedsim:warm_up=0", "fedadp", "fedavg+labels", "fedavg+memory")
OTHERS = {*METHODS, *(f"fedavg+{name}" for name in SWITCHES)} - {*WITH_TABLES}


@pytest.mark.parametrize(
    "method", [*WITH_TABLES, *(pytest.param(each, marks=pytest.mark.slow) for each in sorted(OTHERS))]
)
def test_every_method_has_a_message_and_a_state_for_them(method):
    """As for a client that was never drawn: the message is that of a client with the same standing."""
    quick = METHODS[method].quick if method in METHODS else ""
    problem = of(f"{method}:{quick}" if quick else method)
    state = start(problem)
    sent, statistics_SR = messages(problem, state, np.array([0, 9]))
    same = not problem.method.joining
    for name, leaf in leaves((sent, statistics_SR)):
        assert torch.equal(leaf[0], leaf[1]) or not same, name  # before the first round nobody is known
    ids = np.array([9])
    state, _ = run_round(problem, state)
    (arrival,) = arrivals(problem, state, ids)
    assert np.isfinite(evaluate.score_after(problem, state.round, arrival).total)


def test_clients_in_no_table_get_the_other_row():
    table, other = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([9.0, 9.0])
    assert rows_at(table, torch.tensor([1, 2, 7]), other).tolist() == [[3, 4], [9, 9], [9, 9]]
    assert rows_at(table[:, 0], torch.tensor([0, 2]), 5.0).tolist() == [1, 5]


def test_a_client_that_told_no_labels_gets_no_correction_from_them():
    problem = of("fedavg+labels:at=client")
    sent, _ = messages(problem, ended(problem), np.array([0, 8]))
    assert float(sent.e_P[1].abs().max()) < 1e-6 < float(sent.e_P[0].abs().max())


@pytest.mark.parametrize("engine", [pytest.param("processes", marks=pytest.mark.slow), "stacked", "streams"])
@pytest.mark.parametrize("more", [{}, pytest.param({"eval_clients": 2}, marks=pytest.mark.slow)])
def test_every_engine_scores_the_same(engine, more):
    settings = SETTINGS | {"metrics": ("f1_macro",), "dtype": "float64", "method": "fedncv", "probe": "every=2"} | more
    ours, theirs = (fedncv.simulate(**settings | {"engine": each}).rows for each in ("sequential", engine))
    for row, other in zip(ours, theirs, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            assert other[name] == pytest.approx(value, rel=1e-8), name
    assert "unseen_before_f1_macro" in ours[-1]


def test_two_seeds_in_a_stack_are_those_of_single_runs():
    settings = SETTINGS | {"dtype": "float64", "engine": "stacked", "method": "fedavg"}
    together = fedncv.simulate_many(seeds=[0, 1], **settings)
    for seed, result in enumerate(together):
        alone = fedncv.simulate(seed=seed, **settings)
        assert result.last["unseen_after_clients"] == pytest.approx(alone.last["unseen_after_clients"])


def test_a_sample_of_them_is_scored_if_a_sample_of_the_others_is():
    every = fedncv.simulate(method="fedavg", **SETTINGS)
    some = fedncv.simulate(method="fedavg", **SETTINGS | {"eval_clients": 2})
    first = some.rows[0]
    assert (first["unseen"], first["scored_of"], first["unseen_scored_of"]) == (3, 7, 3)
    ids = first["unseen_scored_clients"]
    assert set(ids) < {7, 8, 9}
    assert some.last["unseen_after_clients"] == [every.last["unseen_after_clients"][u - 7] for u in ids]
    assert some.last["unseen_after_standard_error"] is not None
    assert "unseen_scored_clients" not in every.rows[0]


def test_a_stopped_run_with_a_stream_is_resumed_with_the_same_bytes(tmp_path):
    settings = SETTINGS | {"rounds": 4, "checkpoint_every": 2, "method": "fedncv", "stream": "arrivals:start=0.5"}
    fedncv.simulate(out=tmp_path / "whole", **settings)

    def stop(row, run):
        if row["round"] == 3:
            run.stop("enough")

    fedncv.simulate(out=tmp_path / "stopped", on_round=stop, **settings)
    fedncv.resume(tmp_path / "stopped", progress=False)
    for name in ("metrics.jsonl", "state.safetensors"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unseen": 1.0}, r"^unseen must be at least 0 and below 1, not 1.0$"),
        ({"unseen": 0.01}, r"^unseen is 0.01, which is no client of 10; use at least 0.1 and less than 1$"),
        ({"unseen": 0.99}, "which is all clients of 10"),
        ({"per_round": 8}, r"^per_round is 8, but with unseen 0.3 only 7 of 10 clients train"),
    ],
)
def test_a_share_that_cannot_be_is_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message):
        of("fedavg", **changes)


def test_a_method_with_a_table_that_ends_before_them_is_refused():
    def init(x_P, federation):
        return x_P.new_zeros(federation.num_clients, 1) + x_P

    mine = fedavg()._replace(init=init, broadcast=lambda x_NP, ids_S: Down(x_NP[ids_S]), shared=lambda x_NP: x_NP[0])
    with pytest.raises(ValueError, match=r"unseen is 0.3, but .* has no message for a client that never trains"):
        fedncv.simulate(method=mine, **SETTINGS)


def test_tables_and_the_page_have_columns_for_them(tmp_path, capsys):
    words = ["--model", "mlp", "--clients", "10", "--per-round", "3", "--rounds", "2", "--epochs", "1", "--unseen"]
    out = tmp_path / "study"
    assert main(["study", "smoke", *words, "0.3", "--methods", "fedavg", "--seeds", "2", "--out", str(out)]) == 0
    assert "unseen after" in capsys.readouterr().out
    results = gather(out)
    table = main_table(results)
    runs = [read_run(out / "digits" / f"fedavg-seed{seed}") for seed in (0, 1)]
    mean = 100 * sum(run.last("unseen_after") for run in runs) / 2
    assert table.entries["digits", "unseen_after", "fedavg"].ours.mean == pytest.approx(mean)
    assert "Digits after, unseen" in to_markdown(table)
    assert ",unseen_before,fedavg," in to_csv(table)
    assert "{l|cccc}" in to_latex(table)
    prior = results.columns[0].prior("unseen_before")
    assert prior == pytest.approx(sum(run.rows[0]["unseen_label_prior"] for run in runs) / 2)
    assert main(["report", str(out)]) == 0
    assert "before, unseen" in (out / "report.html").read_text()
    assert main(["study", "smoke", *words, "0.2", "--methods", "fedavg", "--seeds", "2", "--out", str(out)]) == 2
    assert "unseen 0.3 → 0.2" in capsys.readouterr().err
    assert len(by_method([*runs, runs[0]._replace(config=RunConfig(**vars(runs[0].config) | {"unseen": 0.2}))])) == 2
