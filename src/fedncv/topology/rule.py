"""One rule for all graphs: every client holds a copy of the server's state, and mixes it with its neighbours'.

    server_u <- step( sum_v W_uv server_v,  sum_v W_uv up_v )        v: the neighbours of u, and u itself

A method in the sums form asks for means and sums of the fields of ``up``. What it weights by samples enters as
N p_u up_u, p_u = n_u / n, and a sum over clients is N times the mean. So W = 1 1^T / N, with everyone in every round,
gives the server's result, to rounding. Examples, one line each:

    fedavg     x_u <- sum_v W_uv (x_v - N p_v Delta_v)                       D-PSGD, local steps included
    scaffold   c_u <- sum_v W_uv (c_v + c_v' - c_v_before)                   gradient tracking, K-GT

Running statistics are means of numbers that must stay positive, so they are weighted within each neighbourhood:
b_u <- sum_v W_uv n_v b_v / sum_v W_uv n_v, which W = 1 1^T / N makes the server's mean as well.

A client that is away keeps its state and is in nobody's sum. A client that is there without a reply, because it has too
few samples for a step or its update was not finite, passes on its state, and a zero update.

``on_graph`` returns an ordinary method, whose server's state is all the copies, so every engine can train it. Letters:
N all clients, S those that replied, E links.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedncv.methods.base import BufferRule, Federation, Method, Replies, ServerAsk, Stepped, Sums
from fedncv.topology.mixing import Mixing, halfway, mixed, spectral_gap
from fedncv.topology.network import Topology
from fedncv.topology.relay import nothing_yet, paths, relayed
from fedncv.topology.rows import per_row
from fedncv.tree import leaves, num_bytes, row, tree_map

TRIALS = 12  # of whether a step is linear


class Nodes(NamedTuple):
    """All clients' copies of the server's state."""

    server: Any  # a row for every client
    in_flight: Any  # messages of relayed sums; () without them


def on_graph(method: Method, topology: Topology, sizes_N: Tensor, *, statistics_bytes: int = 0) -> Method:
    """Return ``method`` without a server: its state is a copy for every client, mixed over the graph.

    ``statistics_bytes`` are those of one client's running statistics, if they are mixed.
    """
    num_clients, weight_N = topology.num_clients, sizes_N * topology.num_clients / sizes_N.sum()
    hand_out, relays = method.hand_out, method.graph == "tree"
    way = paths(topology.links(), num_clients) if relays else None
    sizes: dict[str, int] = {}  # bytes of a message, known after the first reply

    def init(x_P: Tensor, federation: Federation) -> Nodes:
        server = tree_map(lambda leaf: leaf.expand(num_clients, *leaf.shape), method.init(x_P, federation))
        if way is None:
            return Nodes(server, ())
        ups = tuple(x_P.new_zeros(num_clients, *x_P.shape) for _ in method.reveals)  # `check_graph`: all of this size
        return Nodes(server, nothing_yet((server, ups), topology.links()))

    def broadcast(nodes: Nodes, ids_S: Tensor) -> Any:
        return _to_each(method.broadcast, nodes, ids_S)

    def step(ask: ServerAsk, nodes: Nodes, replies: Replies) -> Stepped:
        mixing = _mixing(method, topology, ask.round, replies)
        ups_N = _weighted(replies, method, weight_N, num_clients)
        if way is None:
            server_N, mean_N = mixed(mixing.W_NN, (nodes.server, ups_N))
            in_flight: Any = ()
        else:
            (server_N, means), in_flight = relayed((nodes.server, tuple(ups_N.values())), nodes.in_flight, way)
            mean_N = dict(zip(ups_N, means, strict=True))
        stepped, numbers = stepped_rows(method, ask, server_N, mean_N, (num_clients, float(sizes_N.sum())))
        awake_N = torch.from_numpy(mixing.awake_N).to(replies.ids_S.device)
        after = tree_map(lambda new, old: _where(awake_N, new, old), stepped, nodes.server)
        if "message" not in sizes:
            sizes["message"] = message_bytes(method, ask, row(nodes.server, 0), row(replies.ups, 0)) + statistics_bytes
        found: dict[str, float | Tensor] = {
            **{name: values[awake_N].double().mean() for name, values in numbers.items()},
            **measured(method, after, ups_N, mean_N, mixing),
            "edge_bytes": sizes["message"],
            "messages": mixing.num_links,
        }
        return Stepped(Nodes(after, in_flight), None, found)

    return method._replace(
        init=init,
        broadcast=broadcast,
        hand_out=hand_out and (lambda nodes, ids_S: _to_each(hand_out, nodes, ids_S)),
        combine=lambda _nodes, replies: replies,
        step=step,
        shared=lambda _nodes: None,
        model=None,
        with_model=None,
        buffers=_statistics(method, topology, sizes_N),
    )


def stepped_rows(
    method: Method, ask: ServerAsk, server_N: Any, mean_N: Mapping[str, Tensor], of: tuple[int, float]
) -> tuple[Any, dict[str, Tensor]]:
    """Return step(server_u, sums_u) of every client u, and its named numbers.

    ``mean_N`` are the mixed fields of ``up``: of those weighted by samples sum_v W_uv N p_v a_v, of others
    sum_v W_uv a_v. ``of`` is the number of clients and of all their samples.
    """
    num_clients, samples = of

    def one(server: Any, means: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        def total(name: str) -> Tensor:
            return means[name] * (num_clients if method.weights.get(name) == "one" else samples)

        like = next(iter(means.values()), torch.empty(()))
        sums = Sums(means.__getitem__, total, like.new_full((), samples, dtype=torch.float64), num_clients)
        stepped = method.step(ask, server, sums)
        return stepped.server, {name: torch.as_tensor(value) for name, value in stepped.numbers.items()}

    try:
        found: tuple[Any, dict[str, Tensor]] = per_row(one, server_N, dict(mean_N))
    except RuntimeError as error:
        if "data-dependent" not in str(error):
            raise
        raise ValueError(
            "the method's step decides by the value of a tensor, which cannot be done for all clients at once; "
            "write it with torch.where, or use topology=server"
        ) from None
    return found


def measured(
    method: Method, server_N: Any, ups_N: Mapping[str, Tensor], mean_N: Mapping[str, Tensor], mixing: Mixing
) -> dict[str, float | Tensor]:
    """Return the numbers that a row has about the graph.

    spectral_gap            1 - ||(I - J) W||_2 of this round's matrix, among the clients that are there
    consensus_distance      sqrt( 1/N sum_u ||x_u - x_mean||^2 ) after mixing
    mixed_update_variance   1/N sum_u ||sum_v W_uv a_v - a_mean||^2, a_v = N p_v Delta_v: what a server would remove
    """
    x_N = per_row(method.model, server_N) if method.model is not None else server_N
    numbers: dict[str, float | Tensor] = {"spectral_gap": spectral_gap(mixing)}
    numbers["consensus_distance"] = _spread(x_N).sqrt()
    if "delta_P" in ups_N:
        awake_N = torch.from_numpy(mixing.awake_N).to(ups_N["delta_P"].device)
        away_NP = mean_N["delta_P"][awake_N] - ups_N["delta_P"][awake_N].mean(dim=0)
        numbers["mixed_update_variance"] = away_NP.double().square().sum(dim=1).mean()
    return numbers


def message_bytes(method: Method, ask: ServerAsk, server: Any, up: Any) -> int:
    """Return the bytes that a client sends to one neighbour in a round, without running statistics.

    If the server's step is linear, averaging steps is the step of the averages: a client takes the step with its own
    reply and sends the result, one copy of the state. Otherwise it sends its state and its reply.
    """
    state = [leaf for _, leaf in leaves(server) if isinstance(leaf, Tensor)]
    sends = 0 if is_linear(method, ask, server, up) else num_bytes(up)
    return sends + num_bytes(tuple(state)) + (8 if method.graph == "tree" else 0)  # the count


def is_linear(method: Method, ask: ServerAsk, server: Any, up: Any) -> bool:
    """Return whether the step of a mean of states and replies is the mean of the steps; by trial, in float64."""
    fields = {path.rpartition(".")[2]: leaf for path, leaf in leaves(up)}
    if not any(isinstance(leaf, Tensor) for _, leaf in leaves((server, fields))):
        return True
    rng = torch.Generator().manual_seed(0)

    def drawn(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return torch.stack([leaf, leaf])
        scale = 1000 ** (2 * torch.rand((), generator=rng, dtype=torch.float64) - 1)  # each of its own
        return (scale * torch.rand(2, *leaf.shape, generator=rng, dtype=torch.float64)).to(leaf.device)

    for _ in range(TRIALS):
        server_2, means_2 = tree_map(drawn, server), {name: drawn(leaf) for name, leaf in fields.items()}
        server_1, means_1 = tree_map(_middle, (server_2, means_2))
        each, _ = stepped_rows(method, ask, server_2, means_2, (2, 7.0))
        once, _ = stepped_rows(method, ask, server_1, means_1, (2, 7.0))
        pairs = zip(leaves(each), leaves(once), strict=True)
        if not all(_is_middle(one, two) for (_, two), (_, one) in pairs):
            return False
    return True


# ---- parts ---------------------------------------------------------------------------------------------------


def _mixing(method: Method, topology: Topology, round: int, replies: Replies) -> Mixing:
    """Return the round's matrix among the clients that are there. Raise ValueError if the method needs all of them."""
    awake = replies.ids_S if replies.awake_A is None else replies.awake_A
    everyone = len(awake) == topology.num_clients
    mixing = topology.mixing(round, None if everyone else tuple(awake.tolist()))
    if method.graph == "any":
        return mixing
    if len(replies.ids_S) < topology.num_clients:
        absent = sorted(set(range(topology.num_clients)) - set(replies.ids_S.tolist()))[0]
        raise ValueError(
            f"this method needs a reply of every client in every round, but client {absent} has none in round "
            f"{round + 1} (too few samples for a step?); use another method, or clients with more samples"
        )
    return halfway(mixing) if method.graph == "symmetric" else mixing


