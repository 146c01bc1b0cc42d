"""What a client agrees to: rules.toml in its own folder, which the server cannot see or change.

Every request is held to the rules as they are at that moment, before anything is trained. A run that does not fit is
refused, and the server's operator reads which rule it was. So a client can also withdraw in the middle of a run.
"""

import math
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from fedncv.config import RunConfig, read_toml
from fedncv.flower.refusals import RefusedError
from fedncv.flower.rules import explained
from fedncv.methods import METHODS, SWITCHES
from fedncv.spec import OWN, nearest, split

RULES = "rules.toml"


@dataclass(frozen=True, kw_only=True)
class ClientRules:
    """rules.toml in a client's folder."""

    methods: list[str] = field(default_factory=lambda: ["*"])
    """Methods that may train here, as `fedncv methods` names them, without knobs: ["fedavg", "scaffold+prior"]. A *
    stands for any text: "fedavg+*" is fedavg with any switches. Switches may be given in any order."""
    max_rounds: int = 0
    """The most rounds that a run may have; 0: any number."""
    min_clients: int = 1
    """The fewest clients that a run draws in a round: with few of them, an average says more about each."""
    secure_sums: bool = False
    """true: only runs in which the server sees sums over clients, and no single update."""
    max_epsilon: float = math.inf
    """Only runs with differential privacy whose epsilon is at most this; inf: also runs without it."""
    max_parameters: int = 0
    """The largest model, in parameters; 0: any size."""
    evaluate: bool = False
    """true: tell the server how well models do on the test samples here: the sum of their scores, and their number."""
    min_test_samples: int = 10
    """With fewer test samples than this, no score is told: the sum over very few says something about each of them."""

    def __post_init__(self) -> None:
        names = self.methods
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f'methods must be a list of names, as in ["fedavg", "scaffold+*"], not {names!r}')
        for name, least in (("max_rounds", 0), ("min_clients", 1), ("max_parameters", 0), ("min_test_samples", 2)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
        for name in ("secure_sums", "evaluate"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if type(self.max_epsilon) not in (int, float) or not self.max_epsilon > 0:
            raise ValueError(f"max_epsilon must be above 0, or inf, not {self.max_epsilon!r}")
        for name in names:
            _check_pattern(name)


def read_client_rules(client: Path) -> ClientRules:
    """Return the rules of a client; the defaults, which allow everything but scores, if it has no file."""
    path = client / RULES
    values: dict[str, Any] = read_toml(path) if path.exists() else {}
    names = [f.name for f in fields(ClientRules)]
    for name in values:
        if name not in names:
            raise ValueError(f"{path}: {nearest(name, names, what='rule')}")
    try:
        return ClientRules(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def write_client_rules(rules: ClientRules) -> str:
    """Return the text of a file with every rule and its meaning."""
    return explained(rules, "# What this client agrees to. Read again at every request of the server.")


class Terms(NamedTuple):
    """What a run asks of a client."""

    method: str
    rounds: int
    per_round: int
    secure_sums: bool
    epsilon: float  # inf: without differential privacy


def terms_of(config: RunConfig, secure: str = "") -> Terms:
    """Return the terms of a run; ``secure`` are its settings of secure sums.

    This is the one place to say that a run has differential privacy. No run has it yet.
    """
    return Terms(config.method, config.rounds, config.per_round, secure_sums=bool(secure), epsilon=math.inf)


def check_terms(rules: ClientRules, terms: Terms) -> None:
    """Raise RefusedError for the first rule that the run breaks."""
    if not any(_matches(pattern, terms.method) for pattern in rules.methods):
        _refuse(f"methods is {', '.join(rules.methods)}, and the run's is {_names(terms.method)}")
    if rules.max_rounds and terms.rounds > rules.max_rounds:
        _refuse(f"max_rounds is {rules.max_rounds}, and the run has {terms.rounds}")
    if terms.per_round < rules.min_clients:
        _refuse(f"min_clients is {rules.min_clients}, and the run draws {terms.per_round} in a round")
    if rules.secure_sums and not terms.secure_sums:
        _refuse("secure_sums is true, and the run has none")
    if terms.epsilon > rules.max_epsilon:
        said = "has no differential privacy" if terms.epsilon == math.inf else f"has {terms.epsilon:g}"
        _refuse(f"max_epsilon is {rules.max_epsilon:g}, and the run {said}")


def check_size(rules: ClientRules, parameters: int) -> None:
    """Raise RefusedError if the model is too large."""
    if rules.max_parameters and parameters > rules.max_parameters:
        _refuse(f"max_parameters is {rules.max_parameters}, and the run's model has {parameters}")


def _refuse(said: str) -> None:
    raise RefusedError("consent", f"{RULES} does not allow this run: {said}", said)


def _names(method: str) -> str:
    """Return the method without knobs, its switches in order of the alphabet.

    >>> _names("scaffold:option=I+prior+momentum:beta=0.5"), _names("mine:make:mu=0.1+prior"), _names("fedavg")
    ('scaffold+momentum+prior', 'mine:make+prior', 'fedavg')
    """
    first, *switches = (part.strip() for part in split(method, r"\+(?!\d)"))
    own = OWN.fullmatch(first)
    name = own[1] if own and first.partition(":")[0] not in METHODS else first.partition(":")[0]
    return "+".join([name, *sorted(switch.partition(":")[0] for switch in switches)])


def _check_pattern(pattern: str) -> None:
    """Raise ValueError for a pattern that can match no method: with knobs, or with a name that does not exist."""
    first, *switches = (part.strip() for part in pattern.split("+"))
    if "=" in pattern:
        raise ValueError(f"methods names {pattern!r}: leave the knobs out, as in {_names(pattern)!r}")
    for i, word in enumerate([first, *switches]):
        known = list(SWITCHES if i else METHODS)
        if not set(word) & set("*?[") and not OWN.fullmatch(word) and word not in known:
            raise ValueError(f"methods names {pattern!r}: {nearest(word, known, what='switch' if i else 'method')}")


def _matches(pattern: str, method: str) -> bool:
    """Return whether the pattern allows the method.

    >>> _matches("fedavg", "fedavg:server_lr=0.5"), _matches("fedavg", "fedavgm"), _matches("fedavg", "fedavg+prior")
    (True, False, False)
    >>> _matches("fedavg+*", "fedavg+prior+momentum"), _matches("scaffold+prior+momentum", "scaffold+momentum+prior")
    (True, True)
    """
    first, *switches = (part.strip() for part in pattern.split("+"))
    return fnmatchcase(_names(method), "+".join([first, *sorted(switches)]))
