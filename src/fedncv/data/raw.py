"""Output of the readers: decoded images and their labels, a piece at a time.

Readers are generators of ``Raw`` pieces, so that a dataset larger than memory can be read: training files
first, then test files, in file order. ``checked`` verifies each piece before it is used.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PIECE = 4096  # images decoded at a time

Images = NDArray[np.uint8]  # (n, channels, height, width)
Labels = NDArray[np.int64]  # (n,) in 0..num_classes-1


def reason(error: Exception) -> str:
    """Return the message of another library's error, on one line and without the addresses of its objects."""
    said = re.sub(r"<[\w.]+ object at 0x[0-9a-f]+>", "it", str(error))
    return " ".join(said.split()) or type(error).__name__


class Raw(NamedTuple):
    images: Images
    labels: Labels


def checked(pieces: Iterator[Raw], *, name: str, shape: tuple[int, ...], num_classes: int) -> Iterator[Raw]:
    """Yield the same pieces; raise ValueError if one is wrong."""
    for images, labels in pieces:
        if len(images) != len(labels):
            raise ValueError(f"{name}: {len(images)} images but {len(labels)} labels; the files do not belong together")
        if images.shape[1:] != shape:
            raise ValueError(f"{name}: images are {images.shape[1:]}, not {shape}; the files are of another dataset")
        if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
            wrong = labels.min() if labels.min() < 0 else labels.max()
            raise ValueError(
                f"{name}: label {wrong} is out of range 0..{num_classes - 1}; "
                "the label file is damaged or of another dataset"
            )
        yield Raw(images, labels)


class Moments:
    """Mean and standard deviation of x / 255 per channel, over all samples and pixels added.

    Computed from a histogram of the 256 byte values, in integers, so the order of summation has no effect. A constant
    channel gets the deviation 1, so it is zero after (x - mean) / std.
    """

    def __init__(self, channels: int) -> None:
        self.counts = np.zeros((channels, 256), dtype=np.int64)

    def add(self, images: Images) -> None:
        for channel, counts in enumerate(self.counts):
            counts += np.bincount(images[:, channel].ravel(), minlength=256)

    def values(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        value, means, stds = np.arange(256), [], []
        for counts in self.counts:
            n, first, second = (int((counts * value**power).sum()) for power in range(3))
            means.append(first / n / 255)
            stds.append(float(np.sqrt((second * n - first * first) / n**2)) / 255 or 1.0)
        return tuple(means), tuple(stds)


def moments(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation of one array.

    >>> moments(np.array([0, 255], dtype=np.uint8).reshape(2, 1, 1, 1))
    ((0.5,), (0.5,))
    """
    result = Moments(images.shape[1])
    for start in range(0, len(images), PIECE):
        result.add(images[start : start + PIECE])
    return result.values()
