"""One round, the same in every engine: draw clients, collect their replies, return the new state and its row."""

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedncv.engine import budget, sampling
from fedncv.engine.local import Trained, lr_of, total_step_of
from fedncv.engine.problem import Arrival, DivergedError, Problem, State, arrivals, messages
from fedncv.keys import generator, key_for, uniform_at
from fedncv.methods import base
from fedncv.methods.base import (
    BufferRule,
    Replies,
    ServerAsk,
    Totals,
    Work,
    sums_from_totals,
    sums_of_whole,
    totals_of,
    weighted_sum,
    whole_totals_of,
)
from fedncv.methods.sums import whole_sum
from fedncv.secure.fixed_point import STATISTICS, value, whole
from fedncv.tree import all_finite, leaves, num_bytes, stack, tree_map

RESERVED = (
    "pooled",
    "pooled_standard_error",
    "scored_clients",
    "scored_of",
    "unseen",
    "label_prior",
    "score_name",
    "skipped",
    "failed",
    "stopped",
    "epsilon",
    "delta",
)  # names of a row beside those of `settle`
MEASURED = ("before", "after", "unseen_", "variance")


class Draw(NamedTuple):
    """The clients drawn in a round, and how each of them will respond."""

    ids: sampling.Ids
    answers: list[bool]
    shares: list[float]  # share of the local steps that each client finishes


class Reply(NamedTuple):
    client: int
    trained: Trained


class Outcome(NamedTuple):
    """Result of one drawn client."""

    client: int
    received_bytes: int
    sent_bytes: int
    trained: Trained | None  # None: no reply, or no step to report
    finite: bool = True


class Partial(NamedTuple):
    """Sums over the replies of some clients: all that the server needs of them if the method is in the sums form.

    With a grid they are whole numbers, and adding them in any order gives the same bits.
    """

    totals: Totals
    buffers_R: Tensor  # sum_S n_u b_u

    def plus(self, other: "Partial") -> "Partial":
        """Return the sums over the replies of both."""
        return Partial(self.totals.plus(other.totals), self.buffers_R + other.buffers_R)


def draw(problem: Problem, round: int) -> Draw:
    """Draw the clients of a round, and those of them that drop out or are slow."""
    config, n = problem.config, problem.federation.num_clients
    rng = generator(config.seed, "clients", round)
    if config.sampling == "uniform":
        ids = sampling.draw_uniform(rng, n, config.per_round)
    elif config.sampling == "poisson":
        ids = sampling.draw_poisson(rng, n, config.per_round)
    elif config.sampling == "weighted":
        ids = sampling.draw_systematic(rng, problem.inclusion_N)
    else:
        ids = sampling.draw_available(rng, problem.rates_N, config.per_round)
    answers, shares = [True] * len(ids), [1.0] * len(ids)
    if config.dropout:
        key = key_for(config.seed, "dropout", round)
        answers = [uniform_at(key, u) >= config.dropout for u in ids.tolist()]
    if config.stragglers:
        key = key_for(config.seed, "stragglers", round)
        slow = [uniform_at(key, u) < config.stragglers for u in ids.tolist()]
        shares = [uniform_at(key, n + u) if late else 1.0 for u, late in zip(ids.tolist(), slow, strict=True)]
    return Draw(ids, answers, shares)


def outcome(problem: Problem, arrival: Arrival, trained: Trained | None) -> Outcome:
    """Return the result of a drawn client; ``trained`` is None if it has nothing to report."""
    received_bytes = wire_bytes(problem, arrival.down, arrival.buffers_R)
    return of_client(problem, arrival.client, received_bytes, trained, trained is None or is_finite(trained))


def of_client(
    problem: Problem, client: int, received_bytes: int, trained: Trained | None, finite: bool = True
) -> Outcome:
    """Return the result of a client whose message had so many bytes; count those of its reply."""
    sent_bytes = 0 if trained is None else reply_bytes(problem, trained.up, trained.buffers_R)
    return Outcome(client, received_bytes, sent_bytes, trained, finite)


def wire_bytes(problem: Problem, message: Any, buffers_R: Tensor) -> int:
    """Return the bytes of a message to or from a client, with the running statistics unless they are personal."""
    return num_bytes(message) + (0 if problem.buffer_rule == "personal" else num_bytes(buffers_R))


def reply_bytes(problem: Problem, up: Any, buffers_R: Tensor) -> int:
    """Return the bytes of a client's reply; with a grid, those of its vector of whole numbers."""
    if problem.method.grid is None:
        return wire_bytes(problem, up, buffers_R)
    statistics = 0 if problem.buffer_rule == "personal" else buffers_R.numel()
    numbers = sum(leaf.numel() for _, leaf in leaves(up))
    return problem.method.grid.bytes_of(numbers + statistics + 1)  # and its number of samples


