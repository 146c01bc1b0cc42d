"""FedRoD: a generic head trained as if classes were balanced, and a personal head beside it.

    z = body(x),  g = generic head(z),  f = personal head of client u
    client   (body, generic) <- ... - lr * gradient of  CE(g + gamma * log pi_u)         balanced softmax
             f               <- f   - lr * gradient of  CE(stop(g) + f(stop(z)))         in the same steps
             keeps f, sends  Delta_u = x - y  of body and generic head
    server   as FedAvg
    predict  g + f(z);   the shared model alone predicts with g, without the prior
    pi_{u,k} = n_{u,k} / n_u; a class that u does not hold is left out of its balanced softmax

Chen and Chao, ICLR 2022, https://arxiv.org/abs/2107.00778, section 4 (the variant with linear
personal heads, without a hypernetwork).
Departures from the paper: clients are weighted by samples. All personal heads start as the generic head does, as in
public code. The personal head may be any head that the model has, not only a linear one.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedncv.flat import Model, Output
from fedncv.layout import Layout
from fedncv.methods.base import Ask, Batch, Method, Phase, Prediction, Work
from fedncv.methods.fedavg import Down, Up, fedavg

ABSENT = -1e4  # in place of log 0: its exponential is 0 in every precision, and its gradient is a number


@dataclass(frozen=True, kw_only=True)
class Config:
    gamma: float = 1.0
    """Exponent of the label frequencies in the balanced softmax, at least 0; 0 trains the shared model as FedAvg."""

    def __post_init__(self) -> None:
        if not 0 <= self.gamma < math.inf:
            raise ValueError(f"gamma must be at least 0 and finite, not {self.gamma}")


def log_frequencies(counts_C: Tensor) -> Tensor:
    """Return log pi_u; zeros if the targets are not classes."""
    pi_C = counts_C / counts_C.sum().clamp(min=1)
    log_C = torch.where(pi_C > 0, torch.where(pi_C > 0, pi_C, 1.0).log(), ABSENT)
    return torch.where(counts_C.sum() > 0, log_C, 0.0)


def with_head(layout: Layout, x_P: Tensor, head_H: Tensor) -> Tensor:
    """Return the model ``x_P`` with another head."""
    return torch.cat([x_P[layout.body], head_H])


def fedrod(config: Config = Config()) -> Method:
    def init_own(ask: Ask, x_P: Tensor) -> Tensor:
        return x_P[ask.layout.head]  # f

    def phases(epochs: int) -> tuple[Phase, ...]:
        return (Phase(epochs, trains=("body", "head", "own")),)

    def begin(_ask: Ask, down: Down, head_H: Tensor) -> tuple[Tensor, Any]:
        return torch.cat([down.x_P, head_H]), ()

    def direction(ask: Ask, y: Tensor, batch: Batch, _down: Down, _own: Any, scratch: Any) -> tuple[Tensor, Any]:
        num = ask.layout.num_parameters
        offset_C = config.gamma * log_frequencies(ask.client.label_counts_C)

        def loss(y: Tensor) -> Tensor:
            y_P, head_H = y[:num], y[num:]
            generic_BC, z_BF = ask.forward(y_P, batch)
            personal_BC = ask.head(with_head(ask.layout, y_P.detach(), head_H), z_BF.detach())
            balanced_BC = generic_BC + offset_C if batch.y.dim() == 1 else generic_BC
            losses_B = ask.losses(balanced_BC, batch) + ask.losses(generic_BC.detach() + personal_BC, batch)
            return (batch.weight_B * losses_B).sum() / batch.size

        return ask.grad_of(loss, y), scratch

    def finish(ask: Ask, y: Tensor, _work: Work, down: Down, _own: Any, _scratch: Any) -> tuple[Up, Tensor]:
        num = ask.layout.num_parameters
        return Up(down.x_P - y[:num]), y[num:]

    def predict(ask: Ask, y: Tensor, _down: Down, _own: Any) -> Prediction:
        num = ask.layout.num_parameters
        return Prediction(y[:num], ask.buffers_R, given=y[num:])

    def decide(model: Model, x_P: Tensor, output: Output, head_H: Tensor) -> Tensor:
        return output.logits_BC + model.head(with_head(model.layout, x_P, head_H), output.features_BF)

    return fedavg()._replace(
        init_own=init_own,
        phases=phases,
        begin=begin,
        direction=direction,
        finish=finish,
        predict=predict,
        decide=decide,
        refuses={
            "prior": "fedrod balances the softmax by the client's label frequencies already",
            "blend": "fedrod keeps the trained personal head alone, so there is no received one to blend it with",
        },
    )
