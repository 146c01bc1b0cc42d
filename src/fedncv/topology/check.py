"""Refuse a method or a setting that cannot do without a server, in one line that says which part needs it."""

from typing import Any

import torch
from torch import Tensor

from fedncv.config import RunConfig, own_object, short_name
from fedncv.data.unseen import num_unseen
from fedncv.keys import key_for
from fedncv.methods import needs_each_reply
from fedncv.methods.base import Federation, Method
from fedncv.topology.network import SERVER, Topology, find_topology
from fedncv.tree import leaves


def check_graph(config: RunConfig, method: Method | None) -> None:
    """Raise ValueError if these settings, or the method, do not fit the topology. None: it is known later."""
    text, name = config.topology, short_name(config.method)
    if config.unseen and text != SERVER:
        raise ValueError(
            f"unseen is {config.unseen:g}, but with topology {text!r} every client has a model of its own, and one "
            "that never trains has none; set unseen to 0"
        )
    members = config.clients - num_unseen(config.unseen, config.clients)
    everyone = config.per_round == members and not config.dropout and config.diverged == "stop"
    needed = method is not None and method.graph != "any" and not (text == SERVER and method.graph == "tree")
    if needed and not everyone:
        raise ValueError(
            f"{name} needs every client in every round: set per_round to {members}, the number of clients that train, "
            "dropout to 0 and diverged to stop"
        )
    if text == SERVER:
        return
    topology = find_topology(text, config.clients, config.seed)
    if config.per_round != config.clients:
        raise ValueError(
            f"per_round is {config.per_round}, but without a server nobody draws clients: with topology {text!r} all "
            f"of them train in every round; set per_round to {config.clients} (dropout makes clients fall away)"
        )
    if config.sampling != "uniform":
        raise ValueError(f"sampling={config.sampling} draws clients, which needs a server; leave it out with {text!r}")
    if config.stream:
        raise ValueError(
            f"topology {text!r} needs clients whose share of all samples is known and does not change; leave stream "
            "empty, or use topology=server"
        )
    if config.engine == "ray":
        raise ValueError("engine=ray has no topologies yet; use sequential, processes or stacked")
    if topology.name == "matrix" and config.dropout:
        raise ValueError("the weights of topology matrix are for all clients; set dropout to 0, or use another graph")
    if method is not None:
        _check_method(config, method, topology, name)


def _check_method(config: RunConfig, method: Method, topology: Topology, name: str) -> None:
    text = topology.text
    if method.form != "sums":
        part = name if own_object(config.method) else needs_each_reply(config.method)
        instead = "; drift:memory=clients needs only sums, as in fedncv-sums" if part == "drift" else ""
        raise ValueError(
            f"{name} cannot run without a server: {part} looks at single replies, or remembers clients at the server, "
            f"and on a graph everyone has only weighted sums{instead or '; use a method in the sums form'}"
        )
    if method.privacy is not None:
        raise ValueError(
            f"{name} cannot run without a server: +dp adds its noise to sums at the server; leave +dp out, or use "
            "topology=server"
        )
    if method.grid is not None:
        raise ValueError(
            f"{name} cannot run without a server: +fixed_point is for exact sums at the server, and on a graph "
            "everyone has weighted means; leave +fixed_point out, or use topology=server"
        )
    if "topology" in method.refuses:
        raise ValueError(f"{name} cannot run without a server: {method.refuses['topology']}; use topology=server")
    if method.joining:
        raise ValueError(
            f"{name} cannot run without a server: clients tell it {', '.join(method.joining)} as they join"
        )
    if method.graph == "symmetric" and (not topology.symmetric or topology.changes):
        raise ValueError(
            f"{name} needs the same symmetric weights in every round, which {text!r} does not have; use a fixed "
            "undirected graph, such as ring"
        )
    if method.graph == "tree" and not topology.is_tree:
        raise ValueError(f"{name} relays sums on a tree, and {text!r} is not one; use chain, tree or star")
    if method.graph == "tree" and set(method.reveals) != {"delta_P"}:
        more = ", ".join(sorted(set(method.reveals) - {"delta_P"}))
        raise ValueError(f"{name} relays models alone, and its clients send {more} too; leave that switch out")
    tracked = _beside_the_model(method, config)
    keeps_the_mean = topology.balanced and not (config.dropout and not topology.symmetric)
    if tracked and not keeps_the_mean:
        because = " once clients fall away" if topology.balanced else ""
        raise ValueError(
            f"{name} tracks {tracked} over the graph, which needs weights whose columns sum to one too, and those of "
            f"{text!r} do not{because}; use an undirected graph, or a method that keeps the model alone, as fedavg"
        )


def _beside_the_model(method: Method, config: RunConfig) -> str:
    """Return what the server keeps beside one vector, the model; empty if nothing."""
    zero = torch.zeros(2, dtype=torch.float64)
    layout: Any = _Halves()
    sizes_N = torch.ones(config.clients, dtype=torch.float64)
    federation = Federation(
        config.clients, config.per_round, config.rounds, sizes_N, 1, layout, key_for(config.seed, "server start")
    )
    kept = [path.rpartition(".")[2] for path, leaf in leaves(method.init(zero, federation)) if isinstance(leaf, Tensor)]
    return ", ".join(kept[1:]) if method.model is None else ", ".join(name for name in kept if name != "x_P")


class _Halves:
    """A layout of two parameters, body and head."""

    body, head = slice(0, 1), slice(1, 2)
