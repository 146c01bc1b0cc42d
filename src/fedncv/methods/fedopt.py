"""FedAdagrad, FedAdam, FedYogi: adaptive optimizers at the server.

    client   as FedAvg
    server   Delta = sum_S p_u Delta_u
             m <- beta1 * m + (1 - beta1) * Delta
             v <- v + Delta^2                                             FedAdagrad
             v <- beta2 * v + (1 - beta2) * Delta^2                       FedAdam
             v <- v - (1 - beta2) * Delta^2 * sign(v - Delta^2)           FedYogi
             x <- x - server_lr * m / (sqrt(v) + tau)                     from m = 0, v = tau^2

Reddi et al., ICLR 2021, https://arxiv.org/abs/2003.00295, Algorithm 2.
Departures from the paper: none (its Delta is y - x). The paper tunes server_lr for every task on a grid from
0.001 to 10; here 0.01. As in the paper there are no bias corrections.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedncv.methods.base import Federation, Method, ServerAsk, Stepped, Sums, moved_by
from fedncv.methods.fedavg import fedavg


@dataclass(frozen=True, kw_only=True)
class AdagradConfig:
    server_lr: float = 0.01
    """Server step, above 0: about the distance that a coordinate moves per round while |Delta| is far above tau."""
    beta1: float = 0.0
    """Momentum, from 0 to below 1."""
    tau: float = 1e-3
    """Adaptivity, above 0. Coordinates whose Delta is far below tau move by server_lr / tau * Delta."""

    def __post_init__(self) -> None:
        _check(self.server_lr, self.tau, beta1=self.beta1)


@dataclass(frozen=True, kw_only=True)
class Config:
    server_lr: float = 0.01
    """Server step, above 0: about the distance that a coordinate moves per round while |Delta| is far above tau."""
    beta1: float = 0.9
    """Momentum, from 0 to below 1."""
    beta2: float = 0.99
    """Decay factor of the second moment, from 0 to below 1."""
    tau: float = 1e-3
    """Adaptivity, above 0. Coordinates whose Delta is far below tau move by server_lr / tau * Delta."""

    def __post_init__(self) -> None:
        _check(self.server_lr, self.tau, beta1=self.beta1, beta2=self.beta2)


def _check(server_lr: float, tau: float, **betas: float) -> None:
    if not 0 < server_lr < math.inf:
        raise ValueError(f"server_lr must be above 0 and finite, not {server_lr}")
    if not tau > 0:
        raise ValueError(f"tau must be above 0, not {tau}")
    for name, beta in betas.items():
        if not 0 <= beta < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, not {beta}")


class Server(NamedTuple):
    x_P: Tensor  # global model
    m_P: Tensor  # first moment
    v_P: Tensor  # second moment


Second = Callable[[Tensor, Tensor], Tensor]
"""(v, Delta^2) -> the new v."""


def adaptive(server_lr: float, beta1: float, tau: float, second: Second) -> Method:
    def init(x_P: Tensor, _federation: Federation) -> Server:
        return Server(x_P, torch.zeros_like(x_P), torch.full_like(x_P, tau**2))

    def step(_ask: ServerAsk, server: Server, sums: Sums) -> Stepped:
        delta_P = sums.mean("delta_P")
        m_P = beta1 * server.m_P + (1 - beta1) * delta_P
        v_P = second(server.v_P, delta_P**2)
        return moved_by(server, server_lr * m_P / (torch.sqrt(v_P) + tau), m_P=m_P, v_P=v_P)

    return fedavg()._replace(init=init, step=step)


def fedadagrad(config: AdagradConfig = AdagradConfig()) -> Method:
    return adaptive(config.server_lr, config.beta1, config.tau, lambda v_P, square_P: v_P + square_P)


def fedadam(config: Config = Config()) -> Method:
    def second(v_P: Tensor, square_P: Tensor) -> Tensor:
        return config.beta2 * v_P + (1 - config.beta2) * square_P

    return adaptive(config.server_lr, config.beta1, config.tau, second)


def fedyogi(config: Config = Config()) -> Method:
    def second(v_P: Tensor, square_P: Tensor) -> Tensor:
        return v_P - (1 - config.beta2) * square_P * torch.sign(v_P - square_P)

    return adaptive(config.server_lr, config.beta1, config.tau, second)
