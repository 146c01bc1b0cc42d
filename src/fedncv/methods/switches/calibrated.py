"""Calibrated weights: weigh the clients of a round so that their labels are those of all clients.

    w_u = n_u / sum_S n_v,   pi_u = n_{u,k} / n_u,   pi_bar = sum_v p_v pi_v over all clients
    omega = w + w o X (X^T W X + ridge I)^-1 (pi_bar - sum_S w_u pi_u)        rows of X: pi_u - sum_S w_v pi_v
    server   averages the replies with omega in place of w; running statistics keep w

The weights sum to one, and some may be negative. They need this round alone: no memory. Each client tells its label
counts once, when it joins; one that does not keeps its plain share of the weights.

Deville and Särndal, JASA 1992, calibration estimators, with a ridge (Chambers 1996). Derivations: docs/theory.md,
section 5.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fedncv.estimators import calibrated_weights
from fedncv.methods.base import Federation, Method, Replies, ServerAsk, Stepped, combined
from fedncv.methods.switches.label_shares import Shares, shares_of
from fedncv.methods.switches.labels import TELLS
from fedncv.methods.switches.through import refuse_robust, through


@dataclass(frozen=True, kw_only=True)
class Config:
    ridge: float = 0.01
    """Ridge, above 0; a larger one stays closer to the plain weights."""

    def __post_init__(self) -> None:
        if not 0 < self.ridge < math.inf:
            raise ValueError(f"ridge must be above 0 and finite, not {self.ridge}")


class Calibrated(NamedTuple):
    server: Any  # the method's own
    shares: Shares


def with_calibrated(method: Method, config: Config = Config()) -> Method:
    """Return ``method`` with weights that calibrate the labels of each round."""
    refuse_robust(method, "calibrated", "sets the weights of a mean over all replies")
    if "ht" in method.switches:
        raise ValueError("calibrated and ht both set the weights of the replies; use one, as in fedavg+calibrated")
    weighs = method.combine is None or {"memory", "labels"} & set(method.switches)
    if not weighs or "delta_P" not in method.reveals or method.weights.get("delta_P") == "one":
        raise ValueError("calibrated needs a method that averages updates by samples, as in fedavg+calibrated")

    def init(x_P: Tensor, federation: Federation) -> Calibrated:
        return Calibrated(method.init(x_P, federation), shares_of(federation, x_P.device))

    def combine(state: Calibrated, replies: Replies) -> Any:
        w_S = replies.sizes_S / replies.sizes_S.sum()
        omega_S = calibrated_weights(w_S, state.shares.pi_NC[replies.ids_S], state.shares.mean_C, ridge=config.ridge)
        return combined(method, state.server, replies._replace(omega_S=omega_S))

    def step(ask: ServerAsk, state: Calibrated, given: Any) -> Stepped:
        stepped = method.step(ask, state.server, given)
        return stepped._replace(server=state._replace(server=stepped.server))

    return through(method)._replace(
        init=init,
        combine=combine,
        step=step,
        fixed_sizes=True,
        joining={**method.joining, "label_counts_C": TELLS},
        switches=(*method.switches, "calibrated"),
    )