def _to_each(send: Any, nodes: Nodes, ids_S: Tensor) -> Any:
    """Return the messages of the copies of these clients, each to its own client."""
    copies_S = tree_map(lambda leaf: leaf.index_select(0, ids_S), nodes.server)
    if not any(isinstance(leaf, Tensor) for _, leaf in leaves(copies_S)):
        return send(copies_S, ids_S)
    return per_row(lambda server, u: row(send(server, u[None]), 0), copies_S, ids_S)


def _weighted(replies: Replies, method: Method, weight_N: Tensor, num_clients: int) -> dict[str, Tensor]:
    """Return the fields of all clients' replies, times N p_u if they are weighted by samples; 0 without a reply."""
    found = {}
    for path, leaf in leaves(replies.ups):
        name = path.rpartition(".")[2]
        if method.weights.get(name, "samples") == "samples":
            weight_S = weight_N.to(leaf.device)[replies.ids_S].to(leaf.dtype)
            leaf = leaf * weight_S.reshape(-1, *[1] * (leaf.dim() - 1))
        found[name] = leaf.new_zeros(num_clients, *leaf.shape[1:]).index_copy(0, replies.ids_S, leaf)
    return found


def _is_middle(one: Any, two: Any) -> bool:
    numbers = isinstance(two, Tensor) and two.is_floating_point()
    return not numbers or torch.allclose(_middle(two), one, rtol=1e-9, atol=1e-9)


