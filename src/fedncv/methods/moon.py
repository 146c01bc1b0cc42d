"""MOON: model-contrastive learning.

    client   y <- y - lr * gradient of  loss(y) + mu * contrast(y)      with, for each sample,
             z, z_glob, z_prev = its features under y, the received x, and the client's previous model
             contrast = -log( exp(cos(z, z_glob) / tau) / (exp(cos(z, z_glob) / tau) + exp(cos(z, z_prev) / tau)) )
             keeps y as its previous model
    server   as FedAvg

Li et al., CVPR 2021, https://arxiv.org/abs/2103.16257, Algorithm 1.
Departures from the paper: z is the input of the model's head; the paper adds a projection of two layers before
the head. Until a client has trained, its previous model is the initial one. The two constant passes use the
batch's statistics and do not change the running statistics.
"""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fedncv.methods.base import Ask, Batch, Method, Work
from fedncv.methods.fedavg import Down, Up, fedavg


@dataclass(frozen=True, kw_only=True)
class Config:
    mu: float = 5.0
    """Weight of the contrast, at least 0; 0 is FedAvg (at the cost of MOON)."""
    tau: float = 0.5
    """Temperature, above 0."""

    def __post_init__(self) -> None:
        if not self.mu >= 0:
            raise ValueError(f"mu must be at least 0, not {self.mu}")
        if not self.tau > 0:
            raise ValueError(f"tau must be above 0, not {self.tau}")


def similarity(a_BF: Tensor, b_BF: Tensor) -> Tensor:
    return F.cosine_similarity(a_BF.flatten(1), b_BF.flatten(1), dim=1)


def moon(config: Config = Config()) -> Method:
    def init_own(_ask: Ask, x_P: Tensor) -> Tensor:
        return x_P  # previous model

    def direction(
        ask: Ask, y_P: Tensor, batch: Batch, down: Down, previous_P: Tensor, scratch: Any
    ) -> tuple[Tensor, Any]:
        z_glob_BF = ask.forward(down.x_P, batch, mode="still").features_BF
        z_prev_BF = ask.forward(previous_P, batch, mode="still").features_BF

        def loss(y_P: Tensor) -> Tensor:
            logits_BC, z_BF = ask.forward(y_P, batch)
            # -log(e^a / (e^a + e^b)) = softplus(b - a)
            contrast_B = F.softplus((similarity(z_BF, z_prev_BF) - similarity(z_BF, z_glob_BF)) / config.tau)
            losses_B = ask.losses(logits_BC, batch)
            return (batch.weight_B * losses_B).sum() / batch.size + config.mu * (
                (batch.weight_B * contrast_B).sum() / batch.size
            )

        return ask.grad_of(loss, y_P), scratch

    def finish(
        _ask: Ask, y_P: Tensor, _work: Work, down: Down, _previous_P: Tensor, _scratch: Any
    ) -> tuple[Up, Tensor]:
        return Up(down.x_P - y_P), y_P

    return fedavg()._replace(init_own=init_own, direction=direction, finish=finish)
