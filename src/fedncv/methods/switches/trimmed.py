"""Trimmed mean: for every parameter by itself, leave out the largest and the smallest numbers of the replies.

    f         = ceil(share * |S|), at most ceil(|S| / 2) - 1
    kept_p    = S without the f clients with the largest and the f with the smallest number in coordinate p
    server      x_p <- x_p - sum_{kept_p} n_u Delta_{u,p} / sum_{kept_p} n_u
                every other field that clients send alike; a field that counts clients once has weights 1, not n_u

Ranks count clients; the mean of those kept goes by samples, so a client that claims many samples gains weight only
inside the range of the others. It withstands f bad replies: each coordinate lies between two honest numbers. With more
than f they move it as far as they want. share = 0 is the method itself. With one or two replies f is 0, and nobody is
withstood; every row of the run has the number ``withstands``.

Cost: a sort of |S| numbers per parameter at the server; messages do not change. The price without any bad client: the
extreme 2f of |S| numbers are lost, and with data that differ much between clients they are what clients know alone.

With +drift the server stores, for every client, its own numbers where they were kept, and the trimmed mean elsewhere.

Yin et al., ICML 2018, https://arxiv.org/abs/1803.01498, Algorithm 1, option II. Departures from the paper: kept numbers
are weighted by samples (there all sizes are equal), and share * |S| is rounded up.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedncv.methods.base import Method, Replies, Screen
from fedncv.methods.switches.robust import Numbers, check_share, with_screen, withstood


@dataclass(frozen=True, kw_only=True)
class Config:
    share: float = 0.2
    """Largest share of bad clients among the replies that it withstands, from 0 to below 0.5; 0 is the method alone."""

    def __post_init__(self) -> None:
        check_share(self.share)


def trimmed(a_SP: Tensor, w_S: Tensor, f: int) -> Tensor:
    """Return the rows with each column's f largest and f smallest numbers replaced by the mean of the others.

    >>> trimmed(torch.tensor([[1.0], [2.0], [4.0], [99.0]]), torch.tensor([1.0, 1.0, 1.0, 1.0]), 1).flatten()
    tensor([3., 2., 4., 3.])
    """
    if f == 0:
        return a_SP
    sorted_SP, order_SP = torch.sort(a_SP, dim=0, stable=True)
    kept = slice(f, len(a_SP) - f)
    w_KP = w_S.to(a_SP.dtype)[order_SP[kept]]
    mean_P = (w_KP * sorted_SP[kept]).sum(dim=0) / w_KP.sum(dim=0)
    mean_P = mean_P.clamp(sorted_SP[f], sorted_SP[-1 - f])  # rounding must not leave the range
    out_SP = torch.cat([order_SP[:f], order_SP[len(a_SP) - f :]])
    return a_SP.scatter(0, out_SP, mean_P.expand_as(out_SP))


def trim(share: float) -> Screen:
    """Return the rule that trims this share of the replies on both sides."""

    def rule(a_SP: Tensor, w_S: Tensor) -> Tensor:
        return trimmed(a_SP, w_S, withstood(share, len(a_SP), (len(a_SP) - 1) // 2))

    return Screen(rule, rule)


def with_trimmed(method: Method, config: Config = Config()) -> Method:
    """Return ``method`` with the trimmed mean in place of every mean of replies."""
    if config.share == 0:
        return method

    def numbers(replies: Replies) -> Numbers:
        num = len(replies.ids_S)
        return {"withstands": withstood(config.share, num, (num - 1) // 2)}

    return with_screen(method, "trimmed", trim(config.share), numbers)
