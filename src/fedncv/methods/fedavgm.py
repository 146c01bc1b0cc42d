"""FedAvgM: FedAvg with momentum at the server.

    client   as FedAvg
    server   Delta = sum_S p_u Delta_u
             v <- beta * v + Delta
             x <- x - server_lr * v                       server_lr * (Delta + beta * v) with Nesterov's

Hsu et al., 2019, https://arxiv.org/abs/1909.06335, FedAvgM (the update with server momentum).
Departures from the paper: none. BatchNorm's statistics are averaged and take no momentum.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedncv.methods.base import Federation, Method, Replies, ServerAsk, weighted_sum
from fedncv.methods.fedavg import fedavg


@dataclass(frozen=True, kw_only=True)
class Config:
    beta: float = 0.9
    """Momentum, from 0 to below 1; 0 is FedAvg."""
    nesterov: bool = False
    """Step along Delta + beta * v in place of v."""
    server_lr: float = 1.0
    """Server step, above 0. A constant Delta moves the model by server_lr / (1 - beta) * Delta a round."""

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta must be at least 0 and below 1, not {self.beta}")
        if not self.server_lr > 0:
            raise ValueError(f"server_lr must be above 0, not {self.server_lr}")


class Server(NamedTuple):
    x_P: Tensor  # global model
    v_P: Tensor  # velocity


def fedavgm(config: Config = Config()) -> Method:
    def init(x_P: Tensor, _federation: Federation) -> Server:
        return Server(x_P, x_P.new_zeros(x_P.shape))

    def aggregate(_ask: ServerAsk, server: Server, replies: Replies) -> Server:
        delta_P = weighted_sum(replies.weight_S, replies.ups.delta_P)
        v_P = config.beta * server.v_P + delta_P
        step_P = delta_P + config.beta * v_P if config.nesterov else v_P
        return Server(server.x_P - config.server_lr * step_P, v_P)

    return fedavg()._replace(init=init, aggregate=aggregate)
