"""FedAvg: federated averaging.

    client   y <- y - lr * grad_u(y)        over its batches, starting from y = x
             Delta_u = x - y
    server   x <- x - sum_S p_u Delta_u     p_u = n_u / sum_S n_v

McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629, Algorithm 1.
Departures from the paper: weights are normalised over the clients that answered (as in the later versions of
the paper's Algorithm 1).
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fedncv.methods.base import (
    Ask,
    Batch,
    Federation,
    Method,
    Phase,
    Prediction,
    ServerAsk,
    Stepped,
    Sums,
    Work,
    for_all,
    moved_by,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    server_lr: float = 1.0
    """Server step, above 0; 1 replaces the model by the mean of the local models."""

    def __post_init__(self) -> None:
        if not 0 < self.server_lr < math.inf:
            raise ValueError(f"server_lr must be above 0 and finite, not {self.server_lr}")


class Server(NamedTuple):
    x_P: Tensor  # global model


class Down(NamedTuple):
    x_P: Tensor


class Up(NamedTuple):
    delta_P: Tensor  # x - y


def fedavg(config: Config = Config()) -> Method:
    def init(x_P: Tensor, _federation: Federation) -> Server:
        return Server(x_P)

    def init_own(_ask: Ask, _x_P: Tensor) -> tuple[()]:
        return ()

    def phases(epochs: int) -> tuple[Phase, ...]:
        return (Phase(epochs),)

    def broadcast(server: Server, ids_S: Tensor) -> Down:
        return Down(for_all(server.x_P, ids_S))

    def begin(_ask: Ask, down: Down, _own: Any) -> tuple[Tensor, Any]:
        return down.x_P, ()

    def direction(ask: Ask, y_P: Tensor, batch: Batch, _down: Down, _own: Any, scratch: Any) -> tuple[Tensor, Any]:
        return ask.grad(y_P, batch), scratch

    def finish(_ask: Ask, y_P: Tensor, _work: Work, down: Down, own: Any, _scratch: Any) -> tuple[Up, Any]:
        return Up(down.x_P - y_P), own

    def step(_ask: ServerAsk, server: Server, sums: Sums) -> Stepped:
        return moved_by(server, config.server_lr * sums.mean("delta_P"))

    def predict(ask: Ask, y_P: Tensor, _down: Down, _own: Any) -> Prediction:
        return Prediction(y_P, ask.buffers_R)

    def shared(server: Server) -> Tensor:
        return server.x_P

    def with_model(server: Server, x_P: Tensor) -> Server:
        return server._replace(x_P=x_P)

    return Method(
        init=init,
        init_own=init_own,
        phases=phases,
        broadcast=broadcast,
        begin=begin,
        direction=direction,
        finish=finish,
        step=step,
        predict=predict,
        shared=shared,
        model=shared,
        with_model=with_model,
        reveals={"delta_P": "the client's model update"},
    )
