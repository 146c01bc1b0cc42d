"""FedExP: FedAvg with a longer server step where the clients' updates disagree.

    client   as FedAvg; sends Delta_u = x - y and ||Delta_u||^2
    server   Delta = sum_S p_u Delta_u
             eta_g = max(1, sum_S p_u ||Delta_u||^2 / (2 (||Delta||^2 + epsilon)))
             x <- x - eta_g * Delta

Jhunjhunwala et al., ICLR 2023, https://arxiv.org/abs/2301.09604, Algorithm 1.
Departures from the paper: both means are weighted by samples, p_u = n_u / sum_S n_v, so that epsilon = infinity is
FedAvg to the last bit (in the paper by 1 / |S|; the authors' code weights by samples too). Clients predict with the
last model (the paper evaluates the mean of the last two; fedexp+average is a longer mean). epsilon is a constant, here
0.001; in the authors' code it is multiplied by |S| and falls with the square of the learning rate, from 0.001 or 0.1
depending on the dataset.
If the clients' optima differ, Delta is zero at the fixed point but the Delta_u are not. The step there is
sum_S p_u ||Delta_u||^2 / (2 epsilon). With a small epsilon this is so long that the model jumps around the fixed point.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedncv.methods.base import Ask, Method, ServerAsk, Stepped, Sums, Work, moved_by
from fedncv.methods.fedavg import Down, Server, fedavg


@dataclass(frozen=True, kw_only=True)
class Config:
    epsilon: float = 0.001
    """Number added to the squared length of the mean update, above 0. Larger values shorten the step; inf is FedAvg."""

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be above 0, not {self.epsilon}")


class Up(NamedTuple):
    delta_P: Tensor  # x - y
    square: Tensor  # ||x - y||^2


def fedexp(config: Config = Config()) -> Method:
    def finish(_ask: Ask, y_P: Tensor, _work: Work, down: Down, own: Any, _scratch: Any) -> tuple[Up, Any]:
        delta_P = down.x_P - y_P
        return Up(delta_P, delta_P @ delta_P), own

    def step(_ask: ServerAsk, server: Server, sums: Sums) -> Stepped:
        delta_P = sums.mean("delta_P")
        ratio = sums.mean("square") / (2 * (delta_P @ delta_P + config.epsilon))
        eta_g = torch.clamp(ratio, min=1.0)
        return moved_by(server, eta_g * delta_P)._replace(numbers={"eta_g": eta_g})

    return fedavg()._replace(
        finish=finish,
        step=step,
        reveals={"delta_P": "the client's model update", "square": "the squared length of that update"},
        bounds={"square": 1024.0},
    )
