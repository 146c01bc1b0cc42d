"""Ditto: a personal model beside the shared one, pulled towards it.

    client   y <- y - lr * grad_u(y)                          its epochs, from y = x: as FedAvg
             v <- v - lr * (grad_u(v) + lam * (v - x))        then its own epochs, from its v of the last time
             keeps v and the running statistics of v, sends  Delta_u = x - y
    server   as FedAvg
    predict  with v, before and after training

Li et al., ICML 2021, https://arxiv.org/abs/2012.04221, Algorithm 1.
Departures from the paper: clients are weighted by samples. v starts at the study's initial model, so a client that
never took part predicts with that until it trains. v has BatchNorm statistics of its own, because the shared ones are
those of another model.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedncv.methods.base import Ask, Batch, Method, Phase, Prediction, Work
from fedncv.methods.fedavg import Down, Up, fedavg


@dataclass(frozen=True, kw_only=True)
class Config:
    lam: float = 1.0
    """Strength of the pull towards the shared model, at least 0; 0 trains every client alone."""
    personal_epochs: int = 0
    """Local epochs of the personal model, at least 1; 0 is as many as the study's local epochs."""

    def __post_init__(self) -> None:
        if not 0 <= self.lam < math.inf:
            raise ValueError(f"lam must be at least 0 and finite, not {self.lam}")
        if not self.personal_epochs >= 0:
            raise ValueError(f"personal_epochs must be at least 0, not {self.personal_epochs}")


class Own(NamedTuple):
    v_P: Tensor
    b_R: Tensor  # running statistics of v


def ditto(config: Config = Config()) -> Method:
    def init_own(ask: Ask, x_P: Tensor) -> Own:
        return Own(x_P, ask.buffers_R)

    def phases(epochs: int) -> tuple[Phase, ...]:
        # "still": the running statistics that travel are those of the shared model
        return Phase(epochs), Phase(config.personal_epochs or epochs, trains=("own",), mode="still")

    def begin(_ask: Ask, down: Down, own: Own) -> tuple[Tensor, Tensor]:
        return torch.cat([down.x_P, own.v_P]), own.b_R

    def direction(ask: Ask, y: Tensor, batch: Batch, down: Down, _own: Own, b_R: Tensor) -> tuple[Tensor, Tensor]:
        y_P, v_P = y[: len(down.x_P)], y[len(down.x_P) :]
        if ask.phase == 0:
            return torch.cat([ask.grad(y_P, batch), torch.zeros_like(v_P)]), b_R
        personal = ask.beside(b_R)
        g_P = personal.grad(v_P, batch, mode="train") + config.lam * (v_P - down.x_P)
        return torch.cat([torch.zeros_like(y_P), g_P]), personal.notes.buffers_R

    def finish(_ask: Ask, y: Tensor, _work: Work, down: Down, _own: Own, b_R: Tensor) -> tuple[Up, Own]:
        num = len(down.x_P)
        return Up(down.x_P - y[:num]), Own(y[num:], b_R)

    def predict(_ask: Ask, y: Tensor, down: Down, own: Own) -> Prediction:
        return Prediction(y[len(down.x_P) :], own.b_R)

    return fedavg()._replace(
        init_own=init_own,
        phases=phases,
        begin=begin,
        direction=direction,
        finish=finish,
        predict=predict,
        refuses={"blend": "the personal model of ditto is not a step away from the received one, as in fedavg+blend"},
    )
