"""FedNCV as printed in the paper. Its terms cancel: expect it to learn almost nothing.

    client   g'_i = g_i - alpha_u * c_{without i}                      c: mean gradient of the other samples
             g_B  = sum_i pi_i g'_i = q - alpha_u * (|B| g_bar - q) / (|B| - 1)          per mini-batch B
             y <- y - lr * g_B;   Delta_u = x - y
    server   g = sum_S p_u (Delta_u - sum_{v != u} n_v / (n - n_u) Delta_v)              p normalised over S
             x <- x - g
             alpha_u <- alpha_u - gamma * d||g_u||^2 / d alpha_u

Chen et al., "Taming Gradient Variance in Federated Learning with Networked Control Variates", Algorithm 1 with
eq. (weight_u), (server_cv) and (Double).

Our reading where the paper leaves a choice (docs/theory.md, "Reading the paper"):
- Local training uses mini-batches, so the client's rule is applied to each of them (the multi-step form), and the
  server's rule to the pseudo-gradients of the round's clients.
- The sampling weights p_theta^{u,i} are uniform, or the model's probability of each sample, exp(-loss_i), normalised
  over the batch. No gradient flows through them.
- Delta in alpha's update is the derivative in alpha_u, averaged over the client's steps. The paper sets no bounds; here
  alpha_u is clamped to [0, 1], because one steep step could make it arbitrarily large.
- A batch of one sample, or a round of one client, has no leave-one-out mean: its control variate is zero.

Why it cancels: the server's weights sum to zero for any sizes, and all are zero if sizes are equal. With uniform
sampling weights the client's rule is (1 - alpha_u) times the plain gradient, and alpha_u converges to 1.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedncv.estimators import client_gradient, server_gradient
from fedncv.methods.base import (
    Ask,
    Batch,
    Federation,
    Method,
    Replies,
    ServerAsk,
    Stepped,
    Work,
    for_all,
    moved_by,
    rows_at,
)
from fedncv.methods.fedavg import fedavg


@dataclass(frozen=True, kw_only=True)
class Config:
    sampling: Literal["uniform", "likelihood"] = "uniform"
    """Sampling weights of a batch: equal, or the model's probability of each sample. The latter gives unlikely samples
    a negative weight, and clients tend to diverge."""
    alpha: float = 0.5
    """Initial coefficient of every client, from 0 to 1; the paper gives none."""
    gamma: float = 0.01
    """Step size of alpha_u, at least 0; 0 keeps alpha_u fixed. Algorithm 1 uses the learning rate of the model."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be from 0 to 1, not {self.alpha}")
        if not self.gamma >= 0:
            raise ValueError(f"gamma must be at least 0, not {self.gamma}")


class Server(NamedTuple):
    x_P: Tensor
    alpha_N: Tensor


class Down(NamedTuple):
    x_P: Tensor
    alpha: Tensor


class Up(NamedTuple):
    delta_P: Tensor  # x - y
    slope: Tensor  # d||g_B||^2 / d alpha_u, mean over the steps


class Slope(NamedTuple):
    """Sum over the steps made so far."""

    total: Tensor
    steps: Tensor


def fedncv_paper(config: Config = Config()) -> Method:
    def init(x_P: Tensor, federation: Federation) -> Server:
        return Server(x_P, x_P.new_full((federation.num_clients,), config.alpha))

    def broadcast(server: Server, ids_S: Tensor) -> Down:
        return Down(for_all(server.x_P, ids_S), rows_at(server.alpha_N, ids_S, config.alpha))

    def begin(_ask: Ask, down: Down, _own: Any) -> tuple[Tensor, Slope]:
        zero = torch.zeros_like(down.alpha)
        return down.x_P, Slope(zero, zero)

    def direction(ask: Ask, y_P: Tensor, batch: Batch, down: Down, _own: Any, scratch: Slope) -> tuple[Tensor, Slope]:
        mean_P = ask.grad(y_P, batch)
        q_P = mean_P if config.sampling == "uniform" else ask.grad_of(lambda y: _weighted(ask, y, batch), y_P)
        g_P = client_gradient(q_P, mean_P, size=batch.size, alpha=down.alpha)
        # g_B = q - alpha c, so c = q - (g_B at alpha = 1), and the derivative is -2 <c, g_B>
        c_P = q_P - client_gradient(q_P, mean_P, size=batch.size, alpha=1.0)
        return g_P, Slope(scratch.total - 2 * (c_P * g_P).sum(), scratch.steps + 1)

    def finish(_ask: Ask, y_P: Tensor, _work: Work, down: Down, own: Any, scratch: Slope) -> tuple[Up, Any]:
        return Up(down.x_P - y_P, scratch.total / scratch.steps), own

    def combine(_server: Server, replies: Replies) -> Replies:
        return replies  # alpha_u belongs to single clients

    def step(_ask: ServerAsk, server: Server, replies: Replies) -> Stepped:
        g_P = server_gradient(replies.ups.delta_P, replies.sizes_S)
        alpha_S = server.alpha_N[replies.ids_S] - config.gamma * replies.ups.slope
        return moved_by(server, g_P, alpha_N=server.alpha_N.index_copy(0, replies.ids_S, alpha_S.clamp(0, 1)))

    return fedavg()._replace(
        init=init,
        broadcast=broadcast,
        begin=begin,
        direction=direction,
        finish=finish,
        combine=combine,
        step=step,
        reveals={"delta_P": "the client's model update", "slope": "how its squared gradient depends on alpha_u"},
    )


def _weighted(ask: Ask, y_P: Tensor, batch: Batch) -> Tensor:
    """Return sum_i pi_i loss_i with pi_i the model's probability of sample i, normalised over the batch.

    Running statistics do not change here: the plain gradient's pass has already updated them.
    """
    losses_B = ask.losses(ask.forward(y_P, batch, mode="still").logits_BC, batch)
    real_B = torch.where(batch.weight_B > 0, -losses_B.detach(), float("-inf"))
    return (torch.softmax(real_B, dim=0) * losses_B).sum()
