"""Even samples: every sample of a client weighs the same in an epoch.

    y <- y - lr * |B| / b * d_B          b: samples of a full batch, |B| <= b

A pass over the data visits every batch once, so a smaller last batch, say of two samples, moves the model as far as a
full one: its samples weigh b / |B| times as much as the others, and its direction is noisier by as much. Here its step
is as short as the batch is small, and the sum over an epoch is the client's gradient times n_u / b.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedncv.methods.base import Ask, Batch, Method, Work


@dataclass(frozen=True, kw_only=True)
class Config:
    """No knobs."""


def with_even_samples(method: Method, _config: Config = Config()) -> Method:
    """``method`` whose steps are as long as their batches are large."""
    if "samples" in method.switches:
        raise ValueError("samples must know how long steps are: put +even before +samples")

    def direction(ask: Ask, y_P: Tensor, batch: Batch, down: Any, own: Any, scratch: Any) -> tuple[Tensor, Any]:
        d_P, scratch = method.direction(ask, y_P, batch, down, own, scratch)
        return batch.size / ask.client.full_batch * d_P, scratch

    def finish(ask: Ask, y_P: Tensor, work: Work, down: Any, own: Any, scratch: Any) -> tuple[Any, Any]:
        share = work.samples / (work.steps * ask.client.full_batch)  # mean length of the steps
        return method.finish(ask, y_P, work._replace(total_step=work.total_step * share), down, own, scratch)

    return method._replace(direction=direction, finish=finish, switches=(*method.switches, "even"))
