"""The settings of secure sums in a run, as a text: threshold=3,neighbours=16."""

import inspect
from dataclasses import dataclass

from fedncv.secure import neighbours
from fedncv.secure.session import check_threshold
from fedncv.spec import values_of, write

NAME = "secure-sums"


@dataclass(frozen=True, kw_only=True)
class Settings:
    threshold: int
    """So many of a round's clients must stay to the end: more than half of them, and at least 2; fewer stop the run."""
    neighbours: int = 0
    """With how many others a client shares masks, an even number of at least 4; 0: with all others up to 64 clients,
    and beyond that with as many as docs/privacy.md says."""

    def __post_init__(self) -> None:
        if self.threshold < 2:
            raise ValueError(f"threshold must be at least 2, not {self.threshold}")
        if self.neighbours and (self.neighbours < 4 or self.neighbours % 2):
            raise ValueError(f"neighbours must be 0, or an even number of at least 4, not {self.neighbours}")

    def threshold_of(self, cohort: int) -> int:
        """Return the threshold of a cohort; that of all clients, for joining, is more than half of them."""
        return max(self.threshold, cohort // 2 + 1)

    def neighbours_of(self, cohort: int) -> int:
        return self.neighbours or neighbours.choose(cohort, self.threshold_of(cohort))


def read_settings(text: str) -> Settings:
    """Return the settings that a text gives; raise ValueError with the offending word."""
    if "threshold" not in {word.partition("=")[0] for word in text.split(",")}:
        raise ValueError(f"--{NAME} {text!r} does not give a threshold; write --{NAME} threshold=3")
    try:
        return Settings(**values_of(Settings, NAME, text, what="option"))
    except ValueError as error:
        raise ValueError(f"--{NAME} {text}: {error}") from None


def write_settings(settings: Settings) -> str:
    """Return the text with every knob written out."""
    return write("", {name: getattr(settings, name) for name in inspect.signature(Settings).parameters})


def check_settings(settings: Settings, per_round: int) -> None:
    """Raise ValueError if rounds of so many clients cannot have this threshold, or not so many neighbours."""
    try:
        check_threshold(settings.threshold, per_round)
    except ValueError as error:
        raise ValueError(f"--{NAME}: {error}") from None
    k = settings.neighbours
    if k and not neighbours.is_complete(per_round, k):
        failure = neighbours.failure(per_round, settings.threshold, k)
        if failure > neighbours.FAILURE:
            raise ValueError(
                f"--{NAME}: with neighbours={k} of {per_round} clients a round fails, or is open to colluding clients, "
                f"with a probability of up to {min(failure, 1.0):.2g}, above 2^-30; use neighbours=0"
            )
