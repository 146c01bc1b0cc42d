"""Learning-rate schedules over rounds: a factor for round t of T, t counted from 0."""

import math
from collections.abc import Callable

from fedncv.spec import parse


def constant(_t: int, _rounds: int) -> float:
    return 1.0


def exponential(t: int, _rounds: int, *, decay: float = 0.985) -> float:
    """decay^t."""
    if not 0 < decay <= 1:
        raise ValueError(f"schedule exponential: decay must be above 0 and at most 1, not {decay}")
    return decay**t


def cosine(t: int, rounds: int, *, floor: float = 0.0) -> float:
    """Decrease from 1 to ``floor`` along half a cosine."""
    if not 0 <= floor <= 1:
        raise ValueError(f"schedule cosine: floor must be from 0 to 1, not {floor}")
    return floor + (1 - floor) * (1 + math.cos(math.pi * t / max(1, rounds))) / 2


def step(t: int, _rounds: int, *, every: int = 30, factor: float = 0.1) -> float:
    """Multiply by ``factor`` every ``every`` rounds."""
    if every < 1:
        raise ValueError(f"schedule step: every must be at least 1, not {every}")
    if not 0 < factor <= 1:
        raise ValueError(f"schedule step: factor must be above 0 and at most 1, not {factor}")
    return factor ** (t // every)


SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": constant,
    "exponential": exponential,
    "cosine": cosine,
    "step": step,
}


def lr_factor(text: str, t: int, rounds: int) -> float:
    """Return the factor of the learning rate in round t. Raise ValueError if the schedule is unknown or wrong."""
    name, knobs = parse(text, SCHEDULES, what="schedule")
    return SCHEDULES[name](t, rounds, **knobs)
