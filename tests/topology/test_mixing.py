"""Mixing matrices: rows and columns that sum to one, spectral gaps in closed form, sparse products."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from fedncv.topology import mixing as mixing_module
from fedncv.topology.mixing import Mixing, effective_clients, halfway, mixed, operator, spectral_gap
from fedncv.topology.network import TOPOLOGIES, find_topology

BALANCED = [
    "ring", "chain", "tree", "star", "torus", "exponential", "one_peer_exponential", "matching", "random_regular",
    "erdos_renyi:p=0.4", "complete", "random_regular:redraw=true", "erdos_renyi:p=0.1,redraw=true",
]  # fmt: skip


def weights(text, num_clients, round=0, awake=None):
    return find_topology(text, num_clients, 0).mixing(round, awake).W_NN.toarray()


def test_every_graph_is_in_one_of_the_lists():
    assert {text.partition(":")[0] for text in BALANCED} | {"epidemic", "edges", "matrix"} == set(TOPOLOGIES)


@pytest.mark.parametrize("text", BALANCED)
def test_rows_and_columns_sum_to_one_in_every_round(text):
    for round in range(4):
        W = weights(text, 12, round)
        assert (W >= 0).all()
        np.testing.assert_allclose(W.sum(0), 1, atol=1e-14)
        np.testing.assert_allclose(W.sum(1), 1, atol=1e-14)


@pytest.mark.parametrize("text", [text for text in BALANCED if text != "one_peer_exponential"])
@pytest.mark.parametrize("awake", [(0, 1, 2, 5, 6, 9), (3,), (), tuple(range(11))])
def test_rows_and_columns_sum_to_one_when_clients_are_away_who_keep_what_they_have(text, awake):
    W = weights(text, 12, 1, awake)
    np.testing.assert_allclose(W, W.T, atol=1e-14)
    np.testing.assert_allclose(W.sum(1), 1, atol=1e-14)
    for u in set(range(12)) - set(awake):
        assert W[u, u] == 1


def test_an_epidemic_is_the_plain_mean_of_what_arrived():
    """Rows sum to one, columns do not: who is heard more often counts more."""
    topology = find_topology("epidemic:peers=2", 12, 0)
    W, links = topology.mixing(3).W_NN.toarray(), topology.links(3)
    for u in range(12):
        heard = [u, *links[links[:, 0] == u, 1]]
        expected = np.isin(np.arange(12), heard) / len(heard)
        np.testing.assert_allclose(W[u], expected, atol=1e-15)
    assert abs(W.sum(0) - 1).max() > 0.1


def test_metropolis_weights_by_hand():
    """A star of four: 1 / (1 + 3) on every edge; a chain of three: 1/3 on both."""
    expected = [[1 / 4] * 4, *([1 / 4 if v == 0 else 3 / 4 * (u == v) for v in range(4)] for u in range(1, 4))]
    np.testing.assert_allclose(weights("star", 4), expected)
    np.testing.assert_allclose(weights("chain", 3), [[2 / 3, 1 / 3, 0], [1 / 3] * 3, [0, 1 / 3, 2 / 3]])


def test_the_complete_graph_is_the_mean_of_all_that_are_there():
    np.testing.assert_allclose(weights("complete", 7), 1 / 7, atol=1e-15)
    some = weights("complete", 7, awake=(1, 2, 6))
    np.testing.assert_allclose(some[np.ix_([1, 2, 6], [1, 2, 6])], 1 / 3, atol=1e-15)


def test_a_turn_of_the_one_peer_graph_is_the_exact_mean_of_2_to_the_k_clients():
    product = np.linalg.multi_dot([weights("one_peer_exponential", 16, round) for round in range(4)])
    np.testing.assert_allclose(product, 1 / 16, atol=1e-15)


# ---- spectral gap --------------------------------------------------------------------------------------


def gap(text, num_clients, round=0):
    return spectral_gap(find_topology(text, num_clients, 0).mixing(round))


@pytest.mark.parametrize("n", [3, 8, 21])
def test_gaps_in_closed_form(n):
    """Eigenvalues: of a ring (1 + 2 cos(2 pi k / n)) / 3, of a chain (1 + 2 cos(pi k / n)) / 3, of a star 1 - 1/n."""
    ring = max(abs(1 + 2 * math.cos(2 * math.pi * k / n)) / 3 for k in range(1, n))
    chain = max(abs(1 + 2 * math.cos(math.pi * k / n)) / 3 for k in range(1, n))
    assert gap("ring", n) == pytest.approx(1 - ring, abs=1e-11)
    assert gap("chain", n) == pytest.approx(1 - chain, abs=1e-11)
    assert gap("star", n) == pytest.approx(1 / n, abs=1e-11)
    assert gap("complete", n) == pytest.approx(1, abs=1e-11)


def test_pairs_alone_and_a_graph_in_parts_have_no_gap():
    assert gap("matching", 6) == 0
    topology = find_topology("ring", 6, 0)
    assert spectral_gap(topology.mixing(0, (0, 1, 3, 4))) == 0  # two pairs
    assert spectral_gap(topology.mixing(0, (2,))) == 0
    assert spectral_gap(topology.mixing(0, (0, 1))) == 1  # a pair


@pytest.mark.parametrize("text", ["ring", "epidemic", "erdos_renyi:p=0.4", "one_peer_exponential"])
def test_the_gap_of_many_clients_is_that_of_the_dense_matrix(text, monkeypatch):
    topology = find_topology(text, 24, 0)
    dense = spectral_gap(topology.mixing(2))
    W = topology.mixing(2).W_NN.toarray()
    by_svd = np.linalg.svd((np.eye(24) - np.full((24, 24), 1 / 24)) @ W, compute_uv=False)[0]
    assert dense == pytest.approx(max(0, 1 - by_svd), abs=1e-11)
    monkeypatch.setattr(mixing_module, "SMALL", 4)
    assert spectral_gap(topology.mixing(2)) == pytest.approx(dense, abs=1e-9)
    assert spectral_gap(topology.mixing(2)) == spectral_gap(topology.mixing(2))


def test_halfway_moves_the_eigenvalues_above_zero():
    topology = find_topology("ring", 6, 0)
    W, half = topology.mixing(0).W_NN.toarray(), halfway(topology.mixing(0)).W_NN.toarray()
    np.testing.assert_allclose(half, (np.eye(6) + W) / 2)
    assert np.linalg.eigvalsh(W).min() == pytest.approx(-1 / 3)
    assert np.linalg.eigvalsh(half).min() >= 0


def test_effective_clients_is_the_variance_of_the_mean_of_independent_updates():
    """A ring: each takes a third of three, so 3; the complete graph: N; by the sum of squares otherwise."""
    assert effective_clients(find_topology("ring", 12, 0).mixing(0)) == pytest.approx(3)
    assert effective_clients(find_topology("complete", 12, 0).mixing(0)) == pytest.approx(12)
    W = weights("chain", 5)
    assert effective_clients(find_topology("chain", 5, 0).mixing(0)) == pytest.approx(5 / (W**2).sum())


# ---- products ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["ring", "complete"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixing_is_the_matrix_product_for_every_tensor_of_a_tree(text, dtype):
    topology = find_topology(text, 30, 0)
    W = torch.from_numpy(topology.mixing(0).W_NN.toarray())
    tree = {"a": torch.randn(30, 4, 2, dtype=dtype), "b": torch.randn(30, dtype=torch.float64), "k": torch.arange(30)}
    found = mixed(topology.mixing(0).W_NN, tree)
    for name in ("a", "b"):
        flat = tree[name].double().reshape(30, -1)
        assert found[name].dtype == tree[name].dtype
        assert_close(found[name].double().reshape(30, -1), W @ flat, atol=1e-6 if name == "a" else 1e-14, rtol=0)
    assert torch.equal(found["k"], tree["k"])
    assert mixed(topology.mixing(0).W_NN, torch.zeros(30, 0)).shape == (30, 0)


def test_a_sparse_graph_is_a_sparse_product():
    W = find_topology("ring", 30, 0).mixing(0).W_NN
    assert operator(W, dtype=torch.float32, device=torch.device("cpu")).is_sparse
    W = find_topology("complete", 30, 0).mixing(0).W_NN
    assert not operator(W, dtype=torch.float32, device=torch.device("cpu")).is_sparse


def test_a_matrix_says_how_many_messages_cross():
    assert find_topology("ring", 8, 0).mixing(0).num_links == 16
    assert find_topology("epidemic:peers=3", 8, 0).mixing(0).num_links == 24
    assert find_topology("ring", 8, 0).mixing(0, (0, 1, 2, 5)).num_links == 4
    assert isinstance(find_topology("ring", 8, 0).mixing(0), Mixing)
