"""Apply a function to every client's copy of a tree: the rows along the first axis of its tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedncv.tree import leaves, tree_map


def per_row(function: Callable[..., Any], *trees: Any) -> Any:
    """Return the trees ``function(row, row, …)`` of all rows, stacked, by ``torch.vmap``.

    Numbers of Python in the trees are the same for all rows, in what is given and in what is returned.
    """
    given = [leaf for _, leaf in leaves(tuple(trees)) if isinstance(leaf, Tensor)]
    if not given:
        return function(*trees)
    form: Any = None

    def one(*row: Tensor) -> tuple[Tensor, ...]:
        nonlocal form
        filled = iter(row)
        form = function(*tree_map(lambda _: next(filled), tuple(trees)))
        return tuple(leaf for _, leaf in leaves(form) if isinstance(leaf, Tensor)) or row[:1]

    found = iter(torch.vmap(one)(*given))
    return tree_map(lambda _: next(found), form)
