"""FedPer: shared body, personal head.

    client   y <- y - lr * grad_u(y)           all layers, starting from y = (body of x, own head)
             keeps its head, sends  Delta_u = body of x - body of y
    server   body of x <- body of x - sum_S p_u Delta_u

Arivazhagan et al., 2019, https://arxiv.org/abs/1912.00818, Algorithms 1 and 2.
Departures from the paper: none; the personal part is the model's head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedncv.methods.base import Ask, Federation, Method, ServerAsk, Stepped, Sums, Work, for_all
from fedncv.methods.fedavg import fedavg


class Server(NamedTuple):
    """Q = parameters of the body, H = of the head."""

    body_Q: Tensor


class Down(NamedTuple):
    body_Q: Tensor


class Up(NamedTuple):
    delta_Q: Tensor


def fedper() -> Method:
    def init(x_P: Tensor, federation: Federation) -> Server:
        return Server(x_P[federation.layout.body])

    def init_own(ask: Ask, x_P: Tensor) -> Tensor:
        return x_P[ask.layout.head]

    def broadcast(server: Server, ids_S: Tensor) -> Down:
        return Down(for_all(server.body_Q, ids_S))

    def begin(_ask: Ask, down: Down, head_H: Tensor) -> tuple[Tensor, Any]:
        return torch.cat([down.body_Q, head_H]), ()

    def finish(ask: Ask, y_P: Tensor, _work: Work, down: Down, _head_H: Tensor, _scratch: Any) -> tuple[Up, Tensor]:
        return Up(down.body_Q - y_P[ask.layout.body]), y_P[ask.layout.head]

    def step(_ask: ServerAsk, server: Server, sums: Sums) -> Stepped:
        return Stepped(Server(server.body_Q - sums.mean("delta_Q")))

    def shared(_server: Server) -> None:
        return None

    return fedavg()._replace(
        init=init,
        init_own=init_own,
        broadcast=broadcast,
        begin=begin,
        finish=finish,
        step=step,
        shared=shared,
        model=None,
        with_model=None,
        reveals={"delta_Q": "the client's update of the body"},
    )
