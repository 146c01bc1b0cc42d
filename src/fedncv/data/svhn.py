"""SVHN, cropped digits: MATLAB files with X of 32 x 32 x 3 x n bytes and y of n digits, 10 meaning 0.

Y. Netzer et al., "Reading digits in natural images with unsupervised feature learning", 2011.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedncv.data.raw import PIECE, Raw, reason

FILES = ("train_32x32.mat", "test_32x32.mat")
EXTRA_FILES = (*FILES, "extra_32x32.mat")


def read_svhn(folder: Path, *, extra: bool = False) -> Iterator[Raw]:
    """Read the training images, then the test images, then with ``extra`` the 531,131 easier ones."""
    for name in EXTRA_FILES if extra else FILES:
        yield from read_mat(folder / name)


def read_mat(path: Path) -> Iterator[Raw]:
    from scipy.io import loadmat

    try:
        held = loadmat(path, variable_names=["X", "y"])
        x, y = held["X"], np.asarray(held["y"]).ravel()
        if x.dtype != np.uint8 or x.ndim != 4 or y.dtype.kind not in "ui" or x.shape[3] != len(y):
            raise TypeError(f"X is {x.dtype} {x.shape}, y is {y.dtype} {y.shape}")
    except Exception as error:  # SciPy raises a different error for each way a file can be damaged
        raise ValueError(f"{path} is truncated, damaged or not SVHN ({reason(error)}); fetch it again") from None
    labels = y.astype(np.int64)
    if ((labels < 1) | (labels > 10)).any():
        wrong = int(labels[(labels < 1) | (labels > 10)][0])
        raise ValueError(f"{path}: label {wrong} is out of range 1..10; fetch it again")
    for start in range(0, len(labels), PIECE):
        images = x[..., start : start + PIECE].transpose(3, 2, 0, 1)
        yield Raw(np.ascontiguousarray(images), labels[start : start + PIECE] % 10)
