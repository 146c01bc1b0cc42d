"""Runs with learning rates, schedules, partitions and draws of their own, in one stack: each as if alone."""

import math

import pytest
import torch
from agreement import HARD, QUICK, close, close_rows, runs
from federations import FULL_FEDNCV, tiny
from torch import nn

from fedncv.engine import evaluate, stacked_scores
from fedncv.engine.choose import OWN, common, engine_for
from fedncv.engine.problem import DivergedError, start
from fedncv.engine.sequential import run_round
from fedncv.engine.stacked import StackedEngine
from fedncv.methods import METHODS
from fedncv.runner import LiveRun, train
from fedncv.tasks import TASKS
from fedncv.tree import leaves

FEW = ("scaffold", FULL_FEDNCV, "fedper", "fednova")
few_methods = pytest.mark.parametrize(
    "name",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in [*METHODS, FULL_FEDNCV]],
)
OTHER_PARTITION = {"sizes": (9, 31, 20, 1, 18)}  # of the same samples
APART = (
    {"lr": 0.1},
    {"lr": 0.02},  # the same seed: the same clients and batches
    {"lr": 0.3, "schedule": "exponential:decay=0.5"},
    {"lr": 0.05, "seed": 5, "stragglers": 0.0, "dropout": 0.0, "sampling": "weighted", **OTHER_PARTITION},
)


def problems(name, **settings):
    return [tiny(QUICK.get(name, name), **HARD | {"epochs": 2} | settings | own) for own in APART]


def each_is_as_alone(made, rounds=3):
    engine = StackedEngine(made, capacity=7)  # some groups hold clients of several runs
    together, rows = runs(engine, rounds)
    measured = [f(engine, together) for f in (stacked_scores.before, stacked_scores.after)]
    for j, problem in enumerate(made):
        state = start(problem)
        for t in range(rounds):
            state, row = run_round(problem, state)
            close_rows(rows[t][j], row)
        close(together[j], state)
        assert [each[j] for each in measured] == [f(problem, state) for f in (evaluate.before, evaluate.after)]
    sums = [sum(float(leaf.sum()) for _, leaf in leaves(state.server) if torch.is_tensor(leaf)) for state in together]
    return {(row["loss"], each) for row, each in zip(rows[-1], sums, strict=True)}  # local's server never changes


@few_methods
def test_runs_stacked_together_are_as_alone(name):
    """The sequential engine, a run at a time, is the second way to every number; float64, 1e-10."""
    assert len(each_is_as_alone(problems(name))) == len(APART)


@pytest.mark.parametrize("name", [pytest.param("scaffold", marks=pytest.mark.slow), "fat_clipping_pr:clip=2"])
def test_so_are_runs_without_momentum(name):
    """A round is clipped by its length over the learning rate of its own run."""
    each_is_as_alone(problems(name, momentum=0.0))


def test_a_learning_rate_that_diverges_stops_its_own_run_only():
    made = [tiny("fedavg", lr=lr, rounds=2) for lr in (0.1, 1e200)]
    first, second = StackedEngine(made).run_rounds([start(problem) for problem in made])
    assert isinstance(second, DivergedError)
    assert "at lr 1e+200" in str(second)
    close(first[0], run_round(made[0], start(made[0]))[0])


@pytest.mark.parametrize("name", ["fedper", FULL_FEDNCV])
def test_some_runs_go_on_with_the_engine_of_all(name):
    """As an engine of their own would; also from the start, so that all that clients begin with is seen."""
    made, some = problems(name), [1, 3]
    engine = StackedEngine(made)
    first, _ = runs(engine, 1)
    second, _ = runs(engine.only(some), 1, [first[j] for j in some])  # the round that was planned for all
    close(tuple(second), tuple(run_round(made[j], first[j])[0] for j in some))
    ours, rows = runs(engine.only(some), 3)
    theirs, their_rows = runs(StackedEngine([made[j] for j in some]), 3)
    close(tuple(ours), tuple(theirs))
    for a, b in zip(rows[-1], their_rows[-1], strict=True):
        close_rows(a, b)
    scores = [evaluate.before(made[j], state) for j, state in zip(some, ours, strict=True)]
    assert stacked_scores.before(engine.only(some), ours) == scores


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_a_score_that_is_not_finite_stops_its_own_run_only(engine):
    """Scores are infinite where a logit is above 1,000, which the second learning rate alone leads to."""
    task = TASKS["classification"]._replace(
        score=lambda logits, _: torch.where(logits.abs().amax(-1) > 1e3, math.inf, 1.0).double()
    )
    made = [tiny("fedavg", lr=lr, rounds=2, engine=engine)._replace(task=task) for lr in (0.1, 1e5)]
    live, seen = [LiveRun(problem, start(problem)) for problem in made], []
    with pytest.raises(DivergedError, match="scores inf"):
        train(live, on_round=lambda run, row: seen.append((run.problem.config.lr, row["round"])))
    assert [run.state.round for run in live] == [2, 1]
    assert seen == [(0.1, 0), (1e5, 0), (0.1, 1), (1e5, 1), (0.1, 2)]
    assert live[0].rows[-1]["after"] == 1.0


class RandomFeatures(nn.Module):
    """A linear model of features that are drawn with the seed and never trained."""

    def __init__(self, shape, outputs):
        super().__init__()
        self.register_buffer("w", torch.randn(shape[0], 6, dtype=torch.float64))
        self.head = nn.Linear(6, outputs)

    def forward(self, x):
        return self.head(torch.cos(x @ self.w))


def test_models_whose_seeds_draw_other_buffers_are_not_one_stack(capsys):
    """As a stack all runs would have the first one's features; runs of one seed have the same."""
    made = [tiny("fedavg", model=RandomFeatures, seed=seed, engine="stacked") for seed in (0, 1)]
    engine = engine_for(made)
    assert "the model draws frozen weights or buffers from its seed" in capsys.readouterr().err
    for problem, settled in zip(made, engine.run_rounds([start(problem) for problem in made]), strict=True):
        close(settled[0], run_round(problem, start(problem))[0])
    StackedEngine([tiny("fedavg", model=RandomFeatures, lr=lr) for lr in (0.1, 0.2)])


@pytest.mark.parametrize("field", ["lr", "epochs", "momentum"])
def test_runs_of_another_shape_are_refused(field):
    """A learning rate is a run's own; epochs and momentum are not."""
    made = [tiny("fedavg"), tiny("fedavg", **{field: {"lr": 0.2, "epochs": 3, "momentum": 0.5}[field]})]
    if field in OWN:
        engine_for(made).close()
        return
    with pytest.raises(ValueError, match=r"may differ in partition, .*, lr, .*, seed only"):
        engine_for(made)


def test_what_runs_have_in_common_leaves_their_own_settings_out():
    a, b = (tiny("fedavg", **own).config for own in ({"lr": 0.1, "seed": 3}, {"lr": 0.2, "partition": "iid"}))
    assert a != b
    assert common(a) == common(b)
    assert common(tiny("fedavg", rounds=9).config) != common(a)
