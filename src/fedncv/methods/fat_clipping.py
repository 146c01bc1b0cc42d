"""FAT-Clipping: clip gradients or updates, for gradient noise of infinite variance.

    per iteration   y <- y - lr * clip(grad_u(y))         clip(g) = min(1, lambda / ||g||) * g
                    Delta_u = x - y
    per round       y <- y - lr * grad_u(y)
                    Delta_u = lr * clip((x - y) / lr)     the clipped sum of the round's gradients
    server          x <- x - server_lr * sum_S p_u Delta_u

Yang et al., NeurIPS 2022, https://arxiv.org/abs/2210.00690, FAT-Clipping-PI and FAT-Clipping-PR.
Departures from the paper: clients are weighted by samples (in the paper uniformly), so that lambda = infinity
is FedAvg to the last bit. The paper tunes lambda and lets it depend on the tail of the noise; the defaults
here are our own starting points for the study's networks.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedncv.methods.base import Ask, Batch, Method, ServerAsk, Stepped, Sums, Work, moved_by
from fedncv.methods.fedavg import Config as FedAvgConfig
from fedncv.methods.fedavg import Down, Server, fedavg


@dataclass(frozen=True, kw_only=True)
class IterationConfig:
    clip: float = 1.0
    """Largest norm lambda of a step's gradient, above 0; inf is FedAvg."""
    server_lr: float = 1.0
    """Server step, above 0."""

    def __post_init__(self) -> None:
        _check(self.clip, self.server_lr)


@dataclass(frozen=True, kw_only=True)
class RoundConfig:
    clip: float = 10.0
    """Largest norm lambda of the sum of a round's gradients, above 0; inf is FedAvg."""
    server_lr: float = 1.0
    """Server step, above 0."""

    def __post_init__(self) -> None:
        _check(self.clip, self.server_lr)


def _check(clip: float, server_lr: float) -> None:
    if not clip > 0:
        raise ValueError(f"clip must be above 0, not {clip}")
    if not 0 < server_lr < math.inf:
        raise ValueError(f"server_lr must be above 0 and finite, not {server_lr}")


def clip_factor(g_P: Tensor, clip: float) -> Tensor:
    """Return min(1, clip / ||g||); 1 if g = 0."""
    return torch.clamp(clip / torch.linalg.vector_norm(g_P), max=1.0)


def fat_clipping_iteration(config: IterationConfig = IterationConfig()) -> Method:
    def direction(ask: Ask, y_P: Tensor, batch: Batch, _down: Down, _own: Any, scratch: Any) -> tuple[Tensor, Any]:
        g_P = ask.grad(y_P, batch)
        return clip_factor(g_P, config.clip) * g_P, scratch

    return fedavg(FedAvgConfig(server_lr=config.server_lr))._replace(direction=direction)


class ClippedUp(NamedTuple):
    clipped_P: Tensor  # the clipped update


def fat_clipping_round(config: RoundConfig = RoundConfig()) -> Method:
    def finish(_ask: Ask, y_P: Tensor, work: Work, down: Down, own: Any, _scratch: Any) -> tuple[ClippedUp, Any]:
        delta_P = down.x_P - y_P
        return ClippedUp(clip_factor(delta_P / work.lr, config.clip) * delta_P), own

    def step(_ask: ServerAsk, server: Server, sums: Sums) -> Stepped:
        return moved_by(server, config.server_lr * sums.mean("clipped_P"))

    return fedavg()._replace(
        finish=finish,
        step=step,
        needs_sgd="it clips (x - y) / lr, the sum of the round's gradients only with SGD",
        reveals={"clipped_P": "the client's model update, clipped"},
    )
