"""Trees: tensors, or tuples, NamedTuples and mappings of trees; other leaves are not changed.

Messages and states are trees, so that a method can name its fields and an engine can stack, slice, count and store
them without knowing their meaning.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Tree = Any


def tree_map(function: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply ``function`` to the tensors of one tree, or to the corresponding tensors of several trees of one form."""
    first = trees[0]
    if isinstance(first, Tensor):
        return function(*trees)
    if isinstance(first, tuple):
        parts = [tree_map(function, *parts) for parts in zip(*trees, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if isinstance(first, Mapping):
        return {key: tree_map(function, *(tree[key] for tree in trees)) for key in first}
    return first


def tree_map_named(function: Callable[[str, Tensor], Any], tree: Tree) -> Tree:
    """Apply ``function`` to the name and the tensor of every leaf; the name is the last one of its path."""
    names = iter([path.rpartition(".")[2] for path, leaf in leaves(tree) if isinstance(leaf, Tensor)])
    return tree_map(lambda tensor: function(next(names), tensor), tree)


def stack(trees: list[Tree]) -> Tree:
    """Stack many trees of one form to one tree with a leading axis."""
    return tree_map(lambda *tensors: torch.stack(tensors), *trees)


def row(tree: Tree, i: int) -> Tree:
    """Return the i-th row of every tensor."""
    return tree_map(lambda tensor: tensor[i], tree)


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for every leaf, with the names of fields in the path."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(tree, tuple):
        items = zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True)
    elif isinstance(tree, Mapping):
        items = tree.items()
    else:
        yield path, tree
        return
    for name, part in items:
        yield from leaves(part, f"{path}.{name}" if path else str(name))


def num_bytes(tree: Tree) -> int:
    """Return the bytes that the tree's numbers need in a message; a Python number counts eight."""
    return sum(leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 8 for _, leaf in leaves(tree))


def all_finite(tree: Tree) -> bool:
    tensors = [leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    # A sum is a tenth of the work, and it is not finite if a summand is not; finite summands may overflow, too.
    return _none_false([torch.isfinite(t.sum()) for t in tensors]) or _none_false(
        [torch.isfinite(t).all() for t in tensors]
    )


def _none_false(flags: list[Tensor]) -> bool:
    return not flags or bool(torch.stack(flags).all())  # one read from the device, not one per tensor
