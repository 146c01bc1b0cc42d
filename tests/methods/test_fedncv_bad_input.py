"""FedNCV in all its forms where a federation goes wrong: numbers, no NaN in the model, and who is left out is named."""

import numpy as np
import pytest
import torch
from federations import Tiny, everyone, train
from torch import nn

from fedncv.config import RunConfig
from fedncv.data import Clients, Dataset
from fedncv.engine import evaluate
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import DivergedError, arrivals, build, start
from fedncv.engine.sequential import run_round
from fedncv.engine.stacked import StackedEngine
from fedncv.methods import find_method
from fedncv.tree import all_finite, leaves

MEMORIES = ("", "+memory", "+memory:beta=learned")
DRIFTS = ("drift=off", "drift=on", "drift.alpha=learned")
FORMS = [
    "fedncv",
    *(f"fedncv:{drift}{memory}" for memory in MEMORIES for drift in DRIFTS),
    "fedncv:even=off,drift=off,prior=off,momentum=off",
    "fedncv+memory:beta=1+ht",
    "fedncv:drift.alpha=learned,drift.rate=1+memory:beta=learned,forget=0+ht",
    "fedncv:drift.alpha=learned,blend=0.5,prior.epsilon=1e-6+memory:unseen=zero",
    "fedncv+memory:beta=learned+samples",
    "fedncv:even=off,prior=2+samples:kind=svrg",
    "fedncv-sums",
    "fedncv-sums:drift=off,even=off,prior=off,momentum=off",
    "fedncv-sums:drift=0.5,prior.epsilon=1e-6,momentum=0.9",
    "fedncv-paper",
    "fedncv-paper:sampling=likelihood,alpha=1,gamma=0.5",
    "fedncv-paper:alpha=0,gamma=0",
]
every_form = pytest.mark.parametrize("form", FORMS)


def linear(shape, num_classes):
    return nn.Linear(shape[0], num_classes)


class Hard:
    """Clients of one sample, of one class, of two; class 3 is nowhere but in one client's test."""

    labels = ((0,), (1,) * 6, (0, 0, 2, 2, 2), (2, 1, 2))
    test = ((0,), (1, 1), (0, 3), (1,))


class Alone:
    labels, test = ((0, 1, 1, 2, 2),), ((0, 2),)


class One:
    """A federation of a single sample."""

    labels, test = ((1,),), ((1,),)


def federation(form, what=Hard, *, model=linear, lost=None, **config):
    """Everybody in every round; the samples of the client ``lost`` are not numbers."""
    rng = np.random.default_rng(0)
    parts = [np.array(labels) for pair in zip(what.labels, what.test, strict=True) for labels in pair]
    y = np.concatenate(parts)
    x = torch.from_numpy(rng.normal(size=(len(y), 4))) + torch.from_numpy(y)[:, None]
    rows = np.split(np.arange(len(y)), np.cumsum([len(part) for part in parts])[:-1])
    settings = {"rounds": 10, "batch_size": 4, "epochs": 2, "lr": 0.1, "dtype": "float64"}
    num_clients = len(what.labels)
    problem = build(
        RunConfig(clients=num_clients, per_round=num_clients, **(settings | config)),
        data=Dataset("hard", x, torch.from_numpy(y), 4),
        clients=Clients(rows[::2], rows[1::2]),
        model=model,
        method=find_method(form),
    )
    if lost is not None:  # after the check of the data, which refuses them
        problem.dataset.x[rows[2 * lost]] = float("nan")
    return problem


def check_numbers(problem, state):
    assert all_finite(tuple(leaf for _, leaf in leaves(state)))
    for measure in (evaluate.before, evaluate.after):
        scores = measure(problem, state)
        assert 0 <= next(iter(scores.values())) <= 1
    if (shared_P := problem.method.shared(state.server)) is not None:
        assert torch.isfinite(shared_P).all()


@every_form
@pytest.mark.parametrize("what", [Hard, Alone, One])
def test_one_sample_one_class_a_class_never_seen_and_one_client(form, what):
    problem = federation(form, what)
    state = train(problem, rounds=2)
    assert state.totals.samples > 0
    check_numbers(problem, state)


