"""Poisson sampling: each client by itself, cohorts of changing size, sometimes nobody, on every engine."""

import math
import sys

import numpy as np
import pytest
from agreement import close, close_rows, runs
from fake_ray import FakeRay
from federations import tiny
from torch import nn

from fedncv.cluster import pool
from fedncv.engine import ray_engine, sampling
from fedncv.engine.problem import start
from fedncv.engine.processes import ProcessesEngine, can_fork
from fedncv.engine.round import draw
from fedncv.engine.sequential import run_round
from fedncv.engine.stacked import StackedEngine
from fedncv.keys import generator, key_for, uniform_at
from fedncv.observatory.errors import draws_of
from fedncv.observatory.everyone import everyone

SIZES = (12, 5, 9, 18)
METHODS = ["fedavg", "scaffold+dp:clip=0.5,noise=0.1,control=0.2"]


def linear(shape, num_classes):
    return nn.Linear(shape[0], num_classes)


def problem(method="fedavg", **config):
    return tiny(method, sizes=SIZES, model=linear, sampling="poisson", **{"per_round": 1} | config)


def test_a_client_is_drawn_if_its_own_number_is_below_the_share():
    """The numbers are keyed by seed and round, so that a client's draw says nothing about another's."""
    here = problem(seed=3)
    for t in range(20):
        key = key_for(3, "clients", t)
        assert draw(here, t).ids.tolist() == [u for u in range(4) if uniform_at(key, u) < 1 / 4]


def test_the_draws_have_the_law_of_independent_clients():
    """10,000 rounds of 20 clients with share 0.15: each count, the size and each pair within five deviations."""
    rounds, n, q = 10_000, 20, 0.15
    in_RN = np.zeros((rounds, n))
    for t in range(rounds):
        in_RN[t, sampling.draw_poisson(generator(0, "clients", t), n, 3)] = 1
    assert (abs(in_RN.mean(0) - q) < 5 * math.sqrt(q * (1 - q) / rounds)).all()
    size_R = in_RN.sum(1)
    assert abs(size_R.mean() - n * q) < 5 * math.sqrt(n * q * (1 - q) / rounds)
    assert size_R.var() == pytest.approx(n * q * (1 - q), rel=0.08)
    assert abs((size_R == 0).mean() - (1 - q) ** n) < 5 * math.sqrt((1 - q) ** n / rounds)
    pairs_NN = in_RN.T @ in_RN / rounds
    off = ~np.eye(n, dtype=bool)
    assert (abs(pairs_NN[off] - q * q) < 5 * math.sqrt(q * q / rounds)).all()


def test_everybody_is_drawn_if_all_are_expected():
    assert all(len(draw(problem(per_round=4), t).ids) == 4 for t in range(5))
    assert problem(per_round=3).inclusion_N.tolist() == [0.75] * 4


def rounds_with_nobody(here, most):
    return [t for t in range(most) if not len(draw(here, t).ids)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["stacked", "streams"])
def test_cohorts_of_all_sizes_on_stacked_engines(method, way):
    """One expected client of four: rounds of nobody, of one and of more than one, which do not fit in at a time."""
    here = problem(method)
    sizes = {len(draw(here, t).ids) for t in range(8)}
    assert {0, 1, 2} <= sizes
    state, engine = start(here), StackedEngine([here], way=way)
    got, rows = runs(engine, 8)
    for t in range(8):
        state, row = run_round(here, state)
        close_rows(rows[t][0], row)
    close(got[0], state)


@pytest.mark.parametrize("method", METHODS)
def test_some_runs_of_a_stack_ask_nobody_and_others_somebody(method):
    both = [problem(method, seed=seed) for seed in (0, 1)]
    assert rounds_with_nobody(both[0], 6) != rounds_with_nobody(both[1], 6)
    states, engine = [start(each) for each in both], StackedEngine(both)
    got, _ = runs(engine, 6)
    for _ in range(6):
        states = [run_round(each, state)[0] for each, state in zip(both, states, strict=True)]
    for mine, theirs in zip(got, states, strict=True):
        close(mine, theirs)


@pytest.mark.skipif(not can_fork(), reason="workers are forked")
def test_cohorts_of_all_sizes_on_processes():
    here = problem(METHODS[1])
    state, mine = start(here), [start(here)]
    with ProcessesEngine([here], workers=2) as engine:
        for _ in range(6):
            ((mine_state, mine_row),) = engine.run_rounds(mine)
            state, row = run_round(here, state)
            mine = [mine_state]
            assert mine_row == row
    close(mine[0], state, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_cohorts_of_all_sizes_on_workers_that_send_sums(method, monkeypatch):
    fake = FakeRay(2)
    monkeypatch.setitem(sys.modules, "ray", fake)
    for name in ("connect", "close"):
        monkeypatch.setattr(ray_engine.connect, name, lambda *_, **__: None)
    monkeypatch.setattr(pool, "TICK", 1e-9)
    here = problem(method, engine="ray", block=2)
    state = start(here)
    with ray_engine.RayEngine([here]) as engine:
        got, rows = runs(engine, 6)
    for t in range(6):
        state, row = run_round(here, state)
        close_rows(rows[t][0], row)
    close(got[0], state)


def test_an_empty_round_changes_nothing_without_noise():
    here = problem()
    t = rounds_with_nobody(here, 20)[0]
    state = start(here)._replace(round=t)
    after, row = run_round(here, state)
    assert (row["asked"], row["replies"], row["bytes_down"]) == (0, 0, 0)
    close(after.server, state.server, atol=0)


def test_the_observatory_draws_as_the_run_does():
    """Cohorts of changing size; those without an answer are left out."""
    from fedncv.engine.sequential import SequentialEngine

    here = problem(per_round=2)
    (answers,) = everyone(SequentialEngine([here]), [start(here)])
    in_DN = draws_of(here, start(here), answers, num_draws=4000).in_DN
    expected = 0.5 / (1 - 0.5**4)  # given that somebody answers
    assert in_DN.mean(0).tolist() == pytest.approx([expected] * 4, abs=0.05)
    assert set(in_DN.sum(1).tolist()) == {1.0, 2.0, 3.0, 4.0}
