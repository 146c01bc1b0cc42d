"""Statistics of a federation small enough to do on paper."""

import numpy as np
import pytest
import torch

from fedncv.data import Clients, Dataset, holdings, label_counts, prior_accuracy, statistics

LABELS = np.array([0, 0, 0, 1, 1, 1, 2, 2])
PARTS = [np.array([0, 1, 2, 3]), np.array([4, 5]), np.array([6, 7])]


def test_counts_entropy_and_distance():
    stats = statistics(LABELS, PARTS, 3)
    assert stats.counts.tolist() == [[3, 1, 0], [0, 2, 0], [0, 0, 2]]
    assert stats.sizes.tolist() == [4, 2, 2]
    first = -(0.75 * np.log2(0.75) + 0.25 * np.log2(0.25))
    assert stats.entropy == pytest.approx([first, 0, 0])
    # pool (3, 3, 2)/8; half the sum of |q - pool|
    assert stats.distance == pytest.approx([3 / 8, 5 / 8, 6 / 8])
    assert stats.moved == 0


def test_clients_like_the_pool_have_full_entropy_and_no_distance():
    stats = statistics(np.arange(12) % 4, [np.arange(4), np.arange(4, 12)], 4)
    assert stats.entropy == pytest.approx([2, 2])
    assert stats.distance == pytest.approx([0, 0])


def test_a_class_nobody_holds_is_counted_as_such():
    assert label_counts(np.array([0, 2]), [np.array([0, 1])], 4).tolist() == [[1, 0, 1, 0]]


def test_the_prior_alone_predicts_the_majority_of_the_training_samples():
    """Client 0 trains on 0,0,1 and tests on 0,1: one right. Client 1 trains on 1,2 (tie: 1), tests on 2: none."""
    labels = np.array([0, 0, 1, 0, 1, 1, 2, 2])
    clients = Clients([np.array([0, 1, 2]), np.array([5, 6])], [np.array([3, 4]), np.array([7])])
    assert prior_accuracy(labels, clients, 3) == pytest.approx(1 / 3)


def test_without_test_samples_the_prior_has_no_accuracy():
    assert np.isnan(prior_accuracy(LABELS, Clients(PARTS, [np.array([], dtype=np.int64)] * 3), 3))


def test_a_run_of_very_many_clients_records_how_many_have_each_size(monkeypatch):
    monkeypatch.setitem(holdings.__globals__, "RECORDED", 3)  # the module has the name of one of its functions
    data = Dataset("t", torch.zeros(9, 1), torch.zeros(9, dtype=torch.int64), 1)
    train, test = [np.array([0]), np.array([1, 2]), np.array([3]), np.array([4])], [np.arange(5, 6)] * 4
    assert holdings(data, train, test) == {"clients_of_size": [[2, 3], [3, 1]]}
