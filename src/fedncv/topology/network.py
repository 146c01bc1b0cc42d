"""A topology as a setting names it: ``ring``, ``torus:rows=4``, ``epidemic:peers=3``. ``server`` is none.

A topology is a sequence of mixing matrices W_t. Each is a pure function of the text, the number of clients, the seed,
the round and the clients that are awake, so runs repeat and resume.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedncv import keys, spec
from fedncv.fingerprint import fingerprint
from fedncv.topology import graphs
from fedncv.topology.graphs import Links, is_tree, num_parts
from fedncv.topology.mixing import TOLERANCE, Mixing, check_rows, given, metropolis, received

SERVER = "server"


class Kind(NamedTuple):
    """A kind of graph, and the facts that do not depend on its knobs."""

    links: Callable[..., Links]
    weights: Callable[..., Mixing] | None = metropolis
    """None: the file has them."""
    changes: bool = False
    """Whether every round has another graph."""
    balanced: bool = True
    """Whether the columns of W sum to one too, with all clients awake."""


TOPOLOGIES: Mapping[str, Kind] = {
    "ring": Kind(graphs.ring),
    "chain": Kind(graphs.chain),
    "tree": Kind(graphs.tree),
    "star": Kind(graphs.star),
    "torus": Kind(graphs.torus),
    "exponential": Kind(graphs.exponential),
    "one_peer_exponential": Kind(graphs.one_peer_exponential, received, changes=True),
    "matching": Kind(graphs.matching, changes=True),
    "random_regular": Kind(graphs.random_regular),
    "erdos_renyi": Kind(graphs.erdos_renyi),
    "complete": Kind(graphs.complete),
    "epidemic": Kind(graphs.epidemic, received, changes=True, balanced=False),
    "edges": Kind(graphs.edges),
    "matrix": Kind(graphs.matrix, None),
}


class Topology(NamedTuple):
    """The graphs of a federation without a server."""

    text: str
    num_clients: int
    seed: int
    symmetric: bool
    """Whether W is symmetric in every round."""
    balanced: bool
    """Whether columns sum to one too, so that mixing keeps the mean of all clients."""
    changes: bool
    """Whether every round has another graph."""

    @property
    def name(self) -> str:
        return self.text.partition(":")[0]

    def links(self, round: int = 0) -> Links:
        """Return the links of a round, with all clients awake."""
        return links_of(self.text, self.num_clients, self.seed, round if self.changes else 0)

    def mixing(self, round: int, awake: tuple[int, ...] | None = None) -> Mixing:
        """Return W of a round; ``awake`` are the clients that take part, None for all."""
        return _mixing(self.text, self.num_clients, self.seed, round if self.changes else 0, awake)

    @property
    def mark(self) -> str:
        """A fingerprint of a graph that was read from a file, which may change; "" for all others."""
        if self.name not in ("edges", "matrix"):
            return ""
        W_NN = self.mixing(0).W_NN
        return fingerprint((W_NN.indptr, W_NN.indices, W_NN.data))

    @property
    def is_tree(self) -> bool:
        return not self.changes and self.symmetric and is_tree(self.links(), self.num_clients)


def parsed(text: str) -> tuple[Kind, dict[str, object]]:
    """Return the kind and the knobs of a topology. Raise ValueError for one that does not exist."""
    kinds: dict[str, Callable[..., object]] = {
        SERVER: _no_knobs,
        **{name: kind.links for name, kind in TOPOLOGIES.items()},
    }
    name, knobs = spec.parse(text, kinds, what="topology")
    return TOPOLOGIES[name], knobs


def _no_knobs() -> None: ...


def absolute_text(text: str) -> str:
    """Return the text with absolute paths, so that it means the same in every folder."""
    if text == SERVER:
        return text
    _, knobs = parsed(text)
    name = text.partition(":")[0]
    return text if knobs == spec.absolute(knobs) else spec.write(name, spec.absolute(knobs))


def find_topology(text: str, num_clients: int, seed: int) -> Topology:
    """Return the topology that ``text`` names. Raise ValueError in one line if there is no such graph.

    A graph that is the same in all rounds must be connected.
    """
    if num_clients < 2:
        raise ValueError(f"topology {text!r} needs at least 2 clients, not {num_clients}; use more, or topology=server")
    kind, knobs = parsed(text)
    changes = kind.changes or bool(knobs.get("redraw"))
    found = Topology(text, num_clients, seed, kind.weights is metropolis, kind.balanced, changes)
    links = found.links()
    if kind.weights is None:
        W_NN = found.mixing(0).W_NN
        try:
            check_rows(W_NN)
        except ValueError as error:
            raise ValueError(f"topology {text!r}: {error}") from None
        transposed = np.abs(np.asarray(W_NN.sum(axis=0)) - 1).max() <= TOLERANCE
        found = found._replace(balanced=bool(transposed), symmetric=bool(abs(W_NN - W_NN.T).max() <= TOLERANCE))
    if not changes and (parts := num_parts(links, num_clients)) > 1:
        raise ValueError(
            f"topology {text!r} with {num_clients} clients and seed {seed} is not connected: it falls into {parts} "
            "parts that never hear of each other; add links"
        )
    return found


@lru_cache(maxsize=16)
def links_of(text: str, num_clients: int, seed: int, round: int) -> Links:
    kind, knobs = parsed(text)
    rng = keys.generator(seed, "topology", round)
    try:
        return kind.links(num_clients, rng, round, **knobs)
    except ValueError as error:
        raise ValueError(f"topology {text!r}: {error}") from None


@lru_cache(maxsize=16)
def _mixing(text: str, num_clients: int, seed: int, round: int, awake: tuple[int, ...] | None) -> Mixing:
    kind, knobs = parsed(text)
    awake_N = np.ones(num_clients, dtype=bool)
    if awake is not None:
        awake_N = np.isin(np.arange(num_clients), awake)
    if kind.weights is None:
        return given(graphs.read_matrix(Path(str(knobs["path"])), num_clients))
    return kind.weights(links_of(text, num_clients, seed, round), awake_N)
