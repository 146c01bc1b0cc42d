"""Check a dataset before it is used: as many targets as inputs, and no NaN or infinite number in it."""

import math

import torch
from torch import Tensor

from fedncv.data.dataset import Dataset

BLOCK = 1 << 22  # numbers to look at in one go


def check_samples(dataset: Dataset) -> None:
    """Raise ValueError with the first sample that is wrong."""
    name, n = dataset.name, len(dataset.x)
    for what, values in (("targets", dataset.y), ("groups", dataset.groups), ("owners", dataset.owners)):
        if values is not None and len(values) != n:
            raise ValueError(f"{name}: {n} inputs and {len(values)} {what}; give the same number of both")
    if not n:
        raise ValueError(f"{name} has no samples; give at least one")
    for x, what in ((dataset.x, "feature"), (dataset.y, "target")):
        if (found := first_not_finite(x)) is not None:
            sample, *place = found
            value = f"{x[tuple(found)].item():g}"
            raise ValueError(
                f"{name}: sample {sample}, {_named(dataset, what, place)} is {value}; remove or fill such values"
            )
    if not all(map(math.isfinite, (*dataset.mean, *dataset.std))) or 0 in dataset.std:
        raise ValueError(f"{name}: mean {dataset.mean} and std {dataset.std} must be finite, and std not 0")


def first_not_finite(x: Tensor) -> list[int] | None:
    """Return the place of the first NaN or infinity, or None.

    >>> first_not_finite(torch.tensor([[0.0, 1.0], [2.0, float("nan")]]))
    [1, 1]
    """
    if not x.is_floating_point() or not x.numel():
        return None
    rows = max(1, BLOCK * len(x) // x.numel())
    for start in range(0, len(x), rows):
        finite = torch.isfinite(x[start : start + rows])
        if not finite.all():
            sample, *place = (~finite).nonzero()[0].tolist()
            return [start + sample, *place]
    return None


def _named(dataset: Dataset, what: str, place: list[int]) -> str:
    if not place:
        return f"the {what}"
    if what == "feature" and len(place) == 1 and dataset.features:
        return f"feature {dataset.features[place[0]]!r}"
    return f"{what} {place[0] if len(place) == 1 else tuple(place)}"
