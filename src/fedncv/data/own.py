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
    """Make a dataset of inputs (n, ...), targets and the samples' ``owners`` (n,), numbers or names.

    Targets are classes, integers or texts (n,), or the numbers of a regression, floats (n,) or (n, k). Texts are
    numbered in sorted order, and ``num_classes`` of integers defaults to the largest label plus one.

    Bytes are pictures: they get a channel if they have none, and are scaled and normalised when used.
    Other inputs are not changed. Raise ValueError if an input is NaN or infinite.

    >>> from_arrays(np.zeros((4, 28, 28), np.uint8), [0, 1, 1, 2]).input_shape
    (1, 28, 28)
    >>> from_arrays(np.zeros((2, 3)), ["well", "ill"]).classes
    ('ill', 'well')
    """
    inputs = _tensor(x, "inputs")
    targets, outputs, classes = _targets(y, num_classes)
    if len(inputs) != len(targets) or not len(targets):
        raise ValueError(f"{len(inputs)} inputs and {len(targets)} labels; give the same number of both, at least one")
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
    given = owner_numbers(owners, len(targets))
    dataset = Dataset(name, inputs, targets, outputs, mean, std, owners=given, classes=classes)
    check_samples(dataset)
    return dataset


def _targets(y: ArrayLike | Tensor, num_classes: int | None) -> tuple[Tensor, int, tuple[str, ...]]:
    """Return the targets, the number of the model's outputs, and the names of the classes if they were texts."""
    if not isinstance(y, Tensor) and (texts := _texts(np.asarray(y))) is not None:
        classes, number = np.unique(texts, return_inverse=True)
        if num_classes not in (None, len(classes)):
            raise ValueError(
                f"labels have {len(classes)} different texts, but num_classes is {num_classes}; leave it out"
            )
        return torch.from_numpy(number.astype(np.int64)), len(classes), tuple(map(str, classes))
    targets = _tensor(y, "labels")
    if targets.is_floating_point() and targets.dim() in (1, 2) and targets.numel():
        if num_classes is not None:
            raise ValueError(
                f"labels are {targets.dtype}, numbers of a regression, but num_classes is {num_classes}; "
                "give integers for classes, or leave num_classes out"
            )
        return targets, targets[0].numel(), ()
    if targets.dim() != 1 or targets.is_floating_point() or targets.is_complex():
        raise ValueError(
            f"labels are {targets.dtype} of shape {tuple(targets.shape)}; give one integer or text per sample, "
            "or floats (n,) or (n, k) for a regression"
        )
    targets = targets.to(torch.int64)
    if not len(targets):
        return targets, num_classes or 0, ()
    num_classes = int(targets.max()) + 1 if num_classes is None else num_classes
    if targets.min() < 0 or targets.max() >= num_classes:
        wrong = int(targets.min() if targets.min() < 0 else targets.max())
        raise ValueError(f"label {wrong} is out of range 0..{num_classes - 1}; give num_classes or renumber")
    return targets, num_classes, ()


def _texts(labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return the labels if they are texts, one per sample; None if they are something else."""
    if labels.ndim != 1 or labels.dtype.kind not in "OUT":
        return None
    for sample, label in enumerate(labels if labels.dtype.kind == "O" else ()):
        if not isinstance(label, str):
            if any(isinstance(each, str) for each in labels):
                raise ValueError(f"the label of sample {sample} is {label!r}, but others are texts; give one kind")
            return None
    return labels.astype(str)


def from_torch(data: Indexed, *, name: str = "own", num_classes: int | None = None) -> Dataset:
    """Read every sample of a map-style torch Dataset once; inputs may be tensors, arrays or Pillow pictures."""
    inputs, labels = [], []
    for index in range(len(data)):
        x, y, *_ = data[index]
        inputs.append(_input(x))
        labels.append(y.numpy(force=True) if isinstance(y, Tensor) else np.asarray(y))
        if inputs[-1].shape != inputs[0].shape:
            raise ValueError(
                f"sample {index} has shape {tuple(inputs[-1].shape)}, sample 0 {tuple(inputs[0].shape)}; "
                "resize all to one shape, for example by a transform"
            )
    if not inputs:
        raise ValueError("the dataset is empty; give at least one sample")
    targets = np.stack(labels)
    if targets.shape[1:] == (1,) and targets.dtype.kind in "iub":
        targets = targets[:, 0]
    return from_arrays(torch.stack(inputs), targets, name=name, num_classes=num_classes)


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


def _tensor(values: ArrayLike | Tensor, what: str) -> Tensor:
    if isinstance(values, Tensor):
        return values
    array = np.array(values)
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise ValueError(f"{what} are {array.dtype}, such as {array.flat[0]!r}; give numbers") from None


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