def is_finite(trained: Trained) -> bool:
    """Return whether every number is finite after local training."""
    return all_finite((trained.y_P, trained.buffers_R, trained.up, trained.kept))


def finite_rows(tree: Any) -> Tensor:
    """Return whether all numbers are finite, for each of K clients (the leading axis of every tensor)."""
    tensors = [leaf for _, leaf in leaves(tree)]
    finite_K = torch.ones(len(tensors[0]), dtype=torch.bool, device=tensors[0].device)
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            finite_K &= torch.isfinite(tensor.reshape(len(tensor), -1)).all(dim=1)
    return finite_K


def collect(problem: Problem, replies: list[Reply], awake: sampling.Ids | None = None) -> tuple[Replies, Tensor]:
    """Return the replies and their running statistics in the order of client ids, whatever order they came in."""
    replies = sorted(replies, key=lambda reply: reply.client)
    base.check_reveals(problem.method, replies[0].trained.up)
    ids_S = torch.tensor([reply.client for reply in replies])
    device = problem.model.start_P.device
    collected = Replies(
        ups=stack([reply.trained.up for reply in replies]),
        ids_S=ids_S.to(device),
        sizes_S=problem.federation.sizes_N.cpu()[ids_S].to(device),
        inclusion_S=(torch.from_numpy(problem.inclusion_N)[ids_S] * (1 - problem.config.dropout)).to(device),
        awake_A=None if awake is None else torch.from_numpy(awake),
    )
    return collected, torch.stack([reply.trained.buffers_R for reply in replies])


def nobody(problem: Problem, state: State) -> tuple[Replies, Tensor]:
    """Return the replies of a round without any: their form is that of a client which trained nothing."""
    (arrival,) = arrivals(problem, state, np.zeros(1, dtype=np.int64))
    ask = problem.ask(0, arrival.buffers_R, state.round)
    y_P, scratch = problem.method.begin(ask, arrival.down, arrival.kept.own)
    lr = lr_of(problem, state.round)
    work = Work(1, 1, lr, total_step_of(problem.optimizer, [1], lr))
    up, _ = problem.method.finish(ask, y_P, work, arrival.down, arrival.kept.own, scratch)
    none_S = problem.federation.sizes_N[:0].to(y_P.device)
    ups, b_SR = tree_map(lambda leaf: leaf.new_empty(0, *leaf.shape), (up, arrival.buffers_R))
    return Replies(ups, none_S.long(), none_S, none_S), b_SR


def partial(problem: Problem, replies: list[Reply]) -> Partial:
    """Return the sums over these replies; at least one."""
    collected, b_SR = collect(problem, replies)
    method = problem.method
    if method.grid is None:
        return Partial(totals_of(collected, method.weights), weighted_sum(collected.sizes_S, b_SR))
    sizes_S = collected.sizes_S.to(torch.int64)
    totals = whole_totals_of(collected, method.weights, method.grid)
    return Partial(totals, whole_sum(sizes_S, whole(method.grid, STATISTICS, b_SR)))


def aggregate(
    problem: Problem,
    state: State,
    replies: list[Reply],
    partials: Sequence[Partial] | None = None,
    awake: sampling.Ids | None = None,
) -> tuple[State, dict[str, float]]:
    """Return the state after the server's half of a round, and the named numbers of its step.

    ``partials`` replace what the server needs of the replies; they are added in their order. Without a reply the server
    keeps its state, unless the method has differential privacy: the noise hides that nobody replied. ``awake`` are the
    clients that were reached.
    """
    totals, t = state.totals, state.round
    for _, trained in replies:
        totals = totals._replace(
            samples=totals.samples + trained.samples,
            gradients=totals.gradients + trained.gradients,
            forwards=totals.forwards + trained.forwards,
        )
    state = state._replace(round=t + 1, totals=totals)
    if not replies and problem.method.privacy is None:
        return state, {}
    key = key_for(problem.config.seed, "server", t).to(problem.model.start_P.device)
    ask, grid = ServerAsk(problem.model, t, key), problem.method.grid
    if partials is None and grid is not None:
        partials = [partial(problem, replies)]
    if partials is None or not replies:
        collected, b_SR = collect(problem, replies, awake) if replies else nobody(problem, state)
        given = base.combined(problem.method, state.server, collected)
        if problem.method.screen is not None and problem.buffer_rule != "personal":
            b_SR = problem.method.screen.coordinates(b_SR, collected.sizes_S)
        buffers = _buffers(problem, ask, state, weighted_sum(collected.weight_S, b_SR), (b_SR, collected))
    else:
        totals_S, sum_R = reduce(Partial.plus, partials)
        if grid is None:
            given, mean_R = sums_from_totals(totals_S, problem.method.weights), sum_R / totals_S.samples.to(sum_R)
        else:
            given = sums_of_whole(totals_S, problem.method.weights, grid, problem.dtype)
            mean_R = (value(grid, STATISTICS, sum_R) / totals_S.samples.to(torch.float64)).to(problem.dtype)
        buffers = _buffers(problem, ask, state, mean_R)
    stepped = base.take_step(problem.method, ask, state.server, given)
    kept = state.kept | {reply.client: reply.trained.kept for reply in replies}
    numbers = {name: _number(name, value) for name, value in stepped.numbers.items()}
    return state._replace(server=stepped.server, buffers=buffers, kept=kept), numbers


