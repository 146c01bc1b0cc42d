"""Make a ``Dataset`` of your own arrays, of a torch Dataset, or of a table of the Hugging Face library.

from_arrays(images, labels)                          images uint8 (n, c, h, w) or (n, h, w), or any floats
from_torch(torchvision.datasets.Flowers102(...))     anything with len() and [i] -> (input, label)
from_table(datasets.load_dataset(...), owner="user")
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedncv.data.dataset import Dataset
from fedncv.data.raw import moments
from fedncv.data.sound import check_samples


class Indexed(Protocol):
    """The interface of a map-style torch Dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def from_arrays(
    x: ArrayLike | Tensor,
    y: ArrayLike | Tensor,
    *,
    name: str = "own",
    num_classes: int | None = None,
    owners: ArrayLike | Tensor | None = None,
) -> Dataset:
    """Make a dataset of inputs (n, ...), integer labels (n,) and the samples' ``owners`` (n,), numbers or names.

    Bytes are pictures: they get a channel if they have none, and are scaled and normalised when used.
    Other inputs are not changed. ``num_classes`` defaults to the largest label plus one. Raise ValueError if an input
    is NaN or infinite.

    >>> from_arrays(np.zeros((4, 28, 28), np.uint8), [0, 1, 1, 2]).input_shape
    (1, 28, 28)
    """
    inputs, labels = _tensor(x), _tensor(y)
    if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"labels are {labels.dtype} of shape {tuple(labels.shape)}; give one integer per sample")
    if len(inputs) != len(labels) or not len(labels):
        raise ValueError(f"{len(inputs)} inputs and {len(labels)} labels; give the same number of both, at least one")
    labels = labels.to(torch.int64)
    num_classes = int(labels.max()) + 1 if num_classes is None else num_classes
    if labels.min() < 0 or labels.max() >= num_classes:
        wrong = int(labels.min() if labels.min() < 0 else labels.max())
        raise ValueError(f"label {wrong} is out of range 0..{num_classes - 1}; give num_classes or renumber")
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    if inputs.dtype == torch.uint8:
        inputs = inputs[:, None] if inputs.dim() == 3 else inputs
        if inputs.dim() != 4:
            raise ValueError(
                f"pictures have shape {tuple(inputs.shape)}; give (n, channels, height, width) or (n, height, width)"
            )
        if inputs.shape[-1] in (1, 3) and inputs.shape[1] not in (1, 3):
            raise ValueError(f"pictures have shape {tuple(inputs.shape)}; move the channels: x.transpose(0, 3, 1, 2)")
        mean, std = moments(inputs.numpy())
    dataset = Dataset(name, inputs, labels, num_classes, mean, std, owners=owner_numbers(owners, len(labels)))
    check_samples(dataset)
    return dataset


def from_torch(data: Indexed, *, name: str = "own", num_classes: int | None = None) -> Dataset:
    """Read every sample of a map-style torch Dataset once; inputs may be tensors, arrays or Pillow pictures."""
    inputs, labels = [], []
    for index in range(len(data)):
        x, y, *_ = data[index]
        inputs.append(_input(x))
        labels.append(int(y))
        if inputs[-1].shape != inputs[0].shape:
            raise ValueError(
                f"sample {index} has shape {tuple(inputs[-1].shape)}, sample 0 {tuple(inputs[0].shape)}; "
                "resize all to one shape, for example by a transform"
            )
    if not inputs:
        raise ValueError("the dataset is empty; give at least one sample")
    return from_arrays(torch.stack(inputs), labels, name=name, num_classes=num_classes)


def from_table(
    table: Any, *, x: str = "image", y: str = "label", owner: str | None = None, name: str = "own"
) -> Dataset:
    """Read the columns ``x`` and ``y`` of a Hugging Face Dataset, and ``owner`` for natural clients."""
    for column in filter(None, [x, y, owner]):
        if column not in table.column_names:
            raise ValueError(f"there is no column {column!r}; the table has {', '.join(table.column_names)}")
    inputs = [_input(value) for value in table[x]]
    if any(value.shape != inputs[0].shape for value in inputs):
        raise ValueError(f"the inputs of column {x!r} differ in shape; resize all to one shape")
    owners = None if owner is None else list(table[owner])
    return from_arrays(torch.stack(inputs), list(table[y]), name=name, owners=owners)


def _tensor(values: ArrayLike | Tensor) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))


def _input(value: Any) -> Tensor:
    """Return one input; a Pillow picture becomes bytes (channels, height, width)."""
    if isinstance(value, Tensor):
        return value
    array = np.array(value)
    if hasattr(value, "getbands"):
        array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(array))


def owner_numbers(owners: ArrayLike | Tensor | Sequence[str] | None, n: int) -> Tensor | None:
    """Return the owners as numbers 0, 1, …, in sorted order."""
    if owners is None:
        return None
    values = owners.numpy() if isinstance(owners, Tensor) else np.asarray(owners)
    if values.shape != (n,):
        raise ValueError(f"owners have shape {values.shape}; give one for each of the {n} samples")
    return torch.from_numpy(np.unique(values, return_inverse=True)[1].astype(np.int64))
