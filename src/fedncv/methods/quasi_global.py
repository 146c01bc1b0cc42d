"""Quasi-global momentum: momentum along the path of the mixed model, which every client sees by itself.

    client   m <- mu * m + (1 - mu) * (x_before - x) / (lr * K)          from its second round on; m = 0 before
             y <- y - lr * (grad_u(y) + beta * m)                        K times, starting from y = x
             Delta_u = x - y;   keeps m and x
    server   as FedAvg;  on a graph  x_u <- sum_v W_uv (x_v - N p_v Delta_v)

Local momentum on different data pulls each client towards its own optimum. x_before - x is how far the client's model
moved after mixing, so m is close to what all clients do, and nothing more is sent. lr * K is the sum of the step
lengths of the round before. At rest x_before = x, so m = 0: it rests where FedAvg on the same graph rests.

Lin et al., ICML 2021, https://arxiv.org/abs/2102.04761, Algorithm 1 (QG-DSGDm).
Departures from the paper: local steps, of which the paper has one, and their mean direction in m. In the paper
mu = beta.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedncv.methods.base import Ask, Batch, Method, Work
from fedncv.methods.fedavg import Down, Up, fedavg


@dataclass(frozen=True, kw_only=True)
class Config:
    beta: float = 0.9
    """Share of the momentum in every local step, from 0 to below 1; 0 is FedAvg."""
    mu: float = 0.9
    """How slowly the momentum forgets, from 0 to below 1."""

    def __post_init__(self) -> None:
        for name in ("beta", "mu"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}")


class Own(NamedTuple):
    m_P: Tensor
    x_P: Tensor  # received in the last round
    total_step: Tensor  # lr * K of that round; 0 before the first


def quasi_global(config: Config = Config()) -> Method:
    beta, mu = config.beta, config.mu
    if beta == 0:
        return fedavg()

    def init_own(_ask: Ask, x_P: Tensor) -> Own:
        return Own(torch.zeros_like(x_P), torch.zeros_like(x_P), x_P.new_zeros(()))

    def begin(_ask: Ask, down: Down, own: Own) -> tuple[Tensor, Tensor]:
        seen = own.total_step > 0
        moved_P = (own.x_P - down.x_P) / torch.where(seen, own.total_step, 1.0)
        return down.x_P, torch.where(seen, mu * own.m_P + (1 - mu) * moved_P, 0.0)

    def direction(ask: Ask, y_P: Tensor, batch: Batch, _down: Down, _own: Own, m_P: Tensor) -> tuple[Tensor, Tensor]:
        return ask.grad(y_P, batch) + beta * m_P, m_P

    def finish(_ask: Ask, y_P: Tensor, work: Work, down: Down, _own: Own, m_P: Tensor) -> tuple[Up, Own]:
        total_step = torch.as_tensor(work.total_step, dtype=y_P.dtype, device=y_P.device)
        return Up(down.x_P - y_P), Own(m_P, down.x_P, total_step)

    return fedavg()._replace(
        init_own=init_own,
        begin=begin,
        direction=direction,
        finish=finish,
        needs_sgd="its momentum is x - y divided by the sum of the step lengths, a mean direction only with SGD",
    )
