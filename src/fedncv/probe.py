"""When to probe a run: ``every=10``, as in a config or a command."""

from dataclasses import dataclass

from fedncv.spec import parse


@dataclass(frozen=True, kw_only=True)
class Probe:
    every: int = 10
    """Rounds between two probes, at least 1; the initial model and the last round are always probed."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"probe: every must be at least 1, not {self.every}")

    def due(self, round: int, rounds: int) -> bool:
        return round % self.every == 0 or round == rounds


def find_probe(text: str) -> Probe | None:
    """Return the probe that a config names; None for the empty text, which measures nothing.

    >>> find_probe("every=5")
    Probe(every=5)
    """
    if not text:
        return None
    if "=" not in text:
        raise ValueError(f"probe is {text!r}; write it as every=10, or leave it empty for none")
    _, knobs = parse(f"probe:{text}", {"probe": Probe}, what="setting")
    return Probe(**knobs)
