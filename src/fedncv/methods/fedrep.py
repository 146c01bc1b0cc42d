"""FedRep: personal heads and a shared body, trained one after the other.

    client   head <- head - lr * grad_u(body of x, head)        some epochs, the body frozen
             body <- body - lr * grad_u(body, head)             then an epoch, the head frozen
             keeps its head, sends  Delta_u = body of x - body of y
    server   body of x <- body of x - sum_S p_u Delta_u

Collins et al., ICML 2021, https://arxiv.org/abs/2102.07078, Algorithm 1.
Departures from the paper: bodies are weighted by samples (the paper's clients have equal sizes). The study's
local epochs are the sum of both parts. While the body is frozen its BatchNorm layers use the batch's
statistics, as in training, and the running statistics do not change.
"""

from dataclasses import dataclass

from fedncv.methods.base import Method, Phase
from fedncv.methods.fedper import fedper


@dataclass(frozen=True, kw_only=True)
class Config:
    body_epochs: int = 1
    """Number of local epochs, at the end, that train the body; at least 1. The others train the head, which
    gets at least one epoch."""

    def __post_init__(self) -> None:
        if not self.body_epochs >= 1:
            raise ValueError(f"body_epochs must be at least 1, not {self.body_epochs}")


def fedrep(config: Config = Config()) -> Method:
    def phases(epochs: int) -> tuple[Phase, ...]:
        head_epochs = max(1, epochs - config.body_epochs)
        return Phase(head_epochs, trains=("head",), mode="still"), Phase(config.body_epochs, trains=("body",))

    return fedper()._replace(phases=phases)