@every_form
def test_a_class_that_a_client_never_saw_is_unlikely_to_it_not_impossible(form):
    """Class 3 is in a test alone: log 0 as its prior would rule it out, whatever the model says."""
    problem = federation(form)
    state = train(problem)
    for arrival in arrivals(problem, state, np.arange(4)):
        trained = train_client(problem, state.round, arrival)
        ask = problem.ask(arrival.client, arrival.buffers_R, state.round)
        offset_C = problem.method.predict(ask, trained.y_P, arrival.down, trained.kept.own).offset_C
        assert offset_C is None or torch.isfinite(offset_C).all()


@every_form
def test_a_client_too_small_for_batch_norm_is_no_part_of_anything(form):
    """One sample makes no step: no reply, no row of memory, and the others are as if it had not been asked."""
    problem = federation(form, model=Tiny)
    state, row = run_round(problem, start(problem))
    assert row["asked"] == 4
    assert row["replies"] == 3
    others, _ = run_round(problem, start(problem), everyone(1, 2, 3))
    same_server(state, others)
    check_numbers(problem, train(problem, rounds=2))


def same_server(state, other):
    for (path, a), (_, b) in zip(leaves(state.server), leaves(other.server), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, path
    assert state.kept.keys() == other.kept.keys()


@every_form
def test_a_client_whose_numbers_are_lost_is_left_out_counted_and_named(form):
    """The server is, to the last bit, what it would be if the client had not answered."""
    problem = federation(form, lost=2, diverged="skip")
    state, row = run_round(problem, start(problem))
    assert row["skipped"] == [2]
    assert row["replies"] == 3
    silent = everyone(0, 1, 2, 3)._replace(answers=[True, True, False, True])
    same_server(state, run_round(problem, start(problem), silent)[0])
    for rows in (getattr(state.server, name, {}) for name in ("h", "c", "alpha")):
        assert 2 not in rows
    assert all_finite(tuple(leaf for _, leaf in leaves(train(problem, rounds=2, state=state))))


@every_form
def test_unless_told_otherwise_a_client_whose_numbers_are_lost_stops_the_run_by_name(form):
    with pytest.raises(DivergedError, match="client 2 diverged in round 1"):
        train(federation(form, lost=2))


@pytest.mark.parametrize("form", [*FORMS[2:10], "fedncv-sums"])
def test_what_was_remembered_of_a_client_outlives_its_lost_numbers(form):
    """Known before the draw, so as good a control variate as ever: only the reply is dropped."""
    good, bad = federation(form), federation(form, lost=2, diverged="skip")
    before = train(good)
    after, row = run_round(bad, before)
    assert row["skipped"] == [2]
    assert any(leaf.any() for _, leaf in leaves(remembered(before, 2)))
    for (path, a), (_, b) in zip(leaves(remembered(before, 2)), leaves(remembered(after, 2)), strict=True):
        assert torch.equal(a, b), path


def remembered(state, client):
    """At the server and at the client itself."""
    rows = {path: leaf for path, leaf in leaves(state.server) if path.endswith(f".{client}")}
    return rows | {"own": state.kept[client].own}


@every_form
def test_stacked_clients_go_wrong_alike(form):
    problem = federation(form, model=Tiny, lost=2, diverged="skip")
    state, row = run_round(problem, start(problem))
    ((stacked, stacked_row),) = StackedEngine([problem]).run_rounds([start(problem)])
    assert stacked_row["skipped"] == row["skipped"] == [2]
    for (path, a), (_, b) in zip(leaves(stacked.server), leaves(state.server), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=path)


@every_form
def test_nobody_whose_numbers_are_right_leaves_the_server_as_it_is(form):
    problem = federation(form, Alone, lost=0, diverged="skip")
    state, row = run_round(problem, start(problem))
    assert (row["replies"], row["skipped"], row["loss"]) == (0, [0], None)
    same_server(state, start(problem))
