"""The per-client split: complete, disjoint, keyed by client, never without a training sample."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedncv import keys
from fedncv.data import split


def parts_of(sizes):
    return np.split(np.random.default_rng(0).permutation(sum(sizes)), np.cumsum(sizes)[:-1])


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    share=st.floats(0, 0.99),
    seed=st.integers(0, 2**40),
)
def test_train_and_test_are_a_client_s_samples_and_neither_is_missing(sizes, share, seed):
    parts = parts_of(sizes)
    clients = split(parts, share, seed)
    for part, train, test in zip(parts, clients.train, clients.test, strict=True):
        assert sorted([*train, *test]) == sorted(part)
        assert train.dtype == test.dtype == np.int64
        assert (np.diff(train) > 0).all()
        assert (np.diff(test) > 0).all()
        assert len(train) >= 1
        assert len(test) >= (len(part) >= 2 and share > 0)
        assert share > 0 or len(test) == 0
    assert clients.sizes.tolist() == [len(train) for train in clients.train]


def test_a_quarter_is_for_testing():
    clients = split(parts_of([100, 40, 10, 4]), 0.25, 0)
    assert [len(test) for test in clients.test] == [25, 10, 3, 1]  # 2.5 is rounded up


def test_all_at_once_equals_one_keyed_permutation_a_client():
    parts = parts_of([7, 1, 12, 30])
    clients = split(parts, 0.25, 5)
    for u, part in enumerate(parts):
        order = keys.permutation(keys.key_for(5, "split", 0, u), len(part)).numpy()
        assert sorted(np.sort(part)[order[: len(clients.test[u])]]) == clients.test[u].tolist()


def test_a_client_s_split_depends_on_no_other_client():
    parts = parts_of([20, 20, 20])
    whole, other = split(parts, 0.25, 1), split([parts[0], parts[1][:3], parts[2]], 0.25, 1)
    assert np.array_equal(whole.test[0], other.test[0])
    assert np.array_equal(whole.test[2], other.test[2])


def test_every_sample_is_tested_equally_often():
    """Over 2,000 seeds each of 8 samples is among the 2 for testing a quarter of the time (5 deviations)."""
    part = [np.arange(8)]
    hits = np.bincount(np.concatenate([split(part, 0.25, seed).test[0] for seed in range(2_000)]), minlength=8)
    assert np.abs(hits / 2_000 - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / 2_000)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_outside_its_range_is_refused(share):
    with pytest.raises(ValueError, match=f"test_share is {share}"):
        split(parts_of([5]), share, 0)


def test_an_empty_client_is_named():
    with pytest.raises(ValueError, match="client 1 has no samples"):
        split([np.array([0]), np.array([], dtype=np.int64)], 0.25, 0)
    with pytest.raises(ValueError, match="no clients"):
        split([], 0.25, 0)
