"""pFedSim: every client's body is mixed from the bodies of clients with similar heads.

    first rounds      FedAvg, until the share warm_up of all rounds is over
    then, server      sends u   body = sum_v w_uv body_v / sum_v w_uv,   its own head_u
                      over the clients v heard of since, u included, with
                      w_uv = -log(1 - phi_uv),   phi_uv = cos(head_u, head_v) clamped to [0, 0.9999]
                      a client not yet heard of gets the average  sum_v n_v y_v / sum_v n_v
    client            trains all layers, sends its model
    running statistics are mixed as the bodies are

Tan et al., 2023, https://arxiv.org/abs/2305.15706, Algorithm 1.
Departures from the paper: the cosine is that of the heads as whole vectors; the authors' code averages those
of the rows of the classifier's matrix. Similarity is taken between all clients heard of since the
warm-up, not only between those drawn in the same round, so that mixing begins with the second client. A
client not heard of yet gets the average of those that were; in the authors' code it gets the model that the
warm-up ended with. The server sends the head back with the body: it has it anyway, and the client need not
keep anything.

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
    Replies,
    ServerAsk,
    Stepped,
    Work,
    for_all,
    moved_by,
    weighted_sum,
)
from fedncv.methods.fedavg import Down, fedavg

LARGEST = 0.9999  # similarity of a client with itself, and the most that two can have


@dataclass(frozen=True, kw_only=True)
class Config:
    warm_up: float = 0.5
    """Share of the rounds that are FedAvg's, from 0 to 1; 1 is FedAvg."""

    def __post_init__(self) -> None:
        if not 0 <= self.warm_up <= 1:
            raise ValueError(f"warm_up must be from 0 to 1, not {self.warm_up}")


class Server(NamedTuple):
    """Rows are zeros, and n is 0, for a client not heard of since the warm-up."""

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
    """R = running statistics, of the average and of every client."""

    b_R: Tensor
    b_NR: Tensor


class Up(NamedTuple):
    y_P: Tensor


def weights(server: Server, ids_S: Tensor) -> Tensor:
    """w_uv over the clients heard of, normalised. Without meaning where u itself was not heard of."""
    phi_SN = cosine(server.head_NH[ids_S], server.head_NH).clamp(0.0, LARGEST)
    itself_SN = ids_S[:, None] == torch.arange(len(server.n_N), device=ids_S.device)
    w_SN = -torch.log(1 - torch.where(itself_SN, LARGEST, phi_SN)) * (server.n_N > 0)
    return w_SN / w_SN.sum(dim=1, keepdim=True)


def cosine(a_SH: Tensor, b_NH: Tensor) -> Tensor:
    """Of every pair; 0 where a vector is zero."""
    norms_SN = torch.linalg.vector_norm(a_SH, dim=1)[:, None] * torch.linalg.vector_norm(b_NH, dim=1)
    return a_SH @ b_NH.T / torch.where(norms_SN > 0, norms_SN, 1.0)


def heard(server: Server, replies: Replies) -> Tensor:
    """n, with the clients that answered."""
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
        mixed_SP = torch.cat([weights(server, ids_S) @ server.body_NQ, server.head_NH[ids_S]], dim=1)
        return Down(torch.where((server.n_N[ids_S] > 0)[:, None], mixed_SP, x_SP))

    def finish(_ask: Ask, y_P: Tensor, _work: Work, _down: Down, own: Any, _scratch: Any) -> tuple[Up, Any]:
        return Up(y_P), own

    def combine(_server: Server, replies: Replies) -> Replies:
        return replies  # similarity is between single clients

    def step(ask: ServerAsk, server: Server, replies: Replies) -> Stepped:
        y_SP, following = replies.ups.y_P, server._replace(round=ask.round + 1)
        if server.warm:
            return moved_by(following, weighted_sum(replies.weight_S, server.x_P - y_SP))
        layout, ids_S, n_N = ask.model.layout, replies.ids_S, heard(server, replies)
        body_NQ = server.body_NQ.index_copy(0, ids_S, y_SP[:, layout.body])
        head_NH = server.head_NH.index_copy(0, ids_S, y_SP[:, layout.head])
        x_P = torch.cat([average(n_N, body_NQ), average(n_N, head_NH)])
        return Stepped(following._replace(x_P=x_P, body_NQ=body_NQ, head_NH=head_NH, n_N=n_N))

    def shared(server: Server) -> Tensor | None:
        return server.x_P if server.warm else None

    def init_statistics(start_R: Tensor, federation: Federation) -> Statistics:
        return Statistics(start_R, start_R.new_zeros(federation.num_clients, *start_R.shape))

    def broadcast_statistics(statistics: Statistics, server: Server, ids_S: Tensor) -> Tensor:
        b_SR = for_all(statistics.b_R, ids_S)
        if server.warm:
            return b_SR
        return torch.where((server.n_N[ids_S] > 0)[:, None], weights(server, ids_S) @ statistics.b_NR, b_SR)

    def combine_statistics(b_SR: Tensor, replies: Replies) -> tuple[Tensor, Replies]:
        return b_SR, replies

    def step_statistics(
        _ask: ServerAsk, statistics: Statistics, server: Server, combined: tuple[Tensor, Replies]
    ) -> Statistics:
        b_SR, replies = combined
        if server.warm:
            return statistics._replace(b_R=weighted_sum(replies.weight_S, b_SR))
        b_NR = statistics.b_NR.index_copy(0, replies.ids_S, b_SR)
        return Statistics(average(heard(server, replies), b_NR), b_NR)

    return fedavg()._replace(
        init=init,
        broadcast=broadcast,
        finish=finish,
        combine=combine,
        step=step,
        shared=shared,
        model=lambda server: server.x_P,
        reveals={"y_P": "the client's model; its head tells which classes it holds"},
        buffers=BufferRule(
            init_statistics,
            broadcast_statistics,
            step_statistics,
            combine=combine_statistics,
            with_statistics=lambda statistics, b_R: statistics._replace(b_R=b_R),
        ),
    )
