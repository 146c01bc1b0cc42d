"""Small rounds of client sampling, for which all draws of m of N clients can be listed.

ĝ = β h̄ + Σ_{u∈S} ω_u (Δ_u − β h_u)
"""

from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import NamedTuple

import torch
from torch import Tensor

from fedncv.estimators import horvitz_thompson_weights, self_normalised_weights, server_estimate
from fedncv.theory.statement import tensor

BETAS = (0.0, 0.5, 1.0, 1.5)


class Round(NamedTuple):
    """Sizes, fresh updates and memory of all clients (None: never seen), and how many are drawn."""

    sizes: tuple[int, ...]
    delta: tuple[int, ...]
    memory: tuple[int | None, ...]
    num_drawn: int

    def __str__(self) -> str:
        memory = ", ".join("–" if h is None else str(h) for h in self.memory)
        return f"n = {self.sizes}, Δ = {self.delta}, h = ({memory}), m = {self.num_drawn}"

    @property
    def p_N(self) -> Tensor:
        return tensor(self.sizes) / sum(self.sizes)

    @property
    def delta_N1(self) -> Tensor:
        return tensor(self.delta).reshape(-1, 1)

    @property
    def h_N1(self) -> Tensor:
        return tensor([0 if h is None else h for h in self.memory]).reshape(-1, 1)

    @property
    def draws(self) -> list[list[int]]:
        return [list(S) for S in combinations(range(len(self.sizes)), self.num_drawn)]

    @property
    def full(self) -> Tensor:
        """The update with full participation: Σ_u p_u Δ_u."""
        return self.p_N @ self.delta_N1

    @property
    def units(self) -> tuple[Tensor, Tensor]:
        """N p_u Δ_u and N p_u h_u, whose means over a draw are the Horvitz–Thompson sums."""
        scale_N1 = (len(self.sizes) * self.p_N)[:, None]
        return scale_N1 * self.delta_N1, scale_N1 * self.h_N1


def rounds() -> Iterator[Round]:
    """Yield rounds of two, three and four clients; equal sizes, unequal sizes, a client without data; some unseen."""
    yield from (
        Round(sizes, delta, memory, m)
        for sizes in ((1, 1), (1, 2), (0, 3))
        for delta in ((0, 1), (1, 0), (2, -3))
        for memory in ((None, None), (1, None), (2, 1), (2, -2))
        for m in (1, 2)
    )
    for sizes in ((1, 1, 1), (1, 2, 4), (0, 3, 5)):
        for delta in ((0, 1, 0), (2, -3, 5)):
            for memory, m in product(((1, None, 2), (2, -2, 4), (0, 0, 0)), (1, 2, 3)):
                yield Round(sizes, delta, memory, m)
    for m in (1, 2, 3, 4):
        yield Round((1, 3, 4, 9), (4, -1, 7, 2), (3, None, 9, 1), m)


def round_cases() -> Iterator[tuple[Round]]:
    yield from ((r,) for r in rounds())


def round_beta_cases() -> Iterator[tuple[Round, float]]:
    yield from product(rounds(), BETAS)


def equal_size_cases() -> Iterator[tuple[Round, float]]:
    yield from ((r, beta) for r, beta in round_beta_cases() if len(set(r.sizes)) == 1)


Weights = Callable[[Round, list[int]], Tensor]


def uniform_ht(r: Round, S: list[int]) -> Tensor:
    return horvitz_thompson_weights(r.p_N[S], torch.full((len(S),), len(S) / len(r.sizes), dtype=torch.float64))


def self_normalised(r: Round, S: list[int]) -> Tensor:
    return self_normalised_weights(tensor(r.sizes)[S])


def estimates(r: Round, beta: float | Tensor, weights: Weights = uniform_ht) -> Tensor:
    """ĝ of every draw."""
    delta_N1, h_N1, mean_h = r.delta_N1, r.h_N1, r.p_N @ r.h_N1
    return torch.stack([server_estimate(delta_N1[S], h_N1[S], weights(r, S), mean_h, beta=beta) for S in r.draws])


def variance(values: Tensor) -> float:
    return (values - values.mean(dim=0)).square().mean(dim=0).sum().item()


def mean_squared_error(r: Round, beta: float | Tensor, weights: Weights) -> float:
    return (estimates(r, beta, weights) - r.full).square().mean().item()
