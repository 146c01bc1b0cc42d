"""The pieces of partitions against their slow, obvious versions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedncv import keys
from fedncv.data import Dataset, owners_note
from fedncv.data.owners import draw_classes, fill, grouped, order_by, rank, serve

small = settings(deadline=None, max_examples=60)


@small
@given(st.lists(st.integers(0, 5), max_size=40))
def test_counting_is_a_stable_sort(values):
    array = np.array(values, dtype=np.int64)
    assert np.array_equal(order_by(array, 6), np.argsort(array, kind="stable"))


@small
@given(st.lists(st.integers(0, 5), max_size=40))
def test_rank_counts_the_equals_before(values):
    assert rank(np.array(values, dtype=np.int64), 6).tolist() == [values[:i].count(v) for i, v in enumerate(values)]


@small
@given(st.integers(0, 10_000))
def test_filling_moves_as_few_samples_as_possible_and_takes_only_what_can_be_spared(seed):
    random = np.random.default_rng(seed)
    n, num_clients = 60, int(random.integers(1, 12))
    owner = random.integers(0, num_clients, n) % random.integers(1, num_clients + 1)
    labels, minimum = random.integers(0, 3, n), int(random.integers(1, n // num_clients + 1))
    before = np.bincount(owner, minlength=num_clients)
    parts = fill(owner, labels, num_clients, minimum, random, np.ones((num_clients, 3)))
    after = np.array([len(part) for part in parts])
    new_owner = np.empty(n, dtype=np.int64)
    for client, part in enumerate(parts):
        new_owner[part] = client
    assert parts.moved == (minimum - before).clip(min=0).sum() == (new_owner != owner).sum()
    assert (after >= minimum).all()
    assert (after[before <= minimum] == minimum).all()


def test_who_asks_for_a_class_that_ran_out_is_served_by_its_next_wish():
    """Three clients want class 0 first and class 1 next; class 2 stays where it is not asked for."""
    labels = np.repeat([0, 1, 2], [4, 10, 10])
    owner = np.full(24, -1)
    wish = np.array([[1.0, 1e-9, 0.0]] * 3)
    serve(owner, np.array([3, 3, 3]), wish, np.arange(24), labels, keys.generator(0, "test"))
    assert [np.bincount(labels[owner == u], minlength=3).sum() for u in range(3)] == [3, 3, 3]
    assert (owner[labels == 0] >= 0).all()
    assert (owner[labels == 2] == -1).all()


def test_classes_are_drawn_in_proportion_to_the_weights_and_never_with_weight_zero():
    weight = np.array([[0.0, 3.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    drawn = draw_classes(weight, np.array([40_000, 10]), keys.generator(0, "test"))
    share = np.bincount(drawn[:40_000], minlength=4) / 40_000
    assert abs(share[1] - 0.75) < 5 * np.sqrt(0.75 * 0.25 / 40_000)
    assert share[0] == share[3] == 0
    assert (drawn[40_000:] == 0).all()


def test_grouped_arrays_are_those_of_a_list():
    """Every access gives what a list of the same arrays gives, also for clients without samples."""
    arrays = [np.array(part, dtype=np.int64) for part in ([4, 7], [], [5], [9, 1, 2], [])]
    one = grouped(arrays)
    assert grouped(one) is one
    assert one.sizes.tolist() == [2, 0, 1, 3, 0]
    assert [part.tolist() for part in one] == [part.tolist() for part in arrays]
    assert one[-2].tolist() == [9, 1, 2]
    assert [part.tolist() for part in one[1:4]] == [part.tolist() for part in arrays[1:4]]
    assert [part.tolist() for part in one.only(np.array([3, 1, 0]))] == [[9, 1, 2], [], [4, 7]]
    with pytest.raises(IndexError):
        one[5]
    assert len(grouped([])) == 0


def test_owners_that_are_not_the_clients_are_told():
    data = Dataset(
        "shops", torch.zeros(6, 2), torch.zeros(6, dtype=torch.int64), 2, owners=torch.tensor([0, 0, 1, 1, 2, 2])
    )
    assert owners_note(data, "natural", 3) == ""
    assert owners_note(data, "natural:min_samples=1", 2) == (
        "note: 3 owners are merged into 2 clients; --clients 3 keeps each apart"
    )
    assert "--partition natural makes the owners the clients" in owners_note(data, "iid", 3)
    assert owners_note(data._replace(owners=None), "iid", 3) == ""
