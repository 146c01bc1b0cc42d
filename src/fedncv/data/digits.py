"""The built-in digits: 1,797 handwritten digits of scikit-learn, enlarged so that LeNet5 fits.

    8 x 8 values 0..16  ->  uint8 0..255  ->  every pixel 3 x 3  ->  2 black pixels around  =  28 x 28

E. Alpaydin and C. Kaynak, "Optical recognition of handwritten digits", UCI, 1998.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedncv.data.raw import Raw


def read_digits(_folder: Path) -> Iterator[Raw]:
    """Yield all 1,797 digits, in scikit-learn's order; no file is needed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("the digits come with scikit-learn; pip install scikit-learn") from None
    small, labels = load_digits(return_X_y=True)
    bytes_ = np.rint(small.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    large = bytes_.repeat(3, axis=2).repeat(3, axis=3)
    yield Raw(np.pad(large, ((0, 0), (0, 0), (2, 2), (2, 2))), labels.astype(np.int64))
