"""Hold the replies of a round, and compute the weighted sums that a server in the sums form receives.

Letters of shapes: S clients of the round, P parameters.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedncv.secure.fixed_point import Grid, value, whole
from fedncv.tree import leaves


class Replies(NamedTuple):
    """The replies of a round, stacked in the order of client ids, not of arrival."""

    ups: Any  # what `finish` sent, with a leading axis S
    ids_S: Tensor
    sizes_S: Tensor  # training samples
    inclusion_S: Tensor  # probability that this client is drawn and replies in this round
    omega_S: Tensor | None = None  # weights that replace p_u, such as Horvitz-Thompson's
    awake_A: Tensor | None = None  # clients that were reached in this round, with a reply or without; None: unknown

    @property
    def weight_S(self) -> Tensor:
        """Return p_u normalised over the replies, or ``omega_S`` if given."""
        return self.sizes_S / self.sizes_S.sum() if self.omega_S is None else self.omega_S


Weight = Literal["samples", "one"]


class Sums(NamedTuple):
    """Weighted sums over the replies of a round. A server in the sums form receives nothing else about them.

    The weight w_u of a field is n_u ("samples"), or 1 ("one") if ``Method.weights`` says so.
    """

    mean: Callable[[str], Tensor]  # field of `up` -> sum_S w_u a_u / sum_S w_u
    sum: Callable[[str], Tensor]  # field of `up` -> sum_S w_u a_u
    samples: Tensor  # sum_S n_u
    num_replies: int

    def with_mean(self, field: str, value: Tensor) -> "Sums":
        """Return the same sums with another estimate of the mean of ``field``, which goes by samples."""
        return self._replace(
            mean=lambda name: value if name == field else self.mean(name),
            sum=lambda name: value * self.samples.to(value) if name == field else self.sum(name),
        )


def sums_of(replies: Replies, weights: Mapping[str, Weight]) -> Sums:
    """Return the sums of replies that are all in this process; each sum is computed on request."""
    num_replies = len(replies.ids_S)
    ones_S = replies.sizes_S.new_ones(num_replies)

    def mean(name: str) -> Tensor:
        w_S = replies.weight_S if weights.get(name, "samples") == "samples" else ones_S / num_replies
        return weighted_sum(w_S, field_of(replies.ups, name))

    def total(name: str) -> Tensor:
        if weights.get(name, "samples") == "one":
            return weighted_sum(ones_S, field_of(replies.ups, name))
        if replies.omega_S is not None:
            return mean(name) * replies.sizes_S.sum().to(mean(name))
        return weighted_sum(replies.sizes_S, field_of(replies.ups, name))

    return Sums(mean, total, replies.sizes_S.sum(), num_replies)


class Totals(NamedTuple):
    """sum_S w_u a_u of every field, as secure aggregation or one of several machines gives it.

    With a grid they are sums of whole numbers, sum_S w_u q_u in int64 (see ``fixed_point``).
    """

    fields: Mapping[str, Tensor]
    samples: Tensor  # sum_S n_u
    num_replies: int

    def plus(self, other: "Totals") -> "Totals":
        """Return the totals over the replies of both."""
        fields = {name: value + other.fields[name] for name, value in self.fields.items()}
        return Totals(fields, self.samples + other.samples, self.num_replies + other.num_replies)


def totals_of(replies: Replies, weights: Mapping[str, Weight]) -> Totals:
    sums = sums_of(replies, weights)
    names = [path.rpartition(".")[2] for path, _ in leaves(replies.ups)]
    return Totals({name: sums.sum(name) for name in names}, sums.samples, sums.num_replies)


def sums_from_totals(totals: Totals, weights: Mapping[str, Weight]) -> Sums:
    """Return the sums from the totals alone; equal to ``sums_of`` to rounding."""

    def mean(name: str) -> Tensor:
        total, by_samples = totals.fields[name], weights.get(name, "samples") == "samples"
        return total / (totals.samples.to(total) if by_samples else totals.num_replies)

    return Sums(mean, totals.fields.__getitem__, totals.samples, totals.num_replies)


def whole_totals_of(replies: Replies, weights: Mapping[str, Weight], grid: Grid) -> Totals:
    """Return the exact totals of whole numbers, for replies that lie on the grid."""
    sizes_S, names = replies.sizes_S.to(torch.int64), [path.rpartition(".")[2] for path, _ in leaves(replies.ups)]

    def total(name: str) -> Tensor:
        q_S = whole(grid, name, field_of(replies.ups, name))
        w_S = sizes_S if weights.get(name, "samples") == "samples" else torch.ones_like(sizes_S)
        return whole_sum(w_S, q_S)

    return Totals({name: total(name) for name in names}, replies.sizes_S.sum(), len(replies.ids_S))


def whole_sum(w_S: Tensor, q_S: Tensor) -> Tensor:
    """Return sum_u w_u q_u of whole numbers, in int64."""
    return (w_S.reshape(-1, *[1] * (q_S.dim() - 1)) * q_S).sum(dim=0)


def sums_of_whole(totals: Totals, weights: Mapping[str, Weight], grid: Grid, dtype: torch.dtype) -> Sums:
    """Return the sums from totals of whole numbers, rounded to ``dtype`` at the end."""

    def mean(name: str) -> Tensor:
        by_samples = weights.get(name, "samples") == "samples"
        count = totals.samples.to(torch.float64) if by_samples else totals.num_replies
        return (value(grid, name, totals.fields[name]) / count).to(dtype)

    def total(name: str) -> Tensor:
        return value(grid, name, totals.fields[name]).to(dtype)

    return Sums(mean, total, totals.samples, totals.num_replies)


def field_of(ups: Any, name: str) -> Tensor:
    """Return the field ``name`` of a reply, also if switches have wrapped the reply."""
    fields = {path.rpartition(".")[2]: leaf for path, leaf in leaves(ups)}
    if name not in fields:
        raise ValueError(f"clients send no field {name!r} (they send {', '.join(fields) or 'nothing'})")
    found: Tensor = fields[name]
    return found


def weighted_sum(weight_S: Tensor, a_SP: Tensor) -> Tensor:
    """Return sum_u w_u a_u. All methods use this function, so equal methods give equal bits."""
    return weight_S.to(a_SP.dtype) @ a_SP
