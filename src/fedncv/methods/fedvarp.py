"""FedVARP: the server remembers every client's last update and uses it in the client's absence.

    client   as FedAvg
    server   h_u = the last Delta_u it had from u, 0 until the first;   h_bar = sum_v p_v h_v over all clients
             x <- x - server_lr * ( h_bar + sum_S w_u (Delta_u - h_u) )      w_u = p_u / sum_S p_v
             h_u <- Delta_u for u in S

Jhunjhunwala et al., UAI 2022, https://arxiv.org/abs/2207.14130, the FedVARP algorithm.
Departures from the paper: clients are weighted by samples, where the paper's are of one size; equal sizes
give its 1/|S| and 1/N. The weights w_u are normalised over the clients that answered, as FedAvg's.
At rest h_u = Delta_u: no noise of sampling is left, and the model stands where FedAvg with all clients does.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedncv.methods.base import Federation, Method, Replies, ServerAsk, weighted_sum
from fedncv.methods.fedavg import fedavg
from fedncv.rows import AnyRows, rows_of, with_rows


@dataclass(frozen=True, kw_only=True)
class Config:
    server_lr: float = 1.0
    """Server step, above 0."""

    def __post_init__(self) -> None:
        if not self.server_lr > 0:
            raise ValueError(f"server_lr must be above 0, not {self.server_lr}")


class Server(NamedTuple):
    x_P: Tensor  # global model
    h: AnyRows  # last update of every client seen
    total_P: Tensor  # sum_v n_v h_v, in float64: kept up to date from the clients of the round alone
    n_N: Tensor  # samples of every client as last reported, float64

    @property
    def h_bar_P(self) -> Tensor:
        return (self.total_P / self.n_N.sum()).to(self.x_P.dtype)


def init(x_P: Tensor, federation: Federation) -> Server:
    return Server(x_P, {}, torch.zeros_like(x_P, dtype=torch.float64), federation.sizes_N.to(x_P.device))


def remembered(server: Server, replies: Replies) -> Tensor:
    """h_u of the clients that answered."""
    return rows_of(server.h, replies.ids_S, torch.zeros_like(server.x_P))


def remember(server: Server, replies: Replies) -> Server:
    """h_u <- Delta_u and n_u as it is now, for the clients that answered."""
    ids_S, delta_SP = replies.ids_S, replies.ups.delta_P
    n_S = replies.sizes_S.to(server.n_N)
    old_P = weighted_sum(server.n_N[ids_S], remembered(server, replies).double())
    return server._replace(
        h=with_rows(server.h, ids_S, delta_SP),
        total_P=server.total_P - old_P + weighted_sum(n_S, delta_SP.double()),
        n_N=server.n_N.index_copy(0, ids_S, n_S),
    )


def fedvarp(config: Config = Config()) -> Method:
    def aggregate(_ask: ServerAsk, server: Server, replies: Replies) -> Server:
        news_SP = replies.ups.delta_P - remembered(server, replies)
        step_P = server.h_bar_P + weighted_sum(replies.weight_S, news_SP)
        return remember(server, replies)._replace(x_P=server.x_P - config.server_lr * step_P)

    return fedavg()._replace(init=init, aggregate=aggregate)
