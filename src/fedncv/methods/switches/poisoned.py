"""Poisoned clients, for studies of robust combining: some clients attack in every round in which they are drawn.

    bad          round(share * N) clients, the first of a permutation keyed by the seed: the same ones for all methods
    label_flip   a bad client trains on the labels C - 1 - y, and sends scale * a_u
    sign_flip    it trains honestly, and sends -scale * a_u
    scaled       it trains honestly, and sends scale * a_u
                 for every array a_u that it sends; fields of one number, running statistics and what it keeps stay

share = 0 is the method itself. Combine it with +median, +trimmed, +krum or +clipped, as in
``fedavg+krum+poisoned:attack=sign_flip,scale=10``. Test samples keep their labels, and a bad client's label prior is
that of its true labels. Scores of a run are over all clients, the bad ones with their own test samples. ``bad_clients``
below gives the ids, and ``bench/robust.py`` scores honest clients alone. A real federation refuses this switch.

Label flipping and scaled attacks: Bagdasaryan et al., AISTATS 2020, https://arxiv.org/abs/1807.00459; Fang et al.,
USENIX Security 2020, https://arxiv.org/abs/1911.11815, section 4 (C - 1 - y). The simplest attacks, not the strongest:
attackers who know the rule and the honest updates do more harm.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedncv.keys import Key, fold, permutation
from fedncv.methods.base import Ask, Batch, Federation, Method, Prediction, ServerAsk, Stepped, Work, rows_at
from fedncv.methods.switches.through import through
from fedncv.tree import tree_map

PURPOSE = 0x706F6973  # "pois": the part of the server's starting key that draws the bad clients


@dataclass(frozen=True, kw_only=True)
class Config:
    share: float = 0.2
    """Share of all clients that attack, from 0 to 1; 0 leaves the method unchanged."""
    attack: Literal["label_flip", "sign_flip", "scaled"] = "sign_flip"
    """Train on flipped labels, send updates with the opposite sign, or send longer updates."""
    scale: float = 1.0
    """Factor of every array that a bad client sends, above 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be from 0 to 1, not {self.share}")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale must be above 0 and finite, not {self.scale}")
        if self.attack == "scaled" and self.scale == 1:
            raise ValueError("attack=scaled needs a scale other than 1, as in poisoned:attack=scaled,scale=10")


class Attacked(NamedTuple):
    server: Any  # the method's own
    bad_N: Tensor  # 1 for a client that attacks


class Down(NamedTuple):
    down: Any  # the method's own
    bad: Tensor


def bad_clients(key: Key, num_clients: int, share: float) -> Tensor:
    """Return the ids of the clients that attack, in order; ``key`` is ``Federation.key``.

    >>> from fedncv.keys import key_for
    >>> len(bad_clients(key_for(0, "server start"), 50, 0.2))
    10
    """
    return permutation(fold(key.cpu(), PURPOSE), num_clients)[: round(share * num_clients)].sort().values


def with_poisoned(method: Method, config: Config = Config()) -> Method:
    """Return ``method`` with clients that attack it."""
    if config.share == 0:
        return method
    if not method.reveals:
        raise ValueError("poisoned needs clients that send something, as in fedavg+poisoned")
    factor = -config.scale if config.attack == "sign_flip" else config.scale
    hand_out = method.hand_out

    def init(x_P: Tensor, federation: Federation) -> Attacked:
        counts = federation.label_counts
        if config.attack == "label_flip" and counts is not None and not counts().any():
            raise ValueError("attack=label_flip needs targets that are classes; use sign_flip or scaled")
        bad_N = x_P.new_zeros(federation.num_clients)
        bad_N[bad_clients(federation.key, federation.num_clients, config.share).to(x_P.device)] = 1.0
        return Attacked(method.init(x_P, federation), bad_N)

    def direction(ask: Ask, y_P: Tensor, batch: Batch, down: Down, own: Any, scratch: Any) -> tuple[Tensor, Any]:
        if config.attack == "label_flip":
            y, last = batch.y, len(ask.client.label_counts_C) - 1
            batch = batch._replace(y=torch.where((down.bad > 0) & (y >= 0) & (y <= last), last - y, y))
        return method.direction(ask, y_P, batch, down.down, own, scratch)

    def finish(ask: Ask, y_P: Tensor, work: Work, down: Down, own: Any, scratch: Any) -> tuple[Any, Any]:
        up, own = method.finish(ask, y_P, work, down.down, own, scratch)
        return tree_map(lambda a: torch.where(down.bad > 0, factor * a, a) if a.dim() else a, up), own

    def predict(ask: Ask, y_P: Tensor, down: Down, own: Any) -> Prediction:
        return method.predict(ask, y_P, down.down, own)

    def step(ask: ServerAsk, attacked: Attacked, combined: Any) -> Stepped:
        stepped = method.step(ask, attacked.server, combined)
        return stepped._replace(server=Attacked(stepped.server, attacked.bad_N))

    return through(method)._replace(
        init=init,
        broadcast=lambda state, ids_S: Down(method.broadcast(state.server, ids_S), rows_at(state.bad_N, ids_S, 0)),
        hand_out=hand_out
        and (lambda state, ids_S: Down(hand_out(state.server, ids_S), rows_at(state.bad_N, ids_S, 0))),
        begin=lambda ask, down, own: method.begin(ask, down.down, own),
        direction=direction,
        finish=finish,
        predict=predict,
        step=step,
        only_simulated="poisoned lets clients attack; leave it out",
        switches=(*method.switches, "poisoned"),
    )
