"""pFedSim: mix every client's body from the bodies of clients with similar heads.

    first rounds      FedAvg, until the share warm_up of all rounds is over
    then, server      sends u   body = sum_v w_uv body_v / sum_v w_uv,   its own head_u
                      over the clients v that replied since, u included, with
                      w_uv = -log(1 - phi_uv),   phi_uv = cos(head_u, head_v) clamped to [0, 0.9999]
                      a client that has not replied gets the average  sum_v n_v y_v / sum_v n_v
    client            trains all layers, sends its model
    running statistics are mixed as the bodies are

Tan et al., 2023, https://arxiv.org/abs/2305.15706, Algorithm 1.
Departures from the paper: the cosine compares whole heads; the authors' code averages the cosines of the rows of
the classifier's matrix. All clients that replied since the warm-up are compared, not only those of one round, so
mixing begins with the second client. Before its first reply a client gets the average of the others; in the
authors' code, the model at the end of the warm-up. The server sends the head too, so clients store nothing.
Letters: Q = parameters of the body, H = of the head.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedncv.methods.base import (
    Ask,
    BufferRule,
    Federation,
    Method,
    ServerAsk,
    Stepped,
    Work,
    for_all,
    moved_by,
    rows_at,
)
from fedncv.methods.fedavg import Down, fedavg
from fedncv.methods.sums import Replies, weighted_sum

LARGEST = 0.9999  # similarity of a client with itself, and the largest of two clients


@dataclass(frozen=True, kw_only=True)
class Config:
    warm_up: float = 0.5
    """Share of all rounds that train as FedAvg, from 0 to 1; 1 is FedAvg."""

    def __post_init__(self) -> None:
        if not 0 <= self.warm_up <= 1:
            raise ValueError(f"warm_up must be from 0 to 1, not {self.warm_up}")


class Server(NamedTuple):
    """A client that has not replied since the warm-up has rows of zeros and n = 0."""

    x_P: Tensor  # FedAvg's model, then the average of the clients'
    body_NQ: Tensor
    head_NH: Tensor
    n_N: Tensor  # samples, float64
    round: int  # the next one
    warm_rounds: int

    @property
    def warm(self) -> bool:
        return self.round < self.warm_rounds


class Statistics(NamedTuple):
    b_R: Tensor  # running statistics of the average
    b_NR: Tensor  # of every client


class Up(NamedTuple):
    y_P: Tensor


def weights(server: Server, ids_S: Tensor) -> Tensor:
    """Return w_uv over the clients that replied, normalised; not meaningful if u itself has not replied."""
    phi_SN = cosine(server.head_NH[ids_S], server.head_NH).clamp(0.0, LARGEST)
    itself_SN = ids_S[:, None] == torch.arange(len(server.n_N), device=ids_S.device)
    w_SN = -torch.log(1 - torch.where(itself_SN, LARGEST, phi_SN)) * (server.n_N > 0)
    return w_SN / w_SN.sum(dim=1, keepdim=True)


def have_replied(server: Server, ids_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return which clients have replied, and a row of the tables for each client, of no meaning if it has not."""
    return rows_at(server.n_N, ids_S, 0.0) > 0, ids_S.clamp(max=len(server.n_N) - 1)


def cosine(a_SH: Tensor, b_NH: Tensor) -> Tensor:
    """Return the cosine of every pair; 0 if a vector is zero."""
    norms_SN = torch.linalg.vector_norm(a_SH, dim=1)[:, None] * torch.linalg.vector_norm(b_NH, dim=1)
    return a_SH @ b_NH.T / torch.where(norms_SN > 0, norms_SN, 1.0)


def heard(server: Server, replies: Replies) -> Tensor:
    """Return n_N with the sizes of the clients that replied."""
    return server.n_N.index_copy(0, replies.ids_S, replies.sizes_S)


def average(n_N: Tensor, a_NP: Tensor) -> Tensor:
    return weighted_sum(n_N / n_N.sum(), a_NP)


def pfedsim(config: Config = Config()) -> Method:
    def init(x_P: Tensor, federation: Federation) -> Server:
        rows_NP = x_P.new_zeros(federation.num_clients, *x_P.shape)
        return Server(
            x_P=x_P,
            body_NQ=rows_NP[:, federation.layout.body],
            head_NH=rows_NP[:, federation.layout.head],
            n_N=torch.zeros_like(federation.sizes_N).to(x_P.device),
            round=0,
            warm_rounds=round(config.warm_up * federation.rounds),
        )

    def broadcast(server: Server, ids_S: Tensor) -> Down:
        x_SP = for_all(server.x_P, ids_S)
        if server.warm:
            return Down(x_SP)
        replied_S, ids_S = have_replied(server, ids_S)
        mixed_SP = torch.cat([weights(server, ids_S) @ server.body_NQ, server.head_NH[ids_S]], dim=1)
        return Down(torch.where(replied_S[:, None], mixed_SP, x_SP))

    def finish(_ask: Ask, y_P: Tensor, _work: Work, _down: Down, own: Any, _scratch: Any) -> tuple[Up, Any]:
        return Up(y_P), own

    def step(ask: ServerAsk, server: Server, replies: Replies) -> Stepped:
        y_SP, following = replies.ups.y_P, server._replace(round=ask.round + 1)
        if server.warm:
            return moved_by(following, weighted_sum(replies.weight_S, server.x_P - y_SP))
        layout, ids_S, n_N = ask.model.layout, replies.ids_S, heard(server, replies)
        body_NQ = server.body_NQ.index_copy(0, ids_S, y_SP[:, layout.body])
        head_NH = server.head_NH.index_copy(0, ids_S, y_SP[:, layout.head])
        x_P = torch.cat([average(n_N, body_NQ), average(n_N, head_NH)])
        return Stepped(following._replace(x_P=x_P, body_NQ=body_NQ, head_NH=head_NH, n_N=n_N))

    def broadcast_statistics(statistics: Statistics, server: Server, ids_S: Tensor) -> Tensor:
        b_SR = for_all(statistics.b_R, ids_S)
        if server.warm:
            return b_SR
        replied_S, ids_S = have_replied(server, ids_S)
        return torch.where(replied_S[:, None], weights(server, ids_S) @ statistics.b_NR, b_SR)

    def step_statistics(_ask: ServerAsk, old: Statistics, server: Server, given: tuple[Tensor, Replies]) -> Statistics:
        b_SR, replies = given
        if server.warm:
            return old._replace(b_R=weighted_sum(replies.weight_S, b_SR))
        b_NR = old.b_NR.index_copy(0, replies.ids_S, b_SR)
        return Statistics(average(heard(server, replies), b_NR), b_NR)

    return fedavg()._replace(
        init=init,
        broadcast=broadcast,
        finish=finish,
        combine=lambda _server, replies: replies,  # similarity is between single clients
        step=step,
        shared=lambda server: server.x_P if server.warm else None,
        model=lambda server: server.x_P,
        reveals={"y_P": "the client's model; its head tells which classes it holds"},
        buffers=BufferRule(
            init=lambda b_R, federation: Statistics(b_R, b_R.new_zeros(federation.num_clients, *b_R.shape)),
            broadcast=broadcast_statistics,
            step=step_statistics,
            combine=lambda b_SR, replies: (b_SR, replies),
            with_statistics=lambda statistics, b_R: statistics._replace(b_R=b_R),
        ),
    )
