"""Horvitz-Thompson weights: average the replies without bias, usually with more noise.

    sum_S omega_u a_u,   omega_u = p_u / P(u in S),   p_u = n_u / n over all clients

instead of omega_u = p_u / sum_S p_v. The mean over the draw is exactly sum_u p_u a_u, for any sizes. The weights of one
round need not sum to one; running statistics keep the usual weights, which do.

Horvitz and Thompson, JASA 1952; docs/theory.md has the comparison by mean squared error.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fedncv.estimators import horvitz_thompson_weights
from fedncv.methods.base import Federation, Method, Replies, ServerAsk, Stepped, combined, field_of
from fedncv.methods.switches.through import refuse_robust, through


@dataclass(frozen=True, kw_only=True)
class Config:
    """No knobs."""


class Sized(NamedTuple):
    server: Any  # the method's own
    n_N: Tensor  # samples of every client as last reported, float64


class Weighted(NamedTuple):
    combined: Any
    n_N: Tensor


def with_horvitz_thompson(method: Method, _config: Config = Config()) -> Method:
    """Return ``method`` with unbiased weights for its average over the replies."""
    refuse_robust(method, "ht", "sets the weights of a mean over all replies")
    weighs = method.combine is None or {"memory", "labels"} & set(method.switches)
    if not weighs or "delta_P" not in method.reveals or method.weights.get("delta_P") == "one":
        raise ValueError("ht needs a method that averages updates by samples, as in fedavg+ht")

    def init(x_P: Tensor, federation: Federation) -> Sized:
        return Sized(method.init(x_P, federation), federation.sizes_N.to(x_P.device))

    def combine(sized: Sized, replies: Replies) -> Weighted:
        n_N = sized.n_N.index_copy(0, replies.ids_S, replies.sizes_S.to(sized.n_N))
        p_S = (replies.sizes_S / n_N.sum()).to(field_of(replies.ups, "delta_P").dtype)
        omega_S = horvitz_thompson_weights(p_S, replies.inclusion_S.to(p_S))
        return Weighted(combined(method, sized.server, replies._replace(omega_S=omega_S)), n_N)

    def step(ask: ServerAsk, sized: Sized, weighted: Weighted) -> Stepped:
        stepped = method.step(ask, sized.server, weighted.combined)
        return stepped._replace(server=Sized(stepped.server, weighted.n_N))

    return through(method)._replace(init=init, combine=combine, step=step, switches=(*method.switches, "ht"))
