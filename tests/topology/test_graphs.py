"""Graphs: who is linked to whom, which ones are refused, and that draws repeat."""

import numpy as np
import pytest

from fedncv.topology.graphs import is_connected, is_tree, num_parts
from fedncv.topology.network import TOPOLOGIES, find_topology, links_of

FILES = ("edges", "matrix")
TEXTS = [name for name in TOPOLOGIES if name not in FILES]


def edges(text, num_clients, seed=0, round=0):
    """The links as a set of (receiver, sender)."""
    return set(map(tuple, links_of(text, num_clients, seed, round).tolist()))


def undirected(*pairs):
    return {pair for u, v in pairs for pair in ((u, v), (v, u))}


def test_small_graphs_are_those_that_one_draws():
    assert edges("ring", 4) == undirected((0, 1), (1, 2), (2, 3), (3, 0))
    assert edges("ring", 2) == undirected((0, 1))
    assert edges("chain", 4) == undirected((0, 1), (1, 2), (2, 3))
    assert edges("tree", 6) == undirected((0, 1), (0, 2), (1, 3), (1, 4), (2, 5))
    assert edges("star", 4) == undirected((0, 1), (0, 2), (0, 3))
    assert edges("complete", 3) == undirected((0, 1), (0, 2), (1, 2))
    assert edges("exponential", 6) == undirected(*((u, (u + hop) % 6) for u in range(6) for hop in (1, 2, 4)))
    # 0 1 2
    # 3 4 5
    torus = undirected((0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3), (0, 3), (1, 4), (2, 5))
    assert edges("torus", 6) == edges("torus:rows=2", 6) == torus


def test_the_peers_of_the_one_peer_graph_are_1_2_4_clients_away_in_turn():
    for round, hop in enumerate((1, 2, 4, 1)):
        assert edges("one_peer_exponential", 8, round=round) == {(u, (u - hop) % 8) for u in range(8)}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("num_clients", [2, 4, 12, 30])
def test_links_are_distinct_sorted_in_range_and_never_to_oneself(text, num_clients):
    text = "random_regular:degree=1" if text == "random_regular" and num_clients == 2 else text
    text = "random_regular:degree=3" if text == "random_regular" and num_clients == 4 else text
    text = "erdos_renyi:p=0.6" if text == "erdos_renyi" else text
    text = "epidemic:peers=1" if text == "epidemic" and num_clients == 2 else text
    if (text, num_clients) == ("torus", 2):
        return
    links = links_of(text, num_clients, 0, 0)
    assert ((links >= 0) & (links < num_clients)).all()
    assert (links[:, 0] != links[:, 1]).all()
    assert links.tolist() == sorted(map(list, set(map(tuple, links.tolist()))))


@pytest.mark.parametrize("text", ["random_regular", "erdos_renyi:p=0.3", "matching", "epidemic"])
def test_random_graphs_are_drawn_from_the_seed(text):
    assert edges(text, 20, seed=1) == edges(text, 20, seed=1)
    assert edges(text, 20, seed=1) != edges(text, 20, seed=2)


@pytest.mark.parametrize(
    "text", ["random_regular:redraw=true", "erdos_renyi:p=0.3,redraw=true", "matching", "epidemic"]
)
def test_some_graphs_are_drawn_anew_in_every_round(text):
    topology = find_topology(text, 20, 0)
    assert topology.changes
    assert not np.array_equal(topology.links(0), topology.links(1))
    assert np.array_equal(topology.links(1), topology.links(1))


@pytest.mark.parametrize("text", ["ring", "random_regular", "erdos_renyi:p=0.3"])
def test_the_others_are_the_same_in_all_rounds(text):
    topology = find_topology(text, 20, 0)
    assert not topology.changes
    assert np.array_equal(topology.links(0), topology.links(7))


@pytest.mark.parametrize("degree", [2, 3, 4, 7])
def test_every_client_of_a_random_regular_graph_has_its_degree(degree):
    for seed in range(5):
        topology = find_topology(f"random_regular:degree={degree}", 16, seed)
        assert (np.bincount(topology.links()[:, 0], minlength=16) == degree).all()
        assert is_connected(topology.links(), 16)
    assert edges(f"random_regular:degree={degree}", 16, 0) != edges(f"random_regular:degree={degree}", 16, 1)


def test_everyone_sends_to_so_many_peers_in_an_epidemic_and_any_pair_may_meet():
    met = set()
    for round in range(60):
        links = links_of("epidemic:peers=2", 5, 0, round)
        assert (np.bincount(links[:, 1], minlength=5) == 2).all()
        met |= set(map(tuple, links.tolist()))
    assert len(met) == 20


def test_a_matching_pairs_everyone_but_one_if_the_number_is_odd():
    for num_clients in (6, 7):
        degree = np.bincount(links_of("matching", num_clients, 0, 3)[:, 0], minlength=num_clients)
        assert sorted(degree) == [0] * (num_clients % 2) + [1] * (num_clients - num_clients % 2)


