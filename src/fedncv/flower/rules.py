"""Limits on what the server accepts from its clients, and how long it waits. Rejections are counted and logged."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedncv.config import read_toml
from fedncv.flower.halves import Up
from fedncv.flower.wire import WireError, fill
from fedncv.spec import nearest
from fedncv.tree import all_finite, leaves

BUFFERS = "buffers_R"  # the running statistics: a field beside those of the method's up
FEW = 2  # so many replies have no majority, so their median says nothing
CEILING = 1e6  # times the norm of what was sent: above every limit without a rule of its own


@dataclass(frozen=True, kw_only=True)
class Rules:
    """rules.toml in the server's folder."""

    join_seconds: float = 600.0
    """How long a run waits for all clients to report their number of training samples."""
    round_seconds: float = 600.0
    """How long a round waits for its clients; clients that have not replied by then are left out of it."""
    stage_seconds: float = 120.0
    """With secure sums: how long each of a round's stages without training waits for its clients."""
    score_seconds: float = 120.0
    """How long the server waits for the clients' scores of a model; those that come later are not in the row."""
    min_replies: int = 0
    """A round with fewer replies stops the run, which can be resumed; 0: more than half of the round's clients."""
    attempts: int = 5
    """How often the server sends a round's request to a client that fails or is lost."""
    checkpoints: int = 3
    """How many checkpoints are kept, the last ones, for `fedncv federation resume --from-round`; at least 1."""
    leave_out: list[int] = field(default_factory=list)
    """Clients that are not asked any more, as in [2]; it takes effect when a run is started or resumed."""
    times_median: float = 100.0
    """A reply is left out if a field's norm is above so many times the median of the round's replies, and above the
    norm of what was sent to the clients. With one or two replies only the latter holds, times a million."""
    samples_times_median: float = 1000.0
    """A client that reports more samples than so many times the median of all reports is excluded from the run."""
    max_samples: int = 10_000_000
    """The most training samples a client may report; a client that reports more is excluded from the run."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Client -> the number of training samples that it must report, as in 0 = 1200; another report excludes it."""
    norms: dict[str, float] = field(default_factory=dict)
    """Field of the method's up, or buffers_R -> the largest 2-norm accepted, as in delta_P = 10.0, in place of
    times_median."""
    outside: Literal["reject", "clip"] = "reject"
    """For a field above its limit in norms: reject leaves the reply out, clip scales the field down to the limit."""

    def __post_init__(self) -> None:
        for name in ("join_seconds", "round_seconds", "stage_seconds", "score_seconds"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, not {value!r}")
        for name in ("times_median", "samples_times_median"):
            value = getattr(self, name)
            if not _is_number(value) or not value >= 1:
                raise ValueError(f"{name} must be at least 1, not {value!r}; inf: no such limit")
        for name in ("attempts", "max_samples", "checkpoints", "min_replies"):
            value, least = getattr(self, name), int(name != "min_replies")
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if self.outside not in ("reject", "clip"):
            raise ValueError(f"outside must be reject or clip, not {self.outside!r}")
        if not isinstance(self.leave_out, list) or not all(type(u) is int and u >= 0 for u in self.leave_out):
            raise ValueError(f"leave_out must be a list of clients, as in [2], not {self.leave_out!r}")
        for name in ("sizes", "norms"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(f"{name} must be a table, as in [{name}], not {getattr(self, name)!r}")
        for u, size in self.sizes.items():
            if not u.isdecimal() or type(size) is not int or size < 1:
                raise ValueError(f"sizes.{u} must give a client's samples, as in 0 = 1200, not {u} = {size!r}")
        for name, limit in self.norms.items():
            if not (_is_number(limit) and limit > 0):
                raise ValueError(f"norms.{name} must be above 0, not {limit!r}")

    def least(self, drawn: int) -> int:
        """Return how many of the round's clients must reply."""
        return self.min_replies or drawn // 2 + 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_rules(path: Path, *, reveals: tuple[str, ...] | None = None, clients: int | None = None) -> Rules:
    """Return the rules in a file, or the defaults if it does not exist.

    Norms may name the fields in ``reveals``; other rules may name that many clients.
    """
    values: dict[str, Any] = read_toml(path) if path.exists() else {}
    names = [f.name for f in fields(Rules)]
    for name in values:
        if name not in names:
            raise ValueError(f"{path}: {nearest(name, names, what='rule')}")
    try:
        rules = Rules(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for name in rules.norms:
        if reveals is not None and name not in (*reveals, BUFFERS):
            raise ValueError(f"{path}: {nearest(name, (*reveals, BUFFERS), what='field of the method in norms')}")
    for u in (*rules.leave_out, *map(int, rules.sizes)):
        if clients is not None and u >= clients:
            raise ValueError(f"{path} names client {u}, but the clients are 0 to {clients - 1}")
    return rules


def write_rules(rules: Rules, *, sizes: Mapping[int, int] | None = None) -> str:
    """Return the text of a file with every rule and its meaning, and ``sizes`` as a comment to be made a rule."""
    known = [] if rules.sizes else [f"# {u} = {n}" for u, n in (sizes or {}).items()]
    return explained(rules, "# What the server accepts, and how long it waits.", under={"sizes": known})


def explained(rules: Any, first: str, *, under: Mapping[str, list[str]] | None = None) -> str:
    """Return TOML with every field of a dataclass and its docstring as a comment, after a first line.

    Tables come last, each with the lines in ``under`` that belong to it.
    """
    import inspect

    source = inspect.getsource(type(rules))
    lines, tables = [first, ""], []
    for f in fields(rules):
        meaning = source.split(f"    {f.name}: ", 1)[1].split('"""', 2)[1]
        comment = [f"# {line.strip()}" for line in meaning.splitlines()]
        value = getattr(rules, f.name)
        if isinstance(value, dict):
            tables += ["", *comment, f"[{f.name}]", *(f"{name} = {limit!r}" for name, limit in value.items())]
            tables += (under or {}).get(f.name, [])
        else:
            text = json.dumps(value) if isinstance(value, bool | str | list) else repr(value)
            lines += [*comment, f"{f.name} = {text}"]
    return "\n".join(lines + tables) + "\n"


# ---- norms ----------------------------------------------------------------------------------------------


def norms_of(tree: Any) -> dict[str, float]:
    """Return field -> 2-norm of its numbers. A field goes by the last name of its path: switches wrap replies."""
    squares: dict[str, float] = {}
    for path, leaf in leaves(tree):
        if isinstance(leaf, Tensor) and leaf.numel():
            name = path.rpartition(".")[2]
            norm = float(torch.linalg.vector_norm(leaf.to(torch.float64)))
            squares[name] = math.hypot(squares.get(name, 0.0), norm)
    return squares


def accept(rules: Rules, reply: Up) -> tuple[Up, list[str]]:
    """Return the accepted reply and the fields that were clipped; raise WireError with the reason if it is rejected.

    These are the limits that need no other reply.
    """
    if not all_finite(reply):
        raise WireError("not finite: it holds NaN or infinity")
    clipped: list[str] = []
    factors: dict[str, float] = {}
    for name, norm in norms_of(reply).items():
        limit = rules.norms.get(name)
        if limit is None or norm <= limit:
            continue
        if rules.outside == "reject":
            raise WireError(f"norm of {name} is {norm:.6g}, above {limit:g}")
        factors[name] = limit / norm
        clipped.append(f"{name} from {norm:.6g} to {limit:g}")
    return _scaled(reply, factors) if factors else reply, clipped


def _scaled(reply: Up, factors: dict[str, float]) -> Any:
    named = {path: (leaf, path.rpartition(".")[2]) for path, leaf in leaves(reply)}
    return fill(reply, {path: leaf * factors[name] for path, (leaf, name) in named.items() if name in factors})


def lower_median(values: list[float]) -> float:
    """Return the median, of an even number the smaller of the two in the middle.

    >>> lower_median([3.0, 1.0, 2.0]), lower_median([4.0, 1.0, 2.0, 1e30])
    (2.0, 2.0)
    """
    return sorted(values)[(len(values) - 1) // 2]


def outliers(rules: Rules, replies: Mapping[int, Up], sent: Any) -> dict[int, str]:
    """Return client -> why its reply is left out, because it is far from what the others replied.

        limit of a field = max(times_median * median of its norms, scale)     with three or more replies
                         = CEILING * scale                                    with one or two, and at most
        scale            = max(1, largest norm of a field of ``sent``, the messages to the clients)

    A field whose limit is in ``norms`` is not compared. The order of the replies makes no difference.
    """
    scale = max([1.0, *(norm for message in sent for norm in norms_of(message).values())])
    norms = {u: norms_of(reply) for u, reply in sorted(replies.items())}
    refused: dict[int, str] = {}
    for name in dict.fromkeys(name for found in norms.values() for name in found if name not in rules.norms):
        of_field = {u: found[name] for u, found in norms.items() if name in found}
        limit, why = CEILING * scale, f"{CEILING:g} times the norm of what was sent, {scale:.4g}"
        if len(of_field) > FEW:
            median = lower_median(list(of_field.values()))
            if max(rules.times_median * median, scale) < limit:
                limit = max(rules.times_median * median, scale)
                why = f"{rules.times_median:g} times the round's median {median:.4g} and what was sent, {scale:.4g}"
        for u, norm in of_field.items():
            if not norm <= limit:
                refused.setdefault(u, f"norm of {name} is {norm:.4g}, above {why}")
    return refused


def too_many(rules: Rules, samples: Mapping[int, int]) -> dict[int, str]:
    """Return client -> why its number of samples is not accepted, among those that all clients report."""
    if len(samples) < 2:
        return {}
    median = lower_median([float(size) for size in samples.values()])
    return {
        u: f"it reports {size} samples, above {rules.samples_times_median:g} times the median of all, {median:g} "
        "(samples_times_median in rules.toml)"
        for u, size in samples.items()
        if size > rules.samples_times_median * median
    }
