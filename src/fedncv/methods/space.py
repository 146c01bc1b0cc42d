"""The spaces that tuning searches: for each knob of a method its values, or the ends of a range.

Plain data beside each method (``registry.py``) and each switch (``switches/__init__.py``):

    {"mu": Log(0.001, 1.0), "nesterov": (False, True)}

Every method also has the learning rate, ``RATE``. A name of ``SETTINGS`` is a setting of the run, any other a knob.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Log(NamedTuple):
    """Numbers from ``low`` to ``high`` whose logarithms are spread evenly."""

    low: float
    high: float


class Even(NamedTuple):
    """Numbers from ``low`` to ``high``, spread evenly."""

    low: float
    high: float


Range = Log | Even | tuple[Any, ...]
Space = Mapping[str, Range]

RATE = Log(0.003, 0.3)
SETTINGS = ("lr", "weight_decay")
PLAIN: Space = {"weight_decay": Log(1e-5, 1e-2)}  # for methods without a knob of their own


def value_at(over: Range, u: float) -> Any:
    """Return the value at the share ``u`` of a range, 0 <= u < 1: numbers with three digits.

    >>> value_at(Log(0.01, 1.0), 0.5), value_at(Even(0.0, 0.9), 0.5), value_at((False, True), 0.5)
    (0.1, 0.45, True)
    """
    if isinstance(over, Log):
        return float(f"{over.low * (over.high / over.low) ** u:.3g}")
    if isinstance(over, Even):
        return float(f"{over.low + (over.high - over.low) * u:.3g}")
    return over[int(u * len(over))]
