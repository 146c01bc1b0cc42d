"""D²: decentralised training that is not held back by different data, by remembering what was sent.

    client   y <- y - lr * grad_u(y)        over its batches, starting from y = x
             sends  x - y  in its first round, and  y_before - y  from then on;  keeps y_before <- y
    server   x <- x - mean_u of these;      on a graph  x_u <- sum_v W'_uv (x_v - what v sent),  W' = (I + W) / 2

With x_t the model, y_t what was trained from it, and psi_t = y_t:

    x_1 = W' psi_0,      x_{t+1} = W' (psi_t + x_t - psi_{t-1})

With one step of plain gradients that is  x_{t+1} = W' (2 x_t - x_{t-1} - lr (g_t - g_{t-1})). The correction x_t -
psi_{t-1} is what mixing did to the client's model, so at rest it cancels the client's own gradient: D² rests where a
server with all clients would, at the optimum for one local step. With a server itself it is FedAvg, to rounding:
the mean of x_t - psi_{t-1} over all clients is zero.

Tang et al., ICML 2018, https://arxiv.org/abs/1803.07068, Algorithm 1; exact diffusion, Yuan et al., 2019,
https://arxiv.org/abs/1702.05122, has (I + W) / 2.
Departures from the paper: local steps, of which the paper has one; (I + W) / 2 on every graph, where the paper wants
eigenvalues of W above -1/3. All clients take part in every round and count equally.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedncv.methods.base import Ask, Method, ServerAsk, Stepped, Sums, Work, moved_by
from fedncv.methods.fedavg import Down, Server, fedavg


class Own(NamedTuple):
    y_P: Tensor  # trained in the round before
    seen: Tensor  # 1 after the first round


class Up(NamedTuple):
    back_P: Tensor  # y_before - y, at first x - y


def d2() -> Method:
    def init_own(_ask: Ask, x_P: Tensor) -> Own:
        return Own(torch.zeros_like(x_P), x_P.new_zeros(()))

    def finish(_ask: Ask, y_P: Tensor, _work: Work, down: Down, own: Own, _scratch: Any) -> tuple[Up, Own]:
        before_P = torch.where(own.seen > 0, own.y_P, down.x_P)
        return Up(before_P - y_P), Own(y_P, torch.ones_like(own.seen))

    def step(_ask: ServerAsk, server: Server, sums: Sums) -> Stepped:
        return moved_by(server, sums.mean("back_P"))

    return fedavg()._replace(
        init_own=init_own,
        finish=finish,
        step=step,
        reveals={"back_P": "the client's model update, less what mixing did to its last one"},
        weights={"back_P": "one"},
        graph="symmetric",
    )
