"""Even samples: every sample of a client has the same weight in an epoch.

    y <- y - lr * |B| / b * d_B          b: samples of a full batch, |B| <= b

Without it a smaller last batch moves the model as far as a full one: each of its samples has b / |B| times the weight
of the others, and the variance of its direction is larger by the same factor. Here its step is shorter in proportion
to its size, and the sum over an epoch is the client's gradient times n_u / b.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedncv.methods.base import Ask, Batch, Method, Work


@dataclass(frozen=True, kw_only=True)
class Config:
    """No knobs."""


def with_even_samples(method: Method, _config: Config = Config()) -> Method:
    """Return ``method`` with steps in proportion to the size of their batches."""
    if "samples" in method.switches:
        raise ValueError("put +even before +samples, which needs the length of each step")

    def direction(ask: Ask, y_P: Tensor, batch: Batch, down: Any, own: Any, scratch: Any) -> tuple[Tensor, Any]:
        d_P, scratch = method.direction(ask, y_P, batch, down, own, scratch)
        return batch.size / ask.client.full_batch * d_P, scratch

    def finish(ask: Ask, y_P: Tensor, work: Work, down: Any, own: Any, scratch: Any) -> tuple[Any, Any]:
        share = work.samples / (work.steps * ask.client.full_batch)  # mean length of a step
        return method.finish(ask, y_P, work._replace(total_step=work.total_step * share), down, own, scratch)

    return method._replace(
        direction=direction,
        finish=finish,
        needs_sgd=method.needs_sgd
        or "even shortens a step by scaling its gradient, and only SGD's steps are proportional to the gradient",
        switches=(*method.switches, "even"),
    )