def _buffers(
    problem: Problem, ask: ServerAsk, state: State, mean_R: Tensor, replies: tuple[Tensor, Replies] | None = None
) -> Any:
    """Return the server's running statistics after a round: the clients' mean, or what the method's rule makes."""
    rule = problem.buffer_rule
    if isinstance(rule, BufferRule):
        given = mean_R if rule.combine is None or replies is None else rule.combine(*replies)
        return rule.step(ask, state.buffers, state.server, given)
    return mean_R if rule == "averaged" else state.buffers


def _number(name: str, value: float | Tensor) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"the method's step returns {name!r} of shape {tuple(value.shape)}; numbers are scalars")
    return float(value)


def settle(
    problem: Problem,
    state: State,
    drawn: Draw,
    outcomes: Iterable[Outcome],
    partials: Sequence[Partial] | None = None,
) -> tuple[State, dict[str, Any]]:
    """Finish a round: skip replies that are not finite, count the work, return the new state and the row.

    ``partials`` are the sums over the finite replies, if the outcomes hold only what else a row and the clients' state
    need.

    Raise DivergedError if a reply or the server's step is not finite, except for replies with diverged=skip.
    """
    replies: list[Reply] = []
    skipped: list[int] = []
    totals, lr = state.totals, lr_of(problem, state.round)
    for client, received_bytes, sent_bytes, trained, finite in outcomes:
        if problem.topology is None:
            totals = totals._replace(
                bytes_down=totals.bytes_down + received_bytes, bytes_up=totals.bytes_up + sent_bytes
            )
        if trained is None:
            continue
        if finite:
            replies.append(Reply(client, trained))
        elif problem.config.diverged == "skip":
            skipped.append(client)
        else:
            raise DivergedError(
                f"client {client} diverged in round {state.round + 1}: loss {float(trained.loss):.3g}, update not "
                f"finite at lr {lr:g}; try a lower lr, or diverged=skip to skip such replies"
            )
    awake = drawn.ids[np.array(drawn.answers, dtype=bool)]
    state, numbers = aggregate(problem, state._replace(totals=totals), replies, partials, awake)
    if numbers and problem.topology is not None:  # neighbours send to each other
        crossed = int(numbers["messages"] * numbers["edge_bytes"])
        totals = state.totals
        totals = totals._replace(bytes_down=totals.bytes_down + crossed, bytes_up=totals.bytes_up + crossed)
        state = state._replace(totals=totals)
    # check the message to the next client: it holds all that matters, and no other client's row is read
    handed_out = [problem.in_use] if problem.method.hand_out else []
    stepped = bool(replies) or problem.method.privacy is not None
    to = drawn.ids[:1] if problem.topology is None else drawn.ids
    to = to if len(to) else np.zeros(1, dtype=np.int64)
    sent = [messages(each, state, to) for each in [problem, *handed_out]] if stepped else []
    if not all_finite(tuple(sent)):
        raise DivergedError(
            f"the server diverged in round {state.round}: its step is not finite although all replies were; "
            "try a smaller server step (server_lr, momentum)"
        )
    losses = [float(reply.trained.loss) for reply in replies]
    result: dict[str, Any] = {
        "round": state.round,
        "lr": lr,
        "asked": len(drawn.ids),
        "replies": len(replies),
        "loss": float(np.mean(losses)) if losses and np.isfinite(losses).all() else None,
        **state.totals._asdict(),
        **budget.row(problem, state),
    }
    for name in numbers:
        if name in result or name in RESERVED or name.startswith(MEASURED):
            raise ValueError(f"the method's step returns the number {name!r}, a name that rows use already; rename it")
    result |= {name: value if np.isfinite(value) else None for name, value in numbers.items()}
    return state, result | ({"skipped": skipped} if skipped else {})