def test_trees_are_recognised():
    for text, expected in {"chain": True, "tree": True, "star": True, "ring": False, "complete": False}.items():
        assert find_topology(text, 5, 0).is_tree == expected
    assert not is_tree(np.array([[0, 1], [1, 0], [2, 3], [3, 2]]), 4)  # two parts
    assert not is_tree(np.array([[0, 1], [1, 0], [1, 2], [2, 1], [2, 0], [0, 2]]), 4)  # a ring and a client alone
    assert not find_topology("matching", 2, 0).is_tree


def test_parts_are_counted():
    assert num_parts(np.array([[0, 1], [1, 0]]), 4) == 3


# ---- refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "num_clients", "reason"),
    [
        ("rinng", 8, "unknown topology 'rinng'; did you mean 'ring'"),
        ("ring", 1, "needs at least 2 clients, not 1"),
        ("ring:size=3", 8, "has no knob 'size'"),
        ("torus", 7, "'torus': 7 clients make no torus"),
        ("torus:rows=3", 8, "rows=3 does not divide 8 clients"),
        ("torus:rows=8", 8, "rows=8 does not divide 8 clients into at least two rows and two columns"),
        ("random_regular:degree=8", 8, "degree=8 is impossible with 8 clients"),
        ("random_regular:degree=3", 7, "degree=3 is impossible with 7 clients"),
        ("random_regular:degree=1", 8, "is not connected: it falls into 4 parts"),
        ("erdos_renyi:p=0", 8, "p must be above 0"),
        ("erdos_renyi:p=0.01", 50, "with 50 clients and seed 0 is not connected"),
        ("epidemic:peers=8", 8, "peers=8 must be at least 1 and below the number of clients, 8"),
        ("edges", 8, "does not give path"),
        ("edges:path=/nowhere/graph.txt", 8, "cannot read the graph /nowhere/graph.txt: No such file"),
    ],
)
def test_a_graph_that_cannot_be_is_refused_in_one_line(text, num_clients, reason):
    with pytest.raises(ValueError, match=reason) as error:
        find_topology(text, num_clients, 0)
    assert "\n" not in str(error.value)


def test_a_graph_that_changes_need_not_be_connected_in_a_round():
    assert find_topology("erdos_renyi:p=0.01,redraw=true", 50, 0).changes


def test_edges_are_read_from_a_file(tmp_path):
    path = tmp_path / "graph.txt"
    path.write_text("# a triangle with a tail\n0 1\n1,2\n2 0  # back\n\n3 2\n")
    links = find_topology(f"edges:path={path}", 4, 0).links()
    assert set(map(tuple, links.tolist())) == undirected((0, 1), (1, 2), (2, 0), (3, 2))


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("0 1\n1 2 3\n", "line 2: '1 2 3' is not an edge"),
        ("0 -1\n", "line 1: '0 -1' is not an edge"),
        ("0 1\n1 4\n", "line 2: there is no client 4; clients are 0 to 3"),
        ("2 2\n", "line 1: client 2 is linked to itself"),
        ("0 1\n2 3\n", "is not connected: it falls into 2 parts"),
        ("", "is not connected: it falls into 4 parts"),
    ],
)
def test_a_file_of_edges_with_a_mistake_is_refused_with_the_line(tmp_path, lines, reason):
    path = tmp_path / "graph.txt"
    path.write_text(lines)
    with pytest.raises(ValueError, match=reason):
        find_topology(f"edges:path={path}", 4, 0)


def test_a_matrix_is_read_from_a_file(tmp_path):
    path = tmp_path / "weights.txt"
    path.write_text("0.5 0.5 0\n0.25, 0.5, 0.25\n0 0.5 0.5\n")
    topology = find_topology(f"matrix:path={path}", 3, 0)
    assert topology.mixing(5).W_NN.toarray().tolist() == [[0.5, 0.5, 0], [0.25, 0.5, 0.25], [0, 0.5, 0.5]]
    assert (topology.balanced, topology.symmetric, topology.changes) == (False, False, False)
    path.write_text("0.5 0.5\n0.5 0.5\n")
    assert find_topology(f"matrix:path={path},", 2, 0).symmetric


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("0.5 0.5\n0.5 0.4\n", "row 1 of the mixing matrix sums to 0.9; every row must sum to 1"),
        ("1.5 -0.5\n0.5 0.5\n", "weights must be finite and not negative"),
        ("nan 0.5\n0.5 0.5\n", "weights must be finite"),
        ("1 0\n0 1\n", "is not connected"),
        ("1 0 0\n0 1 0\n0 0 1\n", "has 3 rows of 3 numbers; 2 clients need 2 rows of 2"),
        ("a b\nc d\n", "is not a matrix of numbers"),
        ("", "has 0 rows of 0 numbers"),
    ],
)
def test_a_matrix_that_does_not_mix_is_refused(tmp_path, lines, reason):
    path = tmp_path / "weights.txt"
    path.write_text(lines)
    with pytest.raises(ValueError, match=reason):
        find_topology(f"matrix:path={path}", 2, 0)
