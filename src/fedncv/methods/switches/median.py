"""Coordinate-wise median: the middle number of the replies, for every parameter by itself.

    server   a_med = median of {a_u : u in S}, coordinate by coordinate; the mean of the two middle ones if |S| is even
             x <- x - Delta_med       instead of x - sum_S p_u Delta_u; every other field that clients send alike

Every client counts once, whatever its size. It withstands f = ceil(|S| / 2) - 1 bad replies: each coordinate then lies
between two honest numbers. With |S|/2 or more, they place it where they want. With one or two replies it is their plain
mean, and nobody is withstood; every row of the run has the number ``withstands``.

Cost: a sort of |S| numbers per parameter at the server; messages do not change. The price without any bad client: if
clients' data differ, the median of their updates is not the mean, and few clients with rare data are outvoted in every
coordinate. It leaves nothing of single clients, so +drift cannot use it; ``fedncv+trimmed`` works.

Yin et al., ICML 2018, https://arxiv.org/abs/1803.01498, Algorithm 1, option I (there of equal sizes).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedncv.methods.base import Method, Replies, Screen
from fedncv.methods.switches.robust import Numbers, with_screen


@dataclass(frozen=True, kw_only=True)
class Config:
    """No knobs."""


def median(a_SP: Tensor) -> Tensor:
    """Return the median of each column.

    >>> median(torch.tensor([[1.0, 4.0], [2.0, 5.0], [9.0, -9.0]])), median(torch.tensor([[1.0], [2.0]]))
    (tensor([2., 4.]), tensor([1.5000]))
    """
    sorted_SP, middle = torch.sort(a_SP, dim=0).values, len(a_SP) // 2
    return sorted_SP[middle] if len(a_SP) % 2 else torch.lerp(sorted_SP[middle - 1], sorted_SP[middle], 0.5)


def to_median(a_SP: Tensor, _w_S: Tensor) -> Tensor:
    """Return rows that all are the median."""
    return median(a_SP).expand_as(a_SP)


def with_median(method: Method, _config: Config = Config()) -> Method:
    """Return ``method`` with the coordinate-wise median in place of every mean of replies."""

    def numbers(replies: Replies) -> Numbers:
        return {"withstands": (len(replies.ids_S) - 1) // 2}

    return with_screen(method, "median", Screen(to_median, to_median), numbers)
