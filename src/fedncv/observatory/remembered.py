"""A server's memory of its clients, found by name: rows `h` or `h_NP`, `c`, `alpha` of its state."""

import re
from typing import NamedTuple

import torch
from torch import Tensor

from fedncv.tree import leaves


class Rows(NamedTuple):
    """The clients seen: their places among the replies, and one row each."""

    places_M: Tensor
    rows_M: Tensor


def named_rows(server: object, name: str, ids_N: Tensor) -> Rows | None:
    """Return the rows called ``name`` in a server's state: a dictionary by client, or a tensor over all clients, in
    which a row of zeros is a client never seen."""
    ids = ids_N.tolist()
    found: dict[int, Tensor] = {}
    for path, leaf in leaves(server):
        if match := re.search(rf"(?:^|\.){name}\.(\d+)$", path):
            found[int(match[1])] = leaf
        elif re.search(rf"(?:^|\.){name}_NP?$", path):
            found |= {u: leaf[u] for u in ids if leaf.dim() == 1 or bool(leaf[u].any())}
    places = [i for i, u in enumerate(ids) if u in found]
    if not places:
        return None
    return Rows(torch.tensor(places, device=ids_N.device), torch.stack([found[ids[i]] for i in places]).double())
