"""FedNCV for a server that must not see single updates: clients keep their memory, the server needs only sums.

    client   e_u = alpha * (c_u - c_bar);   y <- y - lr * (g(y; B) - e_u)        from y = x
             Delta_u = x - y;   c_u' = Delta_u / (lr * K_u) + e_u
             sends  n_u (Delta_u - h_u),  n_u (c_u' - c_u),  n_u;    keeps h_u <- Delta_u, c_u <- c_u'
    server   g_hat = h_bar + sum_S n_u (Delta_u - h_u) / sum_S n_u               fedncv with beta = 1
             h_bar <- h_bar + sum_S n_u (Delta_u - h_u) / n                      the same sum once more
             c_bar <- c_bar + sum_S n_u (c_u' - c_u) / n
             v <- momentum * v + g_hat;    x <- x - v

Every reply enters through one sum over the round, so a secure aggregation may hide the terms. What that costs: beta is
1 and alpha the same for all (their adaptive forms need single updates), and h_u = c_u = 0 until a client is first seen.
With equal sizes, alpha = 0 is FedVARP and no memory SCAFFOLD (option II).

After Chen et al., "Taming Gradient Variance in Federated Learning with Networked Control Variates"; fedncv.py has the
placement at the server, docs/theory.md the derivation. Sizes n_u are taken not to change.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedncv.methods.base import Ask, Batch, Federation, Method, Replies, ServerAsk, Work, for_all, weighted_sum
from fedncv.methods.fedavg import fedavg
from fedncv.methods.switches import even_samples, label_prior


@dataclass(frozen=True, kw_only=True)
class Config:
    alpha: float = 1.0
    """Strength of the drift correction, from 0 to 1; 0 is off, and saves an array each way."""
    tau: float = 1.0
    """Weight of the label prior, at least 0; 0 is off."""
    epsilon: float = 1.0
    """Samples of every class that a client is taken to have beside its own, above 0."""
    even: bool = True
    """Every sample of a client weighs the same: a smaller last batch makes a smaller step."""
    momentum: float = 0.5
    """Server momentum, from 0 to below 1; 0 is off."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be from 0 to 1, not {self.alpha}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, not {self.momentum}")
        label_prior.Config(tau=self.tau, epsilon=self.epsilon)


class Server(NamedTuple):
    """Sums are unnormalised and in float64, so that long runs stay exact. E = P, or 0 where alpha is 0."""

    x_P: Tensor
    v_P: Tensor
    sum_h_P: Tensor  # sum_v n_v h_v
    sum_c_E: Tensor  # sum_v n_v c_v
    num_samples: float  # n, of all clients


class Down(NamedTuple):
    x_P: Tensor
    c_bar_E: Tensor


class Own(NamedTuple):
    h_P: Tensor  # last update
    c_E: Tensor  # mean raw gradient of the last round


class Up(NamedTuple):
    news_P: Tensor  # n_u (Delta_u - h_u)
    dc_E: Tensor  # n_u (c_u' - c_u)
    size: Tensor  # n_u


def fedncv_sums(config: Config = Config()) -> Method:
    corrects = config.alpha > 0

    def empty_unless_correcting(x_P: Tensor) -> Tensor:
        return x_P if corrects else x_P[:0]

    def init(x_P: Tensor, federation: Federation) -> Server:
        zero_P = torch.zeros_like(x_P, dtype=torch.float64)
        total = float(federation.sizes_N.sum())
        return Server(x_P, torch.zeros_like(x_P), zero_P, empty_unless_correcting(zero_P), total)

    def init_own(_ask: Ask, x_P: Tensor) -> Own:
        zero_P = torch.zeros_like(x_P)
        return Own(zero_P, empty_unless_correcting(zero_P))

    def broadcast(server: Server, ids_S: Tensor) -> Down:
        c_bar_E = (server.sum_c_E / server.num_samples).to(server.x_P.dtype)
        return Down(for_all(server.x_P, ids_S), for_all(c_bar_E, ids_S))

    def correction(down: Down, own: Own) -> Tensor:
        """e_u."""
        return config.alpha * (own.c_E - down.c_bar_E)

    def direction(ask: Ask, y_P: Tensor, batch: Batch, down: Down, own: Own, scratch: Any) -> tuple[Tensor, Any]:
        g_P = ask.grad(y_P, batch)
        return g_P - correction(down, own) if corrects else g_P, scratch

    def finish(ask: Ask, y_P: Tensor, work: Work, down: Down, own: Own, _scratch: Any) -> tuple[Up, Own]:
        n_u, delta_P = ask.client.num_samples, down.x_P - y_P
        c_E = delta_P / work.total_step + correction(down, own) if corrects else own.c_E
        return Up(n_u * (delta_P - own.h_P), n_u * (c_E - own.c_E), n_u), Own(delta_P, c_E)

    def aggregate(_ask: ServerAsk, server: Server, replies: Replies) -> Server:
        ups = replies.ups
        ones_S = torch.ones_like(ups.size)
        news_P, dc_E = weighted_sum(ones_S, ups.news_P), weighted_sum(ones_S, ups.dc_E)
        h_bar_P = (server.sum_h_P / server.num_samples).to(news_P.dtype)
        v_P = config.momentum * server.v_P + (h_bar_P + news_P / ups.size.sum())
        return server._replace(
            x_P=server.x_P - v_P, v_P=v_P, sum_h_P=server.sum_h_P + news_P, sum_c_E=server.sum_c_E + dc_E
        )

    method = fedavg()._replace(
        init=init,
        init_own=init_own,
        broadcast=broadcast,
        direction=direction,
        finish=finish,
        aggregate=aggregate,
        fixed_sizes=True,
        switches=("momentum",),
        reveals={
            "news_P": "how its update changed, times its samples; only the sum over the round is needed",
            "dc_E": "how its mean gradient changed, times its samples; only the sum is needed",
            "size": "its number of samples; only the sum is needed",
        },
    )
    if config.even:
        method = even_samples.with_even_samples(method)
    return label_prior.with_prior(method, label_prior.Config(tau=config.tau, epsilon=config.epsilon))