def _middle(two: Tensor) -> Tensor:
    return two.mean(dim=0, keepdim=True) if two.is_floating_point() else two[:1]


def _where(awake_N: Tensor, new_N: Tensor, old_N: Tensor) -> Tensor:
    return torch.where(awake_N.reshape(-1, *[1] * (new_N.dim() - 1)), new_N, old_N)


def _spread(tree_N: Any) -> Tensor:
    """Return 1/N sum_u ||a_u - a_mean||^2 over all tensors of the tree, in float64."""
    parts = [leaf for _, leaf in leaves(tree_N) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    away = [leaf - leaf.mean(dim=0) for leaf in parts]
    return sum((each.double().square().sum() / len(each) for each in away), torch.zeros((), dtype=torch.float64))


def _statistics(method: Method, topology: Topology, sizes_N: Tensor) -> Any:
    """Return the rule for running statistics: a copy for every client, unless they are personal already."""
    inner = method.buffers
    if inner == "personal":
        return inner
    rule = inner if isinstance(inner, BufferRule) else None

    def init(start_R: Tensor, federation: Federation) -> Any:
        state = start_R if rule is None else rule.init(start_R, federation)
        return tree_map(lambda leaf: leaf.expand(topology.num_clients, *leaf.shape), state)

    def broadcast(state_N: Any, nodes: Nodes, ids_S: Tensor) -> Tensor:
        if rule is None:
            found: Tensor = state_N.index_select(0, ids_S)
            return found
        send = rule.broadcast
        mine = tree_map(lambda leaf: leaf.index_select(0, ids_S), (state_N, nodes.server))
        sent: Tensor = per_row(lambda state, server, u: send(state, server, u[None])[0], *mine, ids_S)
        return sent

    def step(ask: ServerAsk, state_N: Any, nodes: Nodes, given: tuple[Tensor, Replies]) -> Any:
        b_SR, replies = given
        mixing = _mixing(method, topology, ask.round, replies)
        everyone = torch.arange(topology.num_clients, device=b_SR.device)
        b_NR = state_N if rule is None else broadcast(state_N, nodes, everyone)
        b_NR = b_NR.index_copy(0, replies.ids_S, b_SR)
        n_N = sizes_N.to(b_NR.device).clamp(min=1e-9)  # a client alone without samples keeps its statistics
        mean_NR = mixed(mixing.W_NN, n_N.to(b_NR)[:, None] * b_NR) / mixed(mixing.W_NN, n_N)[:, None].to(b_NR)
        after: Any = mean_NR
        if rule is not None:
            after = per_row(
                lambda state, server, b_R: rule.step(ask, state, server, b_R),
                mixed(mixing.W_NN, state_N), nodes.server, mean_NR,
            )  # fmt: skip
        awake_N = torch.from_numpy(mixing.awake_N).to(b_NR.device)
        return tree_map(lambda new, old: _where(awake_N, new, old), after, state_N)

    return BufferRule(init, broadcast, step, combine=lambda b_SR, replies: (b_SR, replies))
