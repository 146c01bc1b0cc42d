"""What a reader gives back: decoded images and their labels, checked before anything is built on them."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]  # (n, channels, height, width)
Labels = NDArray[np.int64]  # (n,) in 0..num_classes-1


class Raw(NamedTuple):
    """The pooled samples of a dataset: first the training files, then the test files, in file order."""

    images: Images
    labels: Labels


def check(raw: Raw, *, name: str, num_classes: int) -> Raw:
    """``raw`` itself, or a ValueError that says what is wrong with it."""
    images, labels = raw
    if len(images) != len(labels):
        raise ValueError(
            f"{name}: {len(images)} images but {len(labels)} labels; the files do not belong together"
        )
    if not len(labels):
        raise ValueError(f"{name}: there are no samples in it")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"{name}: label {low if low < 0 else high} is out of range, "
            f"labels go from 0 to {num_classes - 1}; the label file is damaged or of another dataset"
        )
    return raw


def moments(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of x / 255 per channel, over all samples and pixels.

    From a histogram of the 256 byte values, in integers, so the order of summation cannot matter. A channel
    that never changes gets the deviation 1, which leaves it at zero after (x - mean) / std.

    >>> moments(np.array([0, 255], dtype=np.uint8).reshape(2, 1, 1, 1))
    ((0.5,), (0.5,))
    """
    values = np.arange(256)
    means, stds = [], []
    for channel in range(images.shape[1]):
        counts = np.zeros(256, dtype=np.int64)
        for start in range(0, len(images), 4096):  # a slice at a time: the array may be larger than memory
            counts += np.bincount(images[start : start + 4096, channel].ravel(), minlength=256)
        total, first, second = (int((counts * values**power).sum()) for power in range(3))
        means.append(first / total / 255)
        stds.append(float(np.sqrt((second * total - first * first) / total**2)) / 255 or 1.0)
    return tuple(means), tuple(stds)
