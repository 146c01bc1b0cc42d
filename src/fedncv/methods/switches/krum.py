"""Krum and multi-Krum: average the replies that have the most others near them.

    f         = ceil(share * |S|), at most |S| / 2 - 1
    score_u   = sum of ||a_u - a_v||^2 over the |S| - f - 2 clients v nearest to u (at least one)
    chosen    = the clients with the lowest scores: one (Krum), m, or |S| - f (multi-Krum, the default)
    server      x <- x - sum_chosen n_u Delta_u / sum_chosen n_u
                every other array that clients send alike, with scores and a choice of its own; fields of one number
                and running statistics go by the trimmed mean with the same share (+trimmed)

It withstands f bad replies: every reply chosen is within sqrt(|S| - f - 2) * D of an honest one, D the largest distance
between two honest ones, because its score is at most the largest honest one and an honest client is among its nearest.
With f + 1 bad replies multi-Krum has to keep one of them; |S| - f - 1 equal ones have score 0, and Krum chooses them.
Its bound is one of distances: a bad reply near the honest ones is averaged with them. Scores do not depend on sizes;
the mean of those chosen goes by samples. With three or fewer replies f is 0, and nobody is withstood; every row of the
run has the number ``withstands``.

Cost: all distances, |S|^2 * P operations at the server; messages do not change. The price without any bad client: f
honest clients are left out, those most unlike the others, the same ones in every round if data differ. keep=1 steps
along one client's update, with its whole noise.

With +drift the server stores the mean of the chosen for every client that was not chosen, and its own for the others.

Blanchard et al., NeurIPS 2017, https://arxiv.org/abs/1703.02757 (Krum, and multi-Krum with any m).
Departures from the paper: the mean of the chosen goes by samples (there all sizes are equal), and with 2f + 2 = |S|,
where its variance bound needs one reply more, the bound above still holds.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedncv.methods.base import Method, Replies, Screen, weighted_sum
from fedncv.methods.switches.robust import Numbers, check_share, with_screen, withstood
from fedncv.methods.switches.trimmed import trim


@dataclass(frozen=True, kw_only=True)
class Config:
    share: float = 0.2
    """Largest share of bad clients among the replies that it withstands, from 0 to below 0.5."""
    keep: int | Literal["most"] = "most"
    """Number of replies that are averaged: 1 is Krum; most are all but f. With share=0 that is the method alone."""

    def __post_init__(self) -> None:
        check_share(self.share)
        if self.keep != "most" and self.keep < 1:
            raise ValueError(f"keep must be at least 1 or most, not {self.keep}")


def scores(a_SP: Tensor, f: int) -> Tensor:
    """Return the sum of squared distances from each row to its nearest |S| - f - 2 others."""
    near = min(max(len(a_SP) - f - 2, 1), len(a_SP) - 1)
    # from differences: |a|^2 + |b|^2 - 2ab loses its digits if the replies have much in common
    squares_SS = torch.cdist(a_SP, a_SP, compute_mode="donot_use_mm_for_euclid_dist").square()
    squares_SS.fill_diagonal_(torch.inf)  # not one of its own neighbours
    return squares_SS.sort(dim=1).values[:, :near].sum(dim=1)


def chosen(a_SP: Tensor, w_S: Tensor, f: int, keep: int) -> Tensor:
    """Return the rows with all but the ``keep`` of the lowest scores replaced by the mean of those; ties go by order.

    >>> chosen(torch.tensor([[1.0], [2.0], [3.0], [99.0]]), torch.tensor([1.0, 1.0, 1.0, 1.0]), 1, 3).flatten()
    tensor([1., 2., 3., 2.])
    """
    if keep >= len(a_SP):
        return a_SP
    order_S = torch.sort(scores(a_SP, f), stable=True).indices
    chosen_K, others = order_S[:keep], order_S[keep:]
    w_K = w_S[chosen_K]
    mean_P = weighted_sum(w_K / w_K.sum(), a_SP[chosen_K])
    return a_SP.index_copy(0, others, mean_P.expand(len(others), -1))


def with_krum(method: Method, config: Config = Config()) -> Method:
    """Return ``method`` with the mean of the replies that Krum chooses."""
    if config.share == 0 and config.keep == "most":
        return method

    def f_of(num: int) -> int:
        return withstood(config.share, num, (num - 2) // 2)

    def rule(a_SP: Tensor, w_S: Tensor) -> Tensor:
        num, f = len(a_SP), f_of(len(a_SP))
        return chosen(a_SP, w_S, f, num - f if config.keep == "most" else min(config.keep, num - f))

    def numbers(replies: Replies) -> Numbers:
        return {"withstands": f_of(len(replies.ids_S))}

    return with_screen(method, "krum", Screen(rule, trim(config.share).coordinates), numbers)
