"""FedLC: calibrate logits by the client's number of samples of each class.

    client   trains on the cross-entropy of  f_c(x) - tau * n_{u,c}^(-1/4)     n_{u,c}: its samples of class c
             predicts with f
    server   as FedAvg

Zhang et al., ICML 2022, https://arxiv.org/abs/2209.00189, the calibrated cross-entropy with margin tau * n^(-1/4).
Departures from the paper: the sum in the softmax includes the true class, as in cross-entropy. The paper leaves it
out; its loss then has no lower bound and no limit at tau = 0. In the paper a class without samples has an
infinite margin. Here it counts as ``absent`` samples: the default lowers its logit by 100 tau, which removes the
class from the softmax and keeps all numbers finite. The paper tunes tau; here 1.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedncv.methods.base import Ask, Batch, Method
from fedncv.methods.fedavg import Down, fedavg


@dataclass(frozen=True, kw_only=True)
class Config:
    tau: float = 1.0
    """Strength of the calibration, at least 0; 0 is FedAvg."""
    absent: float = 1e-8
    """Number of samples assumed for a class that the client does not hold, above 0."""

    def __post_init__(self) -> None:
        if not self.tau >= 0:
            raise ValueError(f"tau must be at least 0, not {self.tau}")
        if not self.absent > 0:
            raise ValueError(f"absent must be above 0, not {self.absent}")


def fedlc(config: Config = Config()) -> Method:
    def direction(ask: Ask, y_P: Tensor, batch: Batch, _down: Down, _own: Any, scratch: Any) -> tuple[Tensor, Any]:
        n_C = ask.client.label_counts_C.clamp(min=config.absent)
        return ask.grad(y_P, batch, offset_C=-config.tau * n_C ** (-1 / 4)), scratch

    return fedavg()._replace(direction=direction)
