"""Dataset: inputs, targets, labels, and the scale of the inputs, as one value.

Inputs stay as they are stored (uint8 images, memory-mapped or not) and are scaled batch by batch, so a
dataset costs no more memory than its file.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Dataset(NamedTuple):
    """n samples. Images are uint8, (n, channels, height, width); other inputs are floats or token ids."""

    name: str
    x: Tensor  # (n, ...)
    y: Tensor  # (n, ...) targets of the loss
    num_classes: int  # outputs of the model; for regression the number of targets
    mean: tuple[float, ...] = ()  # per channel, of x / 255; () leaves inputs as they are
    std: tuple[float, ...] = ()
    groups: Tensor | None = None  # (n,) integers that partitions use; None: y itself
    owners: Tensor | None = None  # (n,) the owner of each sample (writer, device), for the partition "natural"
    features: tuple[str, ...] = ()  # names of the columns of x, if it is a table
    classes: tuple[str, ...] = ()  # names of the classes
    standardise: bool = False  # mean and std are to be those of the training samples: ``scale.standardised``

    def __repr__(self) -> str:
        """Return name and shapes; the tensors themselves would fill pages."""
        owners = "" if self.owners is None else f", {len(np.unique(self.owners.cpu().numpy()))} owners"
        shapes = f"x {tuple(self.x.shape)} {self.x.dtype}, y {tuple(self.y.shape)} {self.y.dtype}"
        return f"Dataset({self.name!r}, {shapes}, {self.num_classes} outputs{owners})"

    @property
    def labels(self) -> Tensor:
        """(n,) int64: the labels that partitions use."""
        return self.y if self.groups is None else self.groups

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    def inputs(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the inputs at ``index``, scaled: bytes to [0, 1], then (x - mean) / std per channel."""
        x = self.x.index_select(0, index.to(self.x.device))  # a copy, a row at a time: the rest is done in place
        if x.dtype == torch.uint8:
            x = x.to(dtype).div_(255)
        elif (x.is_floating_point() or self.mean) and not (x.dtype == torch.float64 and self.mean):
            x = x.to(dtype)
        elif x.dtype in (torch.int8, torch.int16):  # token ids, stored small; torch looks up only larger ones
            x = x.to(torch.int64)
        if self.mean:
            shape = (1, -1, *[1] * (x.dim() - 2))
            mean = torch.tensor(self.mean, dtype=x.dtype, device=x.device).reshape(shape)
            std = torch.tensor(self.std, dtype=x.dtype, device=x.device).reshape(shape)
            x = x.sub_(mean).div_(std).to(dtype)  # doubles are rounded last: times and ids are large numbers
        return x

    def in_memory_of(self, other: "Dataset") -> "Dataset":
        """Return this dataset with the tensors of ``other``, which has the same samples, and its own scale."""
        return other._replace(mean=self.mean, std=self.std)
