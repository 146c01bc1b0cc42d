"""Synthetic(alpha, beta): the formula, and a population whose clients do not depend on its size."""

import numpy as np
import pytest
import torch

from fedncv.data import divide, load


def by_client(dataset, clients):
    n = len(dataset.x) // clients
    return dataset.x.view(clients, n, -1).numpy(), dataset.y.view(clients, n).numpy()


def test_a_client_has_the_same_samples_in_a_population_of_any_size():
    small, large = load("synthetic:clients=3,samples=4"), load("synthetic:clients=700,samples=4")
    assert torch.equal(small.x, large.x[:12])
    assert torch.equal(small.y, large.y[:12])
    assert not torch.equal(large.x[:12], load("synthetic:clients=3,samples=4,seed=1").x)


def test_inputs_have_the_paper_s_moments():
    """x = v_k + j^-0.6 noise; v_k has variance beta^2 + 1 over clients. Means over 4,000 clients, four deviations."""
    x_NSF, _ = by_client(load("synthetic:clients=4000,samples=6,beta=2,features=5"), 4000)
    within = x_NSF.var(axis=1, ddof=1).mean(axis=0)
    assert within == pytest.approx(np.arange(1, 6) ** -1.2, rel=4 * np.sqrt(2 / (4000 * 5)))
    centres = x_NSF.mean(axis=1)
    assert centres.var(axis=0) == pytest.approx(2**2 + 1 + within / 6, rel=4 * np.sqrt(2 / 4000))
    # B_k is common to all features of a client: their covariance is beta^2
    assert np.cov(centres.T)[0, 1] == pytest.approx(4, abs=4 * 5 * np.sqrt(2 / 4000))


def test_labels_are_those_of_a_linear_classifier_of_the_client():
    """A client of many samples is separable: logistic regression fits it, but not the labels of another client."""
    from sklearn.linear_model import LogisticRegression

    x_NSF, y_NS = by_client(load("synthetic:clients=2,samples=400,features=4,classes=3"), 2)
    fits = [LogisticRegression(C=1e4, max_iter=5000).fit(x, y).score(x, y) for x, y in zip(x_NSF, y_NS, strict=True)]
    assert min(fits) > 0.97
    mixed = LogisticRegression(C=1e4, max_iter=5000).fit(x_NSF.reshape(-1, 4), y_NS.reshape(-1))
    assert mixed.score(x_NSF.reshape(-1, 4), y_NS.reshape(-1)) < 0.95


def test_owners_are_the_natural_clients():
    data = load("synthetic:clients=30,samples=3")
    parts = divide(data, "natural", num_clients=30, seed=0)
    assert [part.tolist() for part in parts][:2] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("knob", ["clients=0", "samples=-1", "features=0", "classes=1", "alpha=-0.5", "beta=nan"])
def test_a_wrong_knob_is_refused_with_its_range(knob):
    name, _, value = knob.partition("=")
    with pytest.raises(ValueError, match=rf"synthetic: {name} is {value}; it must be at least \d"):
        load(f"synthetic:{knob}")
