"""Every partition covers all samples once and keeps its minimum; each follows its rule in distribution."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedncv import keys, spec
from fedncv.data import PARTITIONS, divide, from_arrays, label_counts, load, statistics
from fedncv.data.partition import (
    classes,
    dirichlet,
    dirichlet_equal,
    dirichlet_sizes,
    iid,
    lognormal_sizes,
    natural,
    shards,
)

NAMES = sorted(PARTITIONS)


def pool(n, num_classes, seed=0):
    return np.random.default_rng(seed).integers(0, num_classes, n)


def rng(seed=0):
    return keys.generator(seed, "partition")


@st.composite
def problems(draw):
    """Labels in which every class occurs, a number of clients, and a minimum that can be met."""
    num_classes = draw(st.integers(1, 6))
    n = draw(st.integers(num_classes, 200))
    labels = np.concatenate([np.arange(num_classes), pool(n - num_classes, num_classes, draw(st.integers(0, 99)))])
    num_clients = draw(st.integers(1, n))
    min_samples = draw(st.integers(1, max(1, min(n // num_clients, 20))))
    return labels, num_clients, min_samples, draw(st.integers(0, 2**40))


def knobs_for(name, labels, num_clients, min_samples):
    """Knobs for which the partition exists; natural clients must hold the minimum by themselves."""
    if name == "classes":
        return {"k": max(1, -(-(int(labels.max()) + 1) // num_clients)), "min_samples": min_samples}
    if name == "shards":
        return {"per_client": 1, "min_samples": min_samples}
    if name == "natural":
        return {}
    return {"min_samples": min_samples}


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=40)
@given(problem=problems())
def test_every_sample_has_one_owner_every_client_its_minimum_and_a_key_decides_all(name, problem):
    labels, num_clients, min_samples, seed = problem
    if name == "natural":
        num_clients = min(num_clients, int(labels.max()) + 1)
    knobs = knobs_for(name, labels, num_clients, min_samples)
    parts = PARTITIONS[name](labels, num_clients, rng(seed), **knobs)
    assert len(parts) == num_clients
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert min(map(len, parts)) >= knobs.get("min_samples", 1)
    again = PARTITIONS[name](labels, num_clients, rng(seed), **knobs)
    assert all(map(np.array_equal, parts, again))
    assert parts.moved == again.moved


@pytest.mark.parametrize("name", [name for name in NAMES if name != "natural"])
def test_another_key_gives_another_partition(name):
    labels = pool(500, 5)
    one, other = (PARTITIONS[name](labels, 10, rng(seed)) for seed in (0, 1))
    assert not all(map(np.array_equal, one, other))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("num_clients", "min_samples", "words"),
    [
        (0, 1, "0 clients"),
        (-3, 1, "-3 clients"),
        (31, 1, "31 clients"),
        (5, 0, "min_samples is 0"),
        (5, 7, "5 clients with min_samples=7 need 35 samples, there are 30; use at most 4 clients or min_samples=6"),
    ],
)
def test_impossible_numbers_get_one_line_with_the_value_and_the_remedy(name, num_clients, min_samples, words):
    column = np.arange(30) if name == "natural" else np.arange(30) % 3
    with pytest.raises(ValueError, match=words) as caught:
        PARTITIONS[name](column, num_clients, rng(), min_samples=min_samples)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf"), 1e7])
@pytest.mark.parametrize("partition", [dirichlet, dirichlet_equal, dirichlet_sizes])
def test_alpha_must_be_positive_and_finite(partition, alpha):
    with pytest.raises(ValueError, match=f"alpha is {alpha}"):
        partition(np.arange(30) % 3, 2, rng(), alpha=alpha)


@pytest.mark.parametrize("name", NAMES)
def test_knobs_can_be_named_in_a_config(name):
    assert spec.parse(f"{name}:min_samples=3", PARTITIONS, what="partition") == (name, {"min_samples": 3})


@pytest.mark.parametrize("partition", [dirichlet, dirichlet_equal, classes, shards])
@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.array([0, -1, 1]), "label -1 is negative"),
        (np.array([0.5, 1.0, 2.0]), "labels are float64 of shape .3,., not one class number per sample"),
        (np.zeros((3, 2), dtype=np.int64), "use the partition iid"),
    ],
)
def test_labels_that_are_no_classes_are_refused_where_they_matter(partition, labels, words):
    with pytest.raises(ValueError, match=words):
        partition(labels, 2, rng(), min_samples=1)


@pytest.mark.parametrize("partition", [iid, dirichlet_sizes, lognormal_sizes])
def test_targets_of_a_regression_are_divided_where_labels_do_not_matter(partition):
    parts = partition(np.random.default_rng(0).normal(size=(60, 2)), 3, rng())
    assert sum(map(len, parts)) == 60


# The rule of each partition.


def test_iid_sizes_differ_by_at_most_one():
    assert sorted(map(len, iid(pool(103, 4), 10, rng()))) == [10] * 7 + [11] * 3


def test_dirichlet_cuts_where_its_formula_says():
    """The same draw by hand, class by class and client by client."""
    labels, num_clients = pool(5_000, 4), 7
    parts = dirichlet(labels, num_clients, rng(3), alpha=0.5, min_samples=1)
    assert parts.moved == 0
    p = rng(3).dirichlet([0.5] * num_clients, size=4)
    for k in range(4):
        n_k, total, last = int((labels == k).sum()), 0.0, 0
        for u in range(num_clients):
            total += p[k, u]
            here = n_k if u == num_clients - 1 else int(np.floor(total * n_k))
            assert (labels[parts[u]] == k).sum() == here - last
            last = here


def test_dirichlet_gives_each_client_the_same_share_of_each_class_on_average():
    """E[p_ku] = 1/N and Var[p_ku] = (1/N)(1 - 1/N)/(N alpha + 1); five deviations of the mean of 400 x 4."""
    labels, alpha = np.arange(40_000) % 4, 1.0
    shares = np.stack([label_counts(labels, dirichlet(labels, 5, rng(s), alpha=alpha), 4) / 10_000 for s in range(400)])
    variance = 1 / 5 * 4 / 5 / (5 * alpha + 1)
    assert abs(shares[:, 0].mean() - 1 / 5) < 5 * np.sqrt(variance / 1600)
    assert shares.var() == pytest.approx(variance, rel=0.1)


@pytest.mark.parametrize("partition", [dirichlet, dirichlet_equal])
@pytest.mark.parametrize(("alpha", "tolerance"), [(0.1, 0.06), (1.0, 0.05), (100.0, 0.02)])
def test_two_samples_of_a_client_are_of_one_class_as_often_as_dirichlet_says(partition, alpha, tolerance):
    """q ~ Dirichlet(alpha 1_K): P(same class) = E[Σ q_k²] = (alpha + 1)/(K alpha + 1), sizes independent of q.

    dirichlet_equal runs out of classes for some clients, which costs it a little agreement."""
    labels = np.arange(200_000) % 10
    counts = label_counts(labels, partition(labels, 1_000, rng(), alpha=alpha), 10)
    sizes = counts.sum(axis=1, keepdims=True)
    same = (counts**2 / sizes).sum() / len(labels)
    assert same == pytest.approx((alpha + 1) / (10 * alpha + 1), abs=tolerance)


def test_dirichlet_equal_follows_the_pool_where_classes_are_unequal():
    labels = np.repeat([0, 1, 2], [7_000, 2_000, 1_000])
    parts = dirichlet_equal(labels, 10, rng(), alpha=1e5)
    assert {len(part) for part in parts} == {1_000}
    assert label_counts(labels, parts, 3) == pytest.approx(np.tile([700, 200, 100], (10, 1)), abs=80)


def test_where_retries_cannot_help_samples_are_moved_and_counted():
    """1,000 clients, alpha 0.1: some client is empty in every draw; the minimum holds all the same."""
    labels = np.arange(60_000) % 10
    parts = dirichlet(labels, 1_000, rng(), alpha=0.1, min_samples=10, retries=2)
    sizes = [len(part) for part in parts]
    assert min(sizes) == 10
    assert 0 < parts.moved < 0.02 * len(labels)
    assert statistics(labels, parts, 10).moved == parts.moved


def test_dirichlet_repeats_its_draw_until_every_client_has_the_minimum():
    labels = np.arange(600) % 10
    once = [dirichlet(labels, 10, rng(s), min_samples=10, retries=1).moved for s in range(20)]
    often = [dirichlet(labels, 10, rng(s), min_samples=10, retries=100).moved for s in range(20)]
    assert max(once) > 0
    assert max(often) == 0


def test_moved_samples_are_of_the_classes_the_client_wants():
    """A federation of one-class clients stays one after the minimum was reached."""
    labels = np.repeat(np.arange(5), 2_000)
    parts = dirichlet(labels, 100, rng(), alpha=1e-3, min_samples=20, retries=1)
    assert parts.moved > 500
    held = (label_counts(labels, parts, 5) > 0).sum(axis=1)
    assert held.mean() < 1.6


@pytest.mark.parametrize("alpha", [1e-300, 1e-5, 1e6])
def test_extreme_alphas_give_a_partition(alpha):
    parts = dirichlet(pool(300, 3), 5, rng(), alpha=alpha, min_samples=1)
    assert sum(map(len, parts)) == 300


def test_dirichlet_sizes_vary_as_the_formula_says():
    """Var[s_u / n] = (1/N)(1 - 1/N)/(N alpha + 1)."""
    labels, alpha = np.zeros(100_000, dtype=np.int64), 2.0
    sizes = [[len(p) for p in dirichlet_sizes(labels, 20, rng(s), alpha=alpha, min_samples=1)] for s in range(100)]
    assert np.var(np.array(sizes) / 100_000) == pytest.approx(1 / 20 * 19 / 20 / (20 * alpha + 1), rel=0.1)


def test_lognormal_sizes_have_the_deviation_asked_for():
    labels = np.zeros(1_000_000, dtype=np.int64)
    logs = np.log([len(part) for part in lognormal_sizes(labels, 2_000, rng(), sigma=0.7, min_samples=1)])
    assert logs.std() == pytest.approx(0.7, rel=0.05)


def test_lognormal_sizes_without_deviation_are_equal():
    assert {len(part) for part in lognormal_sizes(pool(1_000, 3), 10, rng(), sigma=0.0)} == {100}


def test_sizes_below_the_minimum_are_raised_at_the_cost_of_the_largest():
    """Weights that leave most clients below the minimum: these have it exactly, the others the rest."""
    sizes = np.array([len(part) for part in lognormal_sizes(pool(2_000, 3), 100, rng(), sigma=3.0)])
    assert sizes.sum() == 2_000
    assert (sizes == 10).sum() > 60
    assert sizes.max() > 200


@pytest.mark.parametrize("k", [1, 2, 3, 10])
def test_every_client_holds_k_classes_and_every_class_is_shared_equally(k):
    labels = np.arange(20_000) % 10
    parts = classes(labels, 40, rng(), k=k)
    counts = label_counts(labels, parts, 10)
    assert parts.moved == 0
    assert set((counts > 0).sum(axis=1)) == {k}
    for of_class in counts.T:
        shared = of_class[of_class > 0]
        assert shared.max() - shared.min() <= 1


def test_few_clients_hold_all_classes_between_them():
    counts = label_counts(np.arange(1_000) % 10, classes(np.arange(1_000) % 10, 4, rng(), k=3), 10)
    assert ((counts > 0).sum(axis=0) >= 1).all()


@pytest.mark.parametrize(("k", "words"), [(0, "k is 0"), (11, "the data has 10 classes"), (2, "use k=3 or more")])
def test_a_number_of_classes_that_cannot_be_is_refused(k, words):
    with pytest.raises(ValueError, match=words):
        classes(np.arange(1_000) % 10, 4, rng(), k=k)


def test_two_shards_of_one_class_each():
    """20 clients, 10 equal classes: a class is 4 shards exactly, so no client holds more than 2 classes."""
    labels = np.arange(4_000) % 10
    counts = label_counts(labels, shards(labels, 20, rng()), 10)
    assert (counts.sum(axis=1) == 200).all()
    assert set(np.unique(counts)) <= {0, 100, 200}


def test_shards_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match="per_client is 4"):
        shards(np.arange(30) % 3, 10, rng(), per_client=4)


def test_natural_clients_keep_their_samples():
    owners = np.array([7, 7, 3, 9, 3, 7])
    assert [part.tolist() for part in natural(owners, 3, rng())] == [[2, 4], [0, 1, 5], [3]]


def test_fewer_clients_than_owners_merge_whole_owners_into_balanced_clients():
    owners = np.repeat(np.arange(6), [6, 5, 4, 3, 2, 1])
    parts = natural(owners, 3, rng())
    assert sorted(map(len, parts)) == [7, 7, 7]
    holders = [
        {int(u) for u, part in enumerate(parts) if np.isin(part, np.flatnonzero(owners == v)).any()} for v in range(6)
    ]
    assert all(len(holder) == 1 for holder in holders)


def test_natural_clients_that_are_too_few_or_too_small_are_named():
    owners = np.repeat([0, 1], [9, 1])
    with pytest.raises(ValueError, match="3 clients, but the data has 2 natural ones"):
        natural(owners, 3, rng())
    with pytest.raises(ValueError, match="natural client 1 has 1 samples, min_samples is 5"):
        natural(owners, 2, rng(), min_samples=5)


def test_a_dataset_is_divided_by_the_text_of_a_config():
    digits = load("digits")
    parts = divide(digits, "dirichlet:alpha=1.0,min_samples=5", num_clients=8, seed=1)
    again = dirichlet(digits.labels.numpy(), 8, keys.generator(1, "partition"), alpha=1.0, min_samples=5)
    assert all(map(np.array_equal, parts, again))


def test_natural_clients_come_from_the_owners_column():
    data = from_arrays(np.zeros((4, 2), np.float32), [0, 1, 0, 1], owners=["ann", "bob", "ann", "ann"])
    assert [part.tolist() for part in divide(data, "natural", num_clients=2, seed=0)] == [[0, 2, 3], [1]]
    with pytest.raises(ValueError, match="does not say who owns"):
        divide(load("digits"), "natural", num_clients=2, seed=0)
