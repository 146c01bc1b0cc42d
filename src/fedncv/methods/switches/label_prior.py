"""The label prior: add the logarithm of a client's label frequencies to its logits.

    pi_{u,k} = (n_{u,k} + epsilon) / (n_u + C * epsilon)
    client u trains and predicts with   logits + tau * log pi_u

The shared model learns the part that is common to all clients. Each client adds its own offset, which never leaves it.
The prior is not a variance reduction, although it brings the clients' gradients closer together.

Menon et al., ICLR 2021, https://arxiv.org/abs/2007.07314, eq. 10, per client. Related methods: FedLC, FedRoD.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fedncv.methods.base import Ask, Batch, Method, Prediction, Work


@dataclass(frozen=True, kw_only=True)
class Config:
    tau: float = 1.0
    """Weight of the prior, at least 0; 0 leaves the method unchanged."""
    epsilon: float = 1.0
    """Number of samples added to each class before the frequencies are computed, above 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.tau < math.inf:
            raise ValueError(f"tau must be at least 0 and finite, not {self.tau}")
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon must be above 0 and finite, not {self.epsilon}")


class Prior(NamedTuple):
    offset_C: Tensor  # of the client's logits, the same in all its steps
    scratch: Any  # the method's own


def log_prior(counts_C: Tensor, epsilon: float) -> Tensor:
    """Return log pi_u."""
    smoothed_C = counts_C + epsilon
    return (smoothed_C / smoothed_C.sum()).log()


def with_prior(method: Method, config: Config = Config()) -> Method:
    """Return ``method`` with each client's label prior added to its logits."""
    if config.tau == 0:
        return method

    def offset(ask: Ask) -> Tensor:
        """Return tau log(C pi_u). The constant log C changes no probability; it makes the offset 0 without labels."""
        counts_C = ask.client.label_counts_C
        return config.tau * (log_prior(counts_C, config.epsilon) + math.log(len(counts_C)))

    def begin(ask: Ask, down: Any, own: Any) -> tuple[Tensor, Prior]:
        y_P, scratch = method.begin(ask, down, own)
        return y_P, Prior(offset(ask), scratch)

    def direction(ask: Ask, y_P: Tensor, batch: Batch, down: Any, own: Any, prior: Prior) -> tuple[Tensor, Prior]:
        ask = ask.replace(prior_C=prior.offset_C)
        d_P, scratch = method.direction(ask, y_P, batch, down, own, prior.scratch)
        return d_P, Prior(prior.offset_C, scratch)

    def finish(ask: Ask, y_P: Tensor, work: Work, down: Any, own: Any, prior: Prior) -> tuple[Any, Any]:
        return method.finish(ask, y_P, work, down, own, prior.scratch)

    def predict(ask: Ask, y_P: Tensor, down: Any, own: Any) -> Prediction:
        offset_C = offset(ask)
        plain = method.predict(ask.replace(prior_C=offset_C), y_P, down, own)
        return plain._replace(offset_C=offset_C if plain.offset_C is None else plain.offset_C + offset_C)

    return method._replace(
        begin=begin, direction=direction, finish=finish, predict=predict, switches=(*method.switches, "prior")
    )
