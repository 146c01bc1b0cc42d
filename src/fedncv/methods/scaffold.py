"""SCAFFOLD: stochastic controlled averaging.

    client   y    <- y - lr * (grad_u(y) - c_u + c)       K times, starting from y = x
             c_u' =  mean gradient at x over u's data     option I (one more pass over the data)
             c_u' =  c_u - c + (x - y) / (K * lr)         option II
    server   x    <- x - server_lr * mean_S(x - y_u)
             c    <- c + 1/N * sum_S(c_u' - c_u)
    with weights=samples, n_u samples of client u
             x    <- x - server_lr * sum_S n_u (x - y_u) / sum_S n_u
             c    <- c + sum_S n_u (c_u' - c_u) / sum_N n_v

Karimireddy et al., ICML 2020, https://arxiv.org/abs/1910.06378, Algorithm 1.
Departures from the paper: weights=samples, which the paper does not have, counts samples, as FedAvg's mean does, and
needs clients whose number of samples does not change. With local momentum, K * lr is the sum of the factors with which
the gradients entered x - y; without momentum they are the same.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedncv.methods.base import (
    Ask,
    Batch,
    Changes,
    Federation,
    Method,
    Phase,
    ServerAsk,
    Stepped,
    Sums,
    Work,
    for_all,
    moved_by,
)
from fedncv.methods.fedavg import fedavg


@dataclass(frozen=True, kw_only=True)
class Config:
    option: Literal["I", "II"] = "II"
    """How a client updates its control variate: I, by a pass over its data at x; II, from its local steps."""
    server_lr: float = 1.0
    """Server step, above 0; 1 replaces the model by the mean of the local models."""
    weights: Literal["one", "samples"] = "one"
    """What a client counts in x and in c: one, as in the paper, or its samples."""

    def __post_init__(self) -> None:
        if not 0 < self.server_lr < math.inf:
            raise ValueError(f"server_lr must be above 0 and finite, not {self.server_lr}")


class Server(NamedTuple):
    x_P: Tensor  # global model
    c_P: Tensor  # server control variate, the mean of all clients'
    num_clients: float  # all clients; with weights=samples all their samples


class Down(NamedTuple):
    x_P: Tensor
    c_P: Tensor


class Up(NamedTuple):
    delta_P: Tensor  # x - y
    dc_P: Tensor  # c_u' - c_u


class Sum(NamedTuple):
    """Option I's pass over the data."""

    g_P: Tensor
    samples: Tensor


def scaffold(config: Config = Config()) -> Method:
    first_phase = 1 if config.option == "I" else 0

    def init(x_P: Tensor, federation: Federation) -> Server:
        by_samples = config.weights == "samples"
        number = float(federation.sizes_N.sum()) if by_samples else federation.num_clients
        return Server(x_P, x_P.new_zeros(x_P.shape), number)

    def init_own(_ask: Ask, x_P: Tensor) -> Tensor:
        return x_P.new_zeros(x_P.shape)  # c_u

    def phases(epochs: int) -> tuple[Phase, ...]:
        data_pass = (Phase(1, trains=(), mode="still"),) if config.option == "I" else ()
        return (*data_pass, Phase(epochs))

    def broadcast(server: Server, ids_S: Tensor) -> Down:
        return Down(for_all(server.x_P, ids_S), for_all(server.c_P, ids_S))

    def begin(_ask: Ask, down: Down, _c_u_P: Tensor) -> tuple[Tensor, Any]:
        if config.option == "II":
            return down.x_P, ()
        return down.x_P, Sum(torch.zeros_like(down.x_P), down.x_P.new_zeros(()))

    def direction(ask: Ask, y_P: Tensor, batch: Batch, down: Down, c_u_P: Tensor, scratch: Any) -> tuple[Tensor, Any]:
        g_P = ask.grad(y_P, batch)
        if ask.phase < first_phase:
            return g_P, Sum(scratch.g_P + batch.size * g_P, scratch.samples + batch.size)
        return g_P - c_u_P + down.c_P, scratch

    def finish(_ask: Ask, y_P: Tensor, work: Work, down: Down, c_u_P: Tensor, scratch: Any) -> tuple[Up, Tensor]:
        if config.option == "I":
            new_P = scratch.g_P / scratch.samples
        else:
            new_P = c_u_P - down.c_P + (down.x_P - y_P) / work.total_step
        return Up(down.x_P - y_P, new_P - c_u_P), new_P

    def step(_ask: ServerAsk, server: Server, sums: Sums) -> Stepped:
        c_P = server.c_P + sums.sum("dc_P") / server.num_clients
        return moved_by(server, config.server_lr * sums.mean("delta_P"), c_P=c_P)

    return fedavg()._replace(
        init=init,
        init_own=init_own,
        phases=phases,
        broadcast=broadcast,
        begin=begin,
        direction=direction,
        finish=finish,
        step=step,
        reveals={"delta_P": "the client's model update", "dc_P": "how its mean gradient changed"},
        weights={"delta_P": config.weights, "dc_P": config.weights},
        changes=Changes("dc_P", lambda c_u_P: c_u_P, lambda c_u_P, _after_P, sent_P: c_u_P + sent_P),
        fixed_sizes=config.weights == "samples",
        needs_sgd=(
            "c_u' is (x - y) divided by the sum of the step lengths, a mean gradient only with SGD; scaffold:option=I "
            "works with any optimizer"
        )
        if config.option == "II"
        else "",
        switches=("drift",),
    )
