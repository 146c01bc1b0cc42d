"""Norm clipping with an adaptive threshold: shorten the replies that are longer than most others.

    f         = ceil(share * |S|), at most ceil(|S| / 2) - 1
    tau       = the (|S| - f)-th smallest of the norms ||a_u||, in every round anew
    server      x <- x - sum_S p_u Delta_u * min(1, tau / ||Delta_u||)
                every other array that clients send alike, with a tau of its own; fields of one number and running
                statistics go by the trimmed mean with the same share (+trimmed)

It withstands f bad replies in this sense: tau is at most the largest honest norm, so no reply, and no mean, is longer
than that. With more than f, tau is theirs. It limits lengths, not directions: bad clients with the weight w still pull
with w * tau, and +median, +trimmed and +krum bound more. share = 0 is the method itself; share near 0.5 clips to the
median norm. With one or two replies f is 0, and nobody is withstood. Every row of the run has the numbers
``withstands`` and ``clip_norm``, the largest tau of any field.

Cost: |S| norms; messages do not change. The price without any bad client: the f longest honest updates are shortened,
and clients with many samples or rare data often have the longest.

Norm clipping as a defence: Sun et al., 2019, https://arxiv.org/abs/1911.07963. A threshold that follows a quantile of
the norms: Andrew et al., NeurIPS 2021, https://arxiv.org/abs/1905.03871. Departures from these papers: the quantile is
that of the round's own replies. The first has a fixed threshold; the second tracks a quantile over rounds, under
differential privacy. No noise is added.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedncv.methods.base import Method, Replies, Screen
from fedncv.methods.switches.robust import Numbers, check_share, with_screen, withstood
from fedncv.methods.switches.trimmed import trim
from fedncv.tree import leaves


@dataclass(frozen=True, kw_only=True)
class Config:
    share: float = 0.2
    """Largest share of bad clients among the replies that it withstands, from 0 to below 0.5; 0 is the method alone."""

    def __post_init__(self) -> None:
        check_share(self.share)


def norms(a_SP: Tensor) -> Tensor:
    """Return the norm of each row, in float64: squares of large numbers overflow earlier otherwise."""
    norms_S: Tensor = torch.linalg.vector_norm(a_SP.double().flatten(1), dim=1)
    return norms_S


def threshold(a_SP: Tensor, f: int) -> Tensor:
    """Return tau, the (|S| - f)-th smallest norm."""
    return norms(a_SP).sort().values[len(a_SP) - 1 - f]


def clipped(a_SP: Tensor, f: int) -> Tensor:
    """Return the rows, shortened to tau where they are longer.

    >>> clipped(torch.tensor([[3.0, 4.0], [0.0, 1.0], [30.0, 40.0]]), 1)
    tensor([[3., 4.],
            [0., 1.],
            [3., 4.]])
    """
    tau, norms_S = threshold(a_SP, f), norms(a_SP)
    return a_SP * torch.where(norms_S > tau, tau / norms_S, 1.0).to(a_SP.dtype)[:, None]


def with_clipped(method: Method, config: Config = Config()) -> Method:
    """Return ``method`` whose server shortens the longest replies."""
    if config.share == 0:
        return method

    def f_of(num: int) -> int:
        return withstood(config.share, num, (num - 1) // 2)

    def rule(a_SP: Tensor, _w_S: Tensor) -> Tensor:
        return clipped(a_SP, f_of(len(a_SP)))

    def numbers(replies: Replies) -> Numbers:
        f = f_of(len(replies.ids_S))
        taus = [threshold(leaf, f) for _, leaf in leaves(replies.ups) if leaf.dim() > 1]
        return {"withstands": f} | ({"clip_norm": torch.stack(taus).max()} if taus else {})

    return with_screen(method, "clipped", Screen(rule, trim(config.share).coordinates), numbers)
