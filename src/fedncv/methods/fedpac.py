"""FedPAC: align features with everybody's class centroids, and combine the heads of clients that are alike.

    client   at the received body, in eval mode (a pass):   h_u = rows pi_{u,c} * mean z of class c,
             v_u = ( mean |z|^2 - sum_c |h_{u,c}|^2 ) / n_u
             head <- head - lr * grad of CE, the body held fixed           head_epochs
             body <- body - lr * grad of  CE + lam * mean_F (z - m_y)^2    the other epochs, the head held fixed;
                                                                            m_c the global centroid, if there is one
             at the trained body, in eval mode (a pass):    s_u,c = sum of z of class c, n_u,c
             sends  Delta_u of the body, head_u, h_u, v_u, s_u, n_u
    server   body <- body - sum_S p_u Delta_u
             m_c = sum_S s_u,c / sum_S n_u,c    for classes that somebody in S holds
             u in S gets the head  sum_j alpha_j head_j  with the alpha >= 0, sum alpha = 1, that minimises
             sum_j alpha_j^2 v_j + | sum_j alpha_j (h_u - h_j) |^2

Xu, Tong and Huang, ICLR 2023, https://arxiv.org/abs/2306.11867, Algorithm 1.
Departures from the paper: the study's local epochs are the sum of both parts. The server keeps the combined heads, so
clients keep nothing; a client that has not taken part has the initial head. A class that no client of any round held
has no centroid and no pull (the authors' code pulls to the client's own centroid then).

Letters: F = features, Q = parameters of the body, H = of the head, S = clients of the round.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedncv.methods.base import (
    Ask,
    Batch,
    Federation,
    Method,
    Phase,
    Replies,
    ServerAsk,
    Stepped,
    Work,
    for_all,
    rows_at,
    weighted_sum,
)
from fedncv.methods.fedavg import fedavg
from fedncv.methods.gathered import members

RIDGE = 1e-10  # of the mean diagonal: makes the program strictly convex where clients are equal


@dataclass(frozen=True, kw_only=True)
class Config:
    lam: float = 1.0
    """Weight of the alignment with the centroids, at least 0."""
    head_epochs: int = 1
    """Number of local epochs, at the beginning, that train the head; at least 1. The others train the body, which
    gets at least one epoch."""

    def __post_init__(self) -> None:
        if not 0 <= self.lam < math.inf:
            raise ValueError(f"lam must be at least 0 and finite, not {self.lam}")
        if not self.head_epochs >= 1:
            raise ValueError(f"head_epochs must be at least 1, not {self.head_epochs}")


class Server(NamedTuple):
    body_Q: Tensor
    head_NH: Tensor
    m_CF: Tensor  # global centroids
    known_C: Tensor  # 1 for a class that has one
    start_H: Tensor  # head of a client that was never drawn


class Down(NamedTuple):
    body_Q: Tensor
    head_H: Tensor
    m_CF: Tensor
    known_C: Tensor


class Up(NamedTuple):
    delta_Q: Tensor
    head_H: Tensor
    h_CF: Tensor
    v: Tensor
    s_CF: Tensor
    n_C: Tensor


class Seen(NamedTuple):
    """Sums over the samples of a pass."""

    s_CF: Tensor
    n_C: Tensor
    squares: Tensor  # of |z|^2


class Scratch(NamedTuple):
    first: Seen  # at the received body
    last: Seen  # at the trained body


def program(v_S: NDArray[np.float64], h_SD: NDArray[np.float64], u: int) -> NDArray[np.float64]:
    """Return the alpha of client u.

    On the simplex the minimum of a' P a is at a / sum(a) of the non-negative a that minimises a' P a / 2 - sum(a), a
    problem of non-negative least squares: |L' a - L^-1 1|^2 with P = L L'.
    """
    from scipy.optimize import nnls  # takes as long to import as all methods together

    d_SD = h_SD[u] - h_SD
    P = np.diag(v_S) + d_SD @ d_SD.T
    size = np.trace(P) / len(P)
    if size <= 0:  # no features: all heads are as good
        alone: NDArray[np.float64] = np.eye(len(P))[u]
        return alone
    L = np.linalg.cholesky(P / size + RIDGE * np.eye(len(P)))
    a: NDArray[np.float64] = nnls(L.T, np.linalg.solve(L, np.ones(len(P))))[0]
    alpha: NDArray[np.float64] = a / a.sum()
    return alpha


def fedpac(config: Config = Config()) -> Method:
    def init(x_P: Tensor, federation: Federation) -> Server:
        layout, classes = federation.layout, federation.num_classes
        head_NH = x_P[layout.head].repeat(federation.num_clients, 1)
        m_CF, known_C = x_P.new_zeros(classes, layout.features.numel()), x_P.new_zeros(classes)
        return Server(x_P[layout.body], head_NH, m_CF, known_C, x_P[layout.head])

    def phases(epochs: int) -> tuple[Phase, ...]:
        look = Phase(1, trains=(), mode="eval")
        head = Phase(config.head_epochs, trains=("head",), mode="still")
        return look, head, Phase(max(1, epochs - config.head_epochs), trains=("body",)), look

    def broadcast(server: Server, ids_S: Tensor) -> Down:
        shared = (for_all(each, ids_S) for each in (server.body_Q, server.m_CF, server.known_C))
        body_SQ, m_SCF, known_SC = shared
        return Down(body_SQ, rows_at(server.head_NH, ids_S, server.start_H), m_SCF, known_SC)

    def begin(_ask: Ask, down: Down, _own: Any) -> tuple[Tensor, Scratch]:
        none = Seen(torch.zeros_like(down.m_CF), torch.zeros_like(down.known_C), down.m_CF.new_zeros(()))
        return torch.cat([down.body_Q, down.head_H]), Scratch(none, none)

    def seen(ask: Ask, y_P: Tensor, batch: Batch, before: Seen) -> Seen:
        z_BF = ask.forward(y_P, batch).features_BF.flatten(1)
        of_class_BC = members(batch.y, batch.weight_B, len(before.n_C)).to(z_BF.dtype)
        squares = (batch.weight_B * z_BF.square().sum(dim=1)).sum()
        return Seen(before.s_CF + of_class_BC.T @ z_BF, before.n_C + of_class_BC.sum(dim=0), before.squares + squares)

    def direction(
        ask: Ask, y_P: Tensor, batch: Batch, down: Down, _own: Any, scratch: Scratch
    ) -> tuple[Tensor, Scratch]:
        if batch.y.is_floating_point() or batch.y.dim() > 1:
            raise ValueError("fedpac needs class centroids: the targets must be one label per sample")
        if ask.phase == 0:
            return torch.zeros_like(y_P), scratch._replace(first=seen(ask, y_P, batch, scratch.first))
        if ask.phase == 1:
            return ask.grad(y_P, batch), scratch
        if ask.phase == 3:
            return torch.zeros_like(y_P), scratch._replace(last=seen(ask, y_P, batch, scratch.last))

        def loss(y_P: Tensor) -> Tensor:
            logits_BC, z_BF = ask.forward(y_P, batch)
            apart_B = (z_BF.flatten(1) - down.m_CF[batch.y]).square().mean(dim=1) * down.known_C[batch.y]
            losses_B = ask.losses(logits_BC, batch) + config.lam * apart_B
            return (batch.weight_B * losses_B).sum() / batch.size

        return ask.grad_of(loss, y_P), scratch

    def finish(ask: Ask, y_P: Tensor, _work: Work, down: Down, own: Any, scratch: Scratch) -> tuple[Up, Any]:
        (s_CF, n_C, squares), last = scratch
        n = n_C.sum().clamp(min=1)
        h_CF = s_CF / n  # pi_c times the mean of class c
        v = (squares / n - h_CF.square().sum()) / n
        body_Q, head_H = y_P[ask.layout.body], y_P[ask.layout.head]
        return Up(down.body_Q - body_Q, head_H, h_CF, v, last.s_CF, last.n_C), own

    def step(_ask: ServerAsk, server: Server, replies: Replies) -> Stepped:
        up: Up = replies.ups
        v_S = up.v.double().clamp(min=0).cpu().numpy()
        h_SD = up.h_CF.flatten(1).double().cpu().numpy()
        alpha_SS = np.stack([program(v_S, h_SD, u) for u in range(len(v_S))])
        head_SH = torch.from_numpy(alpha_SS).to(up.head_H) @ up.head_H
        n_C = up.n_C.sum(dim=0)
        m_CF = torch.where((n_C > 0)[:, None], up.s_CF.sum(dim=0) / n_C.clamp(min=1)[:, None], server.m_CF)
        following = Server(
            server.body_Q - weighted_sum(replies.weight_S, up.delta_Q),
            server.head_NH.index_copy(0, replies.ids_S, head_SH),
            m_CF,
            torch.maximum(server.known_C, (n_C > 0).to(server.known_C)),
            server.start_H,
        )
        return Stepped(following, numbers={"own_head": float(alpha_SS.diagonal().mean())})

    return fedavg()._replace(
        init=init,
        phases=phases,
        broadcast=broadcast,
        begin=begin,
        direction=direction,
        finish=finish,
        combine=lambda _server, replies: replies,  # the program compares single clients
        step=step,
        shared=lambda _server: None,
        model=None,
        with_model=None,
        reveals={
            "delta_Q": "the client's update of the body",
            "head_H": "its head, which tells which classes it holds",
            "h_CF": "the mean features of each class, times its share of the client's samples",
            "v": "how far its features spread",
            "s_CF": "the sum of the features of each class",
            "n_C": "how many samples of each class it holds",
        },
        refuses={"samples": "fedpac looks at its samples in phases of its own, as in fedrep+samples"},
    )
