"""The part of a round that another machine needs: messages to a block of clients, and the state that these kept.

A block is a fixed number of consecutive clients of the cohort. A worker has the same problems as the driver. In place
of the server's state it gets ``Sent``, the messages themselves, so that every engine trains and scores a block with
the code that it always uses.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedncv.engine.problem import Problem, State, at_a_time, messages
from fedncv.engine.round import Draw, Outcome, Partial, Reply, partial
from fedncv.engine.sampling import Ids
from fedncv.methods.base import BufferRule, Stepped
from fedncv.tree import tree_map

PORTIONS = 4  # of messages to keep, if clients have different ones

Kind = Literal["train", "before", "after", "gradients"]


class Block(NamedTuple):
    """Work for a worker: clients of one run in one round, in the order of their ids."""

    kind: Kind
    run: int
    round: int
    ids: Ids
    answers: list[bool]
    shares: list[float]

    @property
    def words(self) -> str:
        return f"client {self.ids[0]}" if len(self.ids) == 1 else f"clients {self.ids[0]} to {self.ids[-1]}"


class Sent(NamedTuple):
    """The messages to the clients of a block. A tensor that is the same for all of them has one row."""

    ids: Ids
    down_S: Any
    buffers_SR: Tensor
    shared_P: Tensor | None  # the model that all clients share, if the block is scored


class Trained(NamedTuple):
    """Result of a block that was trained."""

    outcomes: list[Outcome]  # without what the partial sum holds
    partial: Partial | None  # None: no reply, or the method needs each of them


def blocks_of(kind: Kind, run: int, round: int, drawn: Draw, size: int) -> Iterator[Block]:
    """Cut the cohort into blocks. They depend on the cohort alone, and so does the order in which sums are added."""
    for k in range(0, len(drawn.ids), size):
        here = slice(k, k + size)
        yield Block(kind, run, round, drawn.ids[here], drawn.answers[here], drawn.shares[here])


def everybody(ids: Ids) -> Draw:
    """Return the draw of clients that all answer in full: those that are scored or measured."""
    return Draw(ids, [True] * len(ids), [1.0] * len(ids))


def num_samples(problem: Problem, block: Block) -> float:
    """Return the samples that the block's clients go through, once."""
    clients = problem.clients
    sizes = (clients.test_sizes if block.kind == "before" else clients.sizes)[block.ids]
    return float((sizes * np.where(block.answers, block.shares, 0.0)).sum())


class Messages:
    """The server's messages to the cohort. They are made in the same portions as ``arrivals`` makes them."""

    def __init__(self, problem: Problem, state: State, ids: Ids, shared_P: Tensor | None = None) -> None:
        self._problem, self._state, self._ids, self._shared_P = problem, state, ids, shared_P
        self._size = at_a_time(problem)
        self._portion = lru_cache(maxsize=PORTIONS)(self._make)

    def to(self, ids: Ids) -> Sent:
        """Return the messages to these consecutive clients of the cohort."""
        first = int(np.searchsorted(self._ids, ids[0]))
        last, size = first + len(ids), self._size
        parts = [
            tree_map(lambda leaf, k=k: leaf[max(0, first - k) : last - k], self._portion(k))
            for k in range(first // size * size, last, size)
        ]
        down_S, b_SR = tree_map(_together, *parts)
        return Sent(ids, down_S, b_SR, self._shared_P)

    def _make(self, k: int) -> tuple[Any, Tensor]:
        return messages(self._problem, self._state, self._ids[k : k + self._size])


def _together(*parts: Tensor) -> Tensor:
    """Return the rows one after the other; of a view of one row for all, as ``for_all`` makes it, that row."""
    views = all(len(part) == 1 or part.stride(0) == 0 for part in parts)
    if views and len({part.data_ptr() for part in parts}) == 1:
        return parts[0][:1]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def relayed(problem: Problem) -> Problem:
    """Return the problem for a worker: its messages are those of ``Sent``, whichever the server's state is here.

    Engines try a problem at the state that its method would start with, which is therefore understood as well.
    """
    method, rule = problem.method, problem.buffer_rule

    def broadcast(server: Any, ids_S: Tensor) -> Any:
        if not isinstance(server, Sent):
            return method.broadcast(server, ids_S)
        return tree_map(lambda leaf: _rows(server, leaf, ids_S), server.down_S)

    def buffers(state: Any, server: Any, ids_S: Tensor) -> Tensor:
        if isinstance(server, Sent):
            return _rows(server, server.buffers_SR, ids_S)
        return messages(problem, State(0, server, state, {}), ids_S.cpu().numpy())[1]

    changed = method._replace(
        broadcast=broadcast,
        shared=lambda server: server.shared_P if isinstance(server, Sent) else method.shared(server),
        hand_out=None,
        step=_no_server,
    )
    if rule != "personal":
        init: Callable[..., Any] = rule.init if isinstance(rule, BufferRule) else lambda start_R, _federation: start_R
        combine = rule.combine if isinstance(rule, BufferRule) else None
        changed = changed._replace(buffers=BufferRule(init, buffers, _no_server, combine))
    return problem._replace(method=changed)


def _no_server(*_: Any) -> Stepped:
    raise AssertionError("only the driver takes the server's step")


def _rows(sent: Sent, leaf: Tensor, ids_S: Tensor) -> Tensor:
    """Return the rows of these clients."""
    if len(leaf) == 1:
        return leaf[0].expand(len(ids_S), *leaf.shape[1:])
    place = np.searchsorted(sent.ids, ids_S.cpu().numpy())
    return leaf[torch.from_numpy(place).to(leaf.device)]


def returned(problem: Problem, outcomes: list[Outcome]) -> Trained:
    """Return what the driver needs of a block's results: their sum if the method is in the sums form."""
    nothing = problem.model.start_P[:0]
    small = [
        each._replace(trained=each.trained._replace(y_P=nothing)) if each.trained is not None else each
        for each in outcomes
    ]
    if problem.method.form != "sums":
        return Trained(small, None)
    replies = [Reply(each.client, each.trained) for each in small if each.trained is not None and each.finite]
    bare = [
        each._replace(trained=each.trained._replace(up=(), buffers_R=nothing)) if each.trained is not None else each
        for each in small
    ]
    return Trained(bare, partial(problem, replies) if replies else None)
