"""Graphs between clients. A graph is an array of links, a row (receiver, sender) for each, in sorted order.

Undirected graphs hold every edge twice, once in each direction. No graph has a link from a client to itself. Every
function is pure: f(num_clients, rng, round, *, knobs) -> links. ``rng`` is keyed by the seed, and by the round if the
graph is drawn anew in each round.
"""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

Links = NDArray[np.int64]  # shape (number of links, 2): receiver, sender
Rng = np.random.Generator

TRIES = 100  # draws of a random graph until it is connected
SWAPS = 10  # of each edge of a random regular graph, on average


def ring(num_clients: int, _rng: Rng, _round: int) -> Links:
    """Link every client to the one before and the one after it."""
    u = np.arange(num_clients)
    return _both(u, (u + 1) % num_clients)


def chain(num_clients: int, _rng: Rng, _round: int) -> Links:
    """Link the clients in a row: a ring without the link from the last to the first."""
    u = np.arange(num_clients - 1)
    return _both(u, u + 1)


def tree(num_clients: int, _rng: Rng, _round: int) -> Links:
    """Link the clients in a binary tree: client u to (u - 1) // 2."""
    u = np.arange(1, num_clients)
    return _both(u, (u - 1) // 2)


def star(num_clients: int, _rng: Rng, _round: int) -> Links:
    """Link all clients to client 0."""
    u = np.arange(1, num_clients)
    return _both(u, np.zeros_like(u))


def torus(num_clients: int, _rng: Rng, _round: int, *, rows: int = 0) -> Links:
    """Put the clients on a grid without a border, and link each to its four neighbours. rows=0: nearly a square."""
    if not rows:
        rows = max(d for d in range(1, int(num_clients**0.5) + 1) if num_clients % d == 0)
        if rows == 1:
            raise ValueError(f"{num_clients} clients make no torus, for the number has no divisors; use another number")
    if rows < 2 or num_clients % rows or num_clients // rows < 2:
        raise ValueError(
            f"rows={rows} does not divide {num_clients} clients into at least two rows and two columns; "
            "choose a divisor, or leave rows out"
        )
    u, columns = np.arange(num_clients), num_clients // rows
    row, column = u // columns, u % columns
    right = row * columns + (column + 1) % columns
    down = (row + 1) % rows * columns + column
    return _both(np.concatenate([u, u]), np.concatenate([right, down]))


def exponential(num_clients: int, _rng: Rng, _round: int) -> Links:
    """Link client u to u + 1, u + 2, u + 4, u + 8 and so on, modulo the number of clients, in both directions."""
    u = np.arange(num_clients)
    hops = [2**k for k in range(max(1, (num_clients - 1).bit_length()))]
    return _both(np.tile(u, len(hops)), np.concatenate([(u + hop) % num_clients for hop in hops]))


def one_peer_exponential(num_clients: int, _rng: Rng, round: int) -> Links:
    """Client u receives from u - 2^k alone, with k = 0, 1, 2 and so on in turn, a round each.

    If the number of clients is a power of two, a full turn gives everyone the exact mean.
    """
    u, turn = np.arange(num_clients), max(1, (num_clients - 1).bit_length())
    return np.stack([u, (u - 2 ** (round % turn)) % num_clients], axis=1)


def matching(num_clients: int, rng: Rng, _round: int) -> Links:
    """Pair the clients at random, anew in every round; with an odd number one stays alone."""
    order = rng.permutation(num_clients)
    half = num_clients // 2
    return _both(order[:half], order[half : 2 * half])


def random_regular(num_clients: int, rng: Rng, _round: int, *, degree: int = 4, redraw: bool = False) -> Links:
    """Draw a graph in which every client has ``degree`` neighbours; redraw=true: a new one in every round."""
    if not 1 <= degree < num_clients or num_clients * degree % 2:
        raise ValueError(
            f"degree={degree} is impossible with {num_clients} clients; it must be at least 1, below the number of "
            "clients, and even if that number is odd"
        )
    for _ in range(TRIES):
        links = _swapped(_circulant(num_clients, degree), rng)
        if redraw or is_connected(links, num_clients):
            break
    return links


def erdos_renyi(num_clients: int, rng: Rng, _round: int, *, p: float = 0.1, redraw: bool = False) -> Links:
    """Link every pair with probability p. The draw is repeated until the graph is connected, unless redraw=true.

    redraw=true draws a new graph in every round, connected or not.
    """
    if not 0 < p <= 1:
        raise ValueError(f"p must be above 0 and at most 1, not {p}")
    u, v = np.triu_indices(num_clients, 1)
    for _ in range(TRIES):
        there = rng.random(len(u)) < p
        links = _both(u[there], v[there])
        if redraw or is_connected(links, num_clients):
            break
    return links


def epidemic(num_clients: int, rng: Rng, _round: int, *, peers: int = 2) -> Links:
    """Every client sends its model to ``peers`` others, drawn anew in every round."""
    if not 1 <= peers < num_clients:
        raise ValueError(f"peers={peers} must be at least 1 and below the number of clients, {num_clients}")
    targets = np.stack([rng.choice(num_clients - 1, peers, replace=False) for _ in range(num_clients)])
    senders = np.arange(num_clients)[:, None]
    targets += targets >= senders  # nobody sends to itself
    return _sorted(targets.reshape(-1), np.repeat(senders, peers))


def complete(num_clients: int, _rng: Rng, _round: int) -> Links:
    """Link every client to every other: with all clients in every round this is the server's mean."""
    u, v = np.triu_indices(num_clients, 1)
    return _both(u, v)


def edges(num_clients: int, _rng: Rng, _round: int, *, path: Path) -> Links:
    """Read undirected edges from a text file: a line ``u v`` for each, clients counted from 0; # begins a comment."""
    found = []
    for number, line in enumerate(_lines(path), start=1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) != 2 or not all(word.isascii() and word.isdigit() for word in words):
            raise ValueError(
                f"{path}, line {number}: {line.strip()!r:.80} is not an edge; write two clients, as in 0 1"
            )
        u, v = map(int, words)
        if max(u, v) >= num_clients:
            raise ValueError(
                f"{path}, line {number}: there is no client {max(u, v)}; clients are 0 to {num_clients - 1}"
            )
        if u == v:
            raise ValueError(f"{path}, line {number}: client {u} is linked to itself; leave the line out")
        found.append((u, v))
    pairs = np.array(found, dtype=np.int64).reshape(-1, 2)
    return _both(pairs[:, 0], pairs[:, 1])


def matrix(num_clients: int, _rng: Rng, _round: int, *, path: Path) -> Links:
    """Read a mixing matrix of your own from a text file: a row of weights for every receiver, comma or space apart."""
    weights_NN = read_matrix(path, num_clients)
    return np.argwhere(weights_NN - np.diag(np.diag(weights_NN))).astype(np.int64)


def read_matrix(path: Path, num_clients: int) -> NDArray[np.float64]:
    """Return the N x N numbers of a text file."""
    rows = [
        line.replace(",", " ").split() for line in (each.partition("#")[0] for each in _lines(path)) if line.strip()
    ]
    if len(rows) != num_clients or any(len(row) != num_clients for row in rows):
        lengths = sorted({len(row) for row in rows})
        raise ValueError(
            f"{path} has {len(rows)} rows of {' or '.join(map(str, lengths)) or 0} numbers; "
            f"{num_clients} clients need {num_clients} rows of {num_clients}"
        )
    try:
        return np.array(rows, dtype=np.float64)
    except ValueError as error:
        raise ValueError(f"{path} is not a matrix of numbers: {error}") from None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise ValueError(f"cannot read the graph {os.fspath(path)}: {reason}") from None


# ---- what all graphs share ---------------------------------------------------------------------------------


def is_connected(links: Links, num_clients: int) -> bool:
    return num_parts(links, num_clients) == 1


def num_parts(links: Links, num_clients: int) -> int:
    """Return the number of parts without a link between them."""
    matrix = coo_array((np.ones(len(links)), (links[:, 0], links[:, 1])), shape=(num_clients, num_clients))
    return int(connected_components(matrix, directed=False)[0])


def is_tree(links: Links, num_clients: int) -> bool:
    """Return whether an undirected graph is a tree: connected, with one edge less than clients.

    >>> is_tree(np.array([[0, 1], [1, 0], [1, 2], [2, 1]]), 3)
    True
    """
    return len(links) == 2 * (num_clients - 1) and is_connected(links, num_clients)


def among(links: Links, awake_N: NDArray[np.bool_]) -> Links:
    """Return the links whose both ends are awake."""
    return links[awake_N[links[:, 0]] & awake_N[links[:, 1]]]


def _both(u: NDArray[np.int64], v: NDArray[np.int64]) -> Links:
    """Return undirected edges as links in both directions, each once, without loops."""
    u, v = u[u != v], v[u != v]
    return _sorted(np.concatenate([u, v]), np.concatenate([v, u]))


def _sorted(receivers: NDArray[np.int64], senders: NDArray[np.int64]) -> Links:
    return np.unique(np.stack([receivers.reshape(-1), senders.reshape(-1)], axis=1).astype(np.int64), axis=0)


def _circulant(num_clients: int, degree: int) -> list[tuple[int, int]]:
    """Return the edges of a regular graph: to the nearest neighbours, and to the opposite client if degree is odd."""
    found = [(u, (u + hop) % num_clients) for hop in range(1, degree // 2 + 1) for u in range(num_clients)]
    half = num_clients // 2
    return found + [(u, u + half) for u in range(half)] * (degree % 2)


def _swapped(found: list[tuple[int, int]], rng: Rng) -> Links:
    """Return the graph after random swaps of two edges' ends; every client keeps its number of neighbours."""
    there = {frozenset(edge) for edge in found}
    for i, j in rng.integers(len(found), size=(SWAPS * len(found), 2)).tolist():
        (a, b), (c, d) = found[i], found[j] if rng.random() < 0.5 else found[j][::-1]
        new = frozenset((a, d)), frozenset((c, b))
        if len({a, b, c, d}) < 4 or new[0] in there or new[1] in there:
            continue
        there -= {frozenset((a, b)), frozenset((c, d))}
        there |= set(new)
        found[i], found[j] = (a, d), (c, b)
    pairs = np.array(found, dtype=np.int64).reshape(-1, 2)
    return _both(pairs[:, 0], pairs[:, 1])
