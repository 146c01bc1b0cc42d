"""Relayed sums on a tree, as in RelaySGD: every model reaches everyone, without being mixed on its way.

    m_{v->u} <- a_v + sum_{k -> v, k != u} m_{k->v}        what v sends to u: its own, and what it had from the others
    c_{v->u} <- 1 + sum_{k -> v, k != u} c_{k->v}          and of how many clients that is the sum
    mean_u   <- (a_u + sum_{v -> u} m_{v->u}) / (1 + sum_{v -> u} c_{v->u})

A client at distance d is heard with a delay of d - 1 rounds, and with equal weight. After as many rounds as the tree is
wide, c adds up to N - 1. Vogels et al., NeurIPS 2021, https://arxiv.org/abs/2110.04175, Algorithm 1.

Letters: N clients, E links (receiver u, sender v) of the tree.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from fedncv.topology.graphs import Links
from fedncv.topology.mixing import mixed
from fedncv.tree import tree_map


class InFlight(NamedTuple):
    """What the links carry: sums of models, and how many each is the sum of."""

    m_E: Any
    c_E: Tensor  # float64


class Paths(NamedTuple):
    """The links as matrices of zeros and ones."""

    sender_EN: csr_array
    onward_EE: csr_array  # from a link into the sender, not from the receiver
    into_NE: csr_array


def paths(links: Links, num_clients: int) -> Paths:
    u, v = links.T
    each, ones = np.arange(len(links)), np.ones(len(links))
    place = {(int(a), int(b)): e for e, (a, b) in enumerate(links)}
    neighbours: list[list[int]] = [[] for _ in range(num_clients)]
    for a, b in links.tolist():
        neighbours[a].append(b)
    onward = [(e, place[b, k]) for e, (a, b) in enumerate(links.tolist()) for k in neighbours[b] if k != a]
    to, source = np.array(onward, dtype=np.int64).reshape(-1, 2).T
    return Paths(
        csr_array((ones, (each, v)), shape=(len(links), num_clients)),
        csr_array((np.ones(len(onward)), (to, source)), shape=(len(links), len(links))),
        csr_array((ones, (u, each)), shape=(num_clients, len(links))),
    )


def nothing_yet(value_N: Any, links: Links) -> InFlight:
    """Return empty messages for values of this form."""
    m_E = tree_map(lambda a_N: a_N.new_zeros(len(links), *a_N.shape[1:]), value_N)
    return InFlight(m_E, torch.zeros(len(links), dtype=torch.float64))


def relayed(value_N: Any, before: InFlight, way: Paths) -> tuple[Any, InFlight]:
    """Return every client's mean of the values that have reached it, and the messages."""
    m_E = tree_map(torch.add, mixed(way.sender_EN, value_N), mixed(way.onward_EE, before.m_E))
    c_E = 1 + mixed(way.onward_EE, before.c_E)
    count_N = 1 + mixed(way.into_NE, c_E)

    def mean(a_N: Tensor, arrived_N: Tensor) -> Tensor:
        count: Tensor = count_N.to(a_N).reshape(-1, *[1] * (a_N.dim() - 1))
        return (a_N + arrived_N) / count

    return tree_map(mean, value_N, mixed(way.into_NE, m_E)), InFlight(m_E, c_E)
