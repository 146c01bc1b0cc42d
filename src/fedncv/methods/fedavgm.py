"""FedAvgM: FedAvg with momentum at the server.

    client   as FedAvg
    server   move = server_lr * sum_S p_u Delta_u
             v <- beta * v + move
             x <- x - v                                   x - (move + beta * v) with Nesterov's

The chain fedavg+momentum. Hsu et al., 2019, https://arxiv.org/abs/1909.06335, the update with server momentum.
Departures from the paper: none. BatchNorm's running statistics are averaged, without momentum.
"""

from dataclasses import dataclass

from fedncv.methods.base import Method
from fedncv.methods.fedavg import Config as FedAvgConfig
from fedncv.methods.fedavg import fedavg
from fedncv.methods.switches import server_momentum


@dataclass(frozen=True, kw_only=True)
class Config:
    beta: float = 0.9
    """Momentum, from 0 to below 1; 0 is FedAvg."""
    nesterov: bool = False
    """Use Nesterov momentum: step along move + beta * v instead of v."""
    server_lr: float = 1.0
    """Server step, above 0. A constant Delta moves the model by server_lr / (1 - beta) * Delta per round."""


def fedavgm(config: Config = Config()) -> Method:
    momentum = server_momentum.Config(beta=config.beta, nesterov=config.nesterov)
    return server_momentum.with_momentum(fedavg(FedAvgConfig(server_lr=config.server_lr)), momentum)
