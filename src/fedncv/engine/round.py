"""A round as every engine has it: who is drawn, what becomes of their replies, the new state and its row."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedncv.engine import sampling
from fedncv.engine.local import Trained, lr_of
from fedncv.engine.problem import Arrival, DivergedError, Problem, State, messages
from fedncv.keys import generator, key_for
from fedncv.methods import base
from fedncv.methods.base import BufferRule, Replies, ServerAsk, weighted_sum
from fedncv.tree import all_finite, leaves, num_bytes, stack


class Draw(NamedTuple):
    """Who was asked this round, and what becomes of them."""

    ids: sampling.Ids
    answers: list[bool]
    shares: list[float]  # of the local steps that the client finishes


class Reply(NamedTuple):
    client: int
    trained: Trained


class Outcome(NamedTuple):
    """What became of one client that was asked."""

    client: int
    received_bytes: int
    trained: Trained | None  # None: no answer, or no step to report
    finite: bool = True


def draw(problem: Problem, round: int) -> Draw:
    config, n = problem.config, problem.federation.num_clients
    rng = generator(config.seed, "clients", round)
    if config.sampling == "uniform":
        ids = sampling.draw_uniform(rng, n, config.per_round)
    elif config.sampling == "weighted":
        ids = sampling.draw_systematic(rng, problem.inclusion_N)
    else:
        ids = sampling.draw_available(rng, problem.rates_N, config.per_round)
    lost = generator(config.seed, "dropout", round).random(n) < config.dropout
    slow = generator(config.seed, "stragglers", round).random((2, n))
    shares = np.where(slow[0] < config.stragglers, slow[1], 1.0)
    return Draw(ids, [not lost[u] for u in ids], [float(shares[u]) for u in ids])


def outcome(problem: Problem, arrival: Arrival, trained: Trained | None) -> Outcome:
    """Return what became of a client that was asked; ``trained`` is None where it has nothing to report."""
    received_bytes = wire_bytes(problem, arrival.down, arrival.buffers_R)
    return Outcome(arrival.client, received_bytes, trained, trained is None or is_finite(trained))


def wire_bytes(problem: Problem, message: Any, buffers_R: Tensor) -> int:
    """Return the bytes of a message to or from a client, with the running statistics unless those are its own."""
    return num_bytes(message) + (0 if problem.buffer_rule == "personal" else num_bytes(buffers_R))


def is_finite(trained: Trained) -> bool:
    """Return whether every number that local training left is finite."""
    return all_finite((trained.y_P, trained.buffers_R, trained.up, trained.kept))


def finite_rows(tree: Any) -> Tensor:
    """Return for each of K clients, the leading axis of every tensor, whether all its numbers are finite."""
    tensors = [leaf for _, leaf in leaves(tree)]
    finite_K = torch.ones(len(tensors[0]), dtype=torch.bool, device=tensors[0].device)
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            finite_K &= torch.isfinite(tensor.reshape(len(tensor), -1)).all(dim=1)
    return finite_K


def collect(problem: Problem, replies: list[Reply]) -> tuple[Replies, Tensor]:
    """The replies and their running statistics in the order of their ids, whatever order they came in."""
    replies = sorted(replies, key=lambda reply: reply.client)
    ids_S = torch.tensor([reply.client for reply in replies])
    device = problem.model.start_P.device
    collected = Replies(
        ups=stack([reply.trained.up for reply in replies]),
        ids_S=ids_S.to(device),
        sizes_S=problem.federation.sizes_N.cpu()[ids_S].to(device),
        inclusion_S=(torch.from_numpy(problem.inclusion_N)[ids_S] * (1 - problem.config.dropout)).to(device),
    )
    return collected, torch.stack([reply.trained.buffers_R for reply in replies])


def aggregate(problem: Problem, state: State, replies: list[Reply]) -> tuple[State, dict[str, float]]:
    """Return the state after the server's half of a round, and numbers that its step gave a name.

    Without a reply the server keeps its state.
    """
    totals, t = state.totals, state.round
    for _, trained in replies:
        totals = totals._replace(
            samples=totals.samples + trained.samples,
            gradients=totals.gradients + trained.gradients,
            forwards=totals.forwards + trained.forwards,
        )
    state = state._replace(round=t + 1, totals=totals)
    if not replies:
        return state, {}
    collected, b_SR = collect(problem, replies)
    ask = ServerAsk(problem.model, t, key_for(problem.config.seed, "server", t).to(b_SR.device))
    rule, buffers = problem.buffer_rule, state.buffers
    if isinstance(rule, BufferRule) and rule.combine is not None:
        buffers = rule.step(ask, buffers, state.server, rule.combine(b_SR, collected))
    elif isinstance(rule, BufferRule):
        buffers = rule.step(ask, buffers, state.server, weighted_sum(collected.weight_S, b_SR))
    elif rule == "averaged":
        buffers = weighted_sum(collected.weight_S, b_SR)
    stepped = base.aggregate(problem.method, ask, state.server, collected)
    kept = state.kept | {reply.client: reply.trained.kept for reply in replies}
    numbers = {name: float(value) for name, value in stepped.numbers.items()}
    return state._replace(server=stepped.server, buffers=buffers, kept=kept), numbers


def settle(problem: Problem, state: State, drawn: Draw, outcomes: Iterable[Outcome]) -> tuple[State, dict[str, Any]]:
    """The end of a round, the same in every engine: who is left out, what is counted, the new state, the row."""
    replies: list[Reply] = []
    skipped: list[int] = []
    totals, lr = state.totals, lr_of(problem, state.round)
    for client, received_bytes, trained, finite in outcomes:
        totals = totals._replace(bytes_down=totals.bytes_down + received_bytes)
        if trained is None:
            continue
        sent_bytes = wire_bytes(problem, trained.up, trained.buffers_R)
        totals = totals._replace(bytes_up=totals.bytes_up + sent_bytes)
        if finite:
            replies.append(Reply(client, trained))
        elif problem.config.diverged == "skip":
            skipped.append(client)
        else:
            raise DivergedError(
                f"client {client} diverged in round {state.round + 1}: loss {float(trained.loss):.3g}, update not "
                f"finite at lr {lr:g}; try a lower lr, or diverged=skip to leave such replies out"
            )
    state, numbers = aggregate(problem, state._replace(totals=totals), replies)
    # what the next client would be sent: all that matters of the server, without a look at every client's row
    if replies and not all_finite(messages(problem, state, drawn.ids[:1])):
        raise DivergedError(
            f"the server diverged in round {state.round}: its step is not finite though all replies were; "
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
    }
    for name in numbers:
        if name in result:
            raise ValueError(f"the method's step returns the number {name!r}, which every row has; rename it")
    result |= {name: value if np.isfinite(value) else None for name, value in numbers.items()}
    return state, result | ({"skipped": skipped} if skipped else {})
