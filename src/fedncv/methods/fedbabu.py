"""FedBABU: train and share the body alone; fit the head when the model is used.

    client   body <- body - lr * grad_u(body, head)           the head stays at its random start, in every round
    server   as FedAvg; the head never moves
    before   with the shared body and the common random head
    after    fine-tuned from there: body and head, or the head, or the body

Oh et al., ICLR 2022, https://arxiv.org/abs/2106.06042, Algorithm 1.
Departures from the paper: clients are weighted by samples. The head travels with the body, although everybody has it.
Fine-tuning takes as many epochs as a round, with the round's learning rate, unless ``+finetune`` says otherwise; while
the body is frozen, the running statistics do not change.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedncv.methods.base import Federation, FineTuning, Method, Phase, ServerAsk, Stepped, Sums, moved_by
from fedncv.methods.fedavg import Server, fedavg


@dataclass(frozen=True, kw_only=True)
class Config:
    tune: Literal["all", "head", "body"] = "all"
    """Part of the model that is fine-tuned for the score after local training."""


def fedbabu(config: Config = Config()) -> Method:
    def init(x_P: Tensor, federation: Federation) -> Server:
        if federation.layout.body.stop == 0:
            raise ValueError("this model is a head alone, which fedbabu never trains; use one with a body, such as mlp")
        return Server(x_P)

    def phases(epochs: int) -> tuple[Phase, ...]:
        return (Phase(epochs, trains=("body",)),)

    def tuning(epochs: int) -> tuple[Phase, ...]:
        if config.tune == "head":
            return (Phase(epochs, trains=("head",), mode="still"),)
        return (Phase(epochs),) if config.tune == "all" else phases(epochs)

    def step(ask: ServerAsk, server: Server, sums: Sums) -> Stepped:
        layout, mean_P = ask.model.layout, sums.mean("delta_P")
        # clients send 0 for the head, but the noise of +dp is on all of it
        return moved_by(server, torch.cat([mean_P[layout.body], torch.zeros_like(mean_P[layout.head])]))

    return fedavg()._replace(init=init, phases=phases, step=step, finetune=FineTuning(tuning))
