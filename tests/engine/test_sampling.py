"""Draws of clients: inclusion probabilities by enumeration, not by counting draws."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedncv.config import RunConfig
from fedncv.engine import sampling
from fedncv.engine.problem import build
from fedncv.engine.round import draw
from fedncv.engine.sampling import (
    available_inclusion,
    draw_available,
    draw_systematic,
    draw_uniform,
    systematic,
    uniform_inclusion,
    weighted_inclusion,
)
from fedncv.keys import generator

sizes = st.lists(st.integers(1, 1000), min_size=1, max_size=12)


def rng(seed=0):
    return np.random.default_rng(seed)


def test_uniform_draws_are_sorted_distinct_and_of_the_right_size():
    for seed in range(20):
        ids = draw_uniform(rng(seed), 10, 4)
        assert len(set(ids)) == 4
        assert (np.diff(ids) > 0).all()
    assert np.array_equal(uniform_inclusion(10, 4), np.full(10, 0.4))


@settings(deadline=None)
@given(sizes, st.data())
def test_weighted_inclusion_is_proportional_up_to_certainty(n_u, data):
    m = data.draw(st.integers(1, len(n_u)))
    n_u = np.array(n_u, dtype=float)
    pi = weighted_inclusion(n_u, m)
    assert pi.sum() == pytest.approx(m)
    assert ((pi > 0) & (pi <= 1)).all()
    uncertain = pi < 1
    if uncertain.any():
        ratio = pi[uncertain] / n_u[uncertain]
        assert ratio == pytest.approx(ratio[0])
        assert (n_u[~uncertain] * ratio[0] >= 1 - 1e-9).all()


@settings(deadline=None)
@given(sizes, st.data())
def test_systematic_draws_have_exactly_their_inclusion_probabilities(n_u, data):
    """The draw is constant between the breakpoints of v: integrate over the pieces."""
    m = data.draw(st.integers(1, len(n_u)))
    pi = weighted_inclusion(np.array(n_u, dtype=float), m)
    breaks = np.unique(np.concatenate([[0.0, 1.0], np.cumsum(pi) % 1]))
    included = np.zeros(len(pi))
    for low, high in pairwise(breaks):
        if high - low > 1e-12:
            ids = systematic(pi, (low + high) / 2)
            assert len(ids) == m
            included[ids] += high - low
    assert included == pytest.approx(pi, abs=1e-9)


def test_a_systematic_draw_has_a_fixed_size():
    pi = weighted_inclusion(np.array([100.0, 1, 1, 1, 5]), 2)
    for seed in range(50):
        ids = draw_systematic(rng(seed), pi)
        assert len(ids) == 2
        assert 0 in ids


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from([0.1, 0.5, 0.75, 1.0]), min_size=1, max_size=7), st.data())
def test_available_inclusion_equals_the_sum_over_all_sets_of_reachable_clients(rates, data):
    m = data.draw(st.integers(1, len(rates)))
    rates = np.array(rates)
    expected = np.zeros(len(rates))
    for up in product([0, 1], repeat=len(rates)):
        up = np.array(up)
        if up.any():
            expected += np.prod(np.where(up, rates, 1 - rates)) * up * min(1, m / up.sum())
    assert available_inclusion(rates, m) == pytest.approx(expected, abs=1e-12)


def test_available_inclusion_in_pieces_is_the_same():
    """3000 clients are more than one chunk of frequencies."""
    rates = np.linspace(0.2, 1, 3000)
    pi = available_inclusion(rates, 10)
    assert pi.sum() == pytest.approx(10)  # at least ten are reachable, always
    assert (np.diff(pi) > 0).all()


def test_available_draws_hold_only_the_reachable():
    rates = np.array([0.0001, 1, 1, 0.0001, 1])
    assert set(draw_available(rng(), rates, 3)) == {1, 2, 4}
    assert len(draw_available(rng(), rates, 2)) == 2
    assert len(draw_available(rng(), np.full(3, 1e-9), 2)) == 0


@pytest.mark.parametrize(("m", "lowest"), [(1, 0.5), (10, 0.5), (60, 0.9), (40, 0.2)])
def test_the_integral_for_many_clients_is_the_sum_over_all_numbers_of_reachable_ones(m, lowest):
    """1,500 clients, of whom at least m are always reachable: two ways to the same probabilities."""
    rates = np.linspace(lowest, 1.0, 1_500)
    by_sum, by_integral = sampling._by_fourier(rates, m), sampling._by_integral(rates, m)
    np.testing.assert_allclose(by_integral, by_sum, rtol=1e-9)
    assert by_integral.sum() == pytest.approx(m, rel=1e-12)  # m clients are drawn


def test_a_million_clients_can_be_available(monkeypatch):
    monkeypatch.delattr(sampling, "_by_fourier")  # would take hours
    assert sampling.available_inclusion(np.linspace(0.5, 1.0, 1_000_000), 100).sum() == pytest.approx(100)


@pytest.mark.parametrize("chance", [{"dropout": 0.4}, {"stragglers": 0.6}, {"dropout": 0.3, "stragglers": 1.0}, {}])
def test_dropouts_and_stragglers_are_those_of_draws_for_all_clients(chance):
    """The numbers of the drawn clients, read at their places, are those of an array for everybody."""
    config = RunConfig(clients=50, per_round=20, partition="iid", model="mlp", seed=3, **chance)
    problem = build(config)
    for t in range(3):
        drawn = draw(problem, t)
        lost = generator(3, "dropout", t).random(50) < config.dropout
        slow = generator(3, "stragglers", t).random((2, 50))
        shares = np.where(slow[0] < config.stragglers, slow[1], 1.0)
        assert drawn.answers == [not lost[u] for u in drawn.ids]
        assert drawn.shares == [float(shares[u]) for u in drawn.ids]


def test_clients_of_a_very_large_federation_are_drawn_without_a_permutation_of_all():
    """Distinct, in order, uniform: 4,000 draws of 50 put 20,000 clients in each tenth, within 5 sigma."""
    num_clients, tenths = 2_000_000, np.zeros(10)
    for seed in range(4000):
        ids = draw_uniform(rng(seed), num_clients, 50)
        assert len(np.unique(ids)) == 50
        assert (np.diff(ids) > 0).all()
        tenths += np.bincount(ids * 10 // num_clients, minlength=10)
    assert np.abs(tenths - 20_000).max() < 5 * np.sqrt(200_000 * 0.1 * 0.9)
