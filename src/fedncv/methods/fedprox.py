"""FedProx: FedAvg with a pull towards the received model.

    client   y <- y - lr * (grad_u(y) + mu * (y - x))     the gradient of  loss + mu/2 * ||y - x||^2
    server   as FedAvg

Li et al., MLSys 2020, https://arxiv.org/abs/1812.06127, eq. 2.
Departures from the paper: none. The paper tunes mu per dataset from {0.001, 0.01, 0.1, 1}; here 0.01.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedncv.methods.base import Ask, Batch, Method
from fedncv.methods.fedavg import Down, fedavg


@dataclass(frozen=True, kw_only=True)
class Config:
    mu: float = 0.01
    """Pull towards the received model, at least 0; 0 is FedAvg."""

    def __post_init__(self) -> None:
        if not self.mu >= 0:
            raise ValueError(f"mu must be at least 0, not {self.mu}")


def fedprox(config: Config = Config()) -> Method:
    def direction(ask: Ask, y_P: Tensor, batch: Batch, down: Down, _own: Any, scratch: Any) -> tuple[Tensor, Any]:
        return ask.grad(y_P, batch) + config.mu * (y_P - down.x_P), scratch

    return fedavg()._replace(direction=direction)
