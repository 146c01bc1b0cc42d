"""Limits on what the server accepts from its clients, and how long it waits. Rejections are counted and logged."""

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedncv.config import read_toml
from fedncv.flower.halves import Up
from fedncv.flower.wire import WireError
from fedncv.spec import nearest
from fedncv.tree import all_finite, leaves


@dataclass(frozen=True, kw_only=True)
class Rules:
    """rules.toml in the server's folder."""

    join_seconds: float = 600.0
    """How long a run waits for all clients to report their number of training samples."""
    round_seconds: float = 600.0
    """How long a round waits for its clients; clients that have not replied by then are left out of it."""
    min_replies: int = 1
    """A round with fewer replies stops the run, which can be resumed; at least 1."""
    attempts: int = 5
    """How often the server sends a round's request to a client that fails or is lost."""
    max_samples: int = 10_000_000
    """The most training samples a client may report; a client that reports more is excluded from the run."""
    norms: dict[str, float] = field(default_factory=dict)
    """Field of the method's up -> the largest 2-norm accepted, as in delta_P = 10.0; other fields have no limit."""
    outside: Literal["reject", "clip"] = "reject"
    """For a field above its norm: reject leaves the reply out, clip scales the field down to the norm."""

    def __post_init__(self) -> None:
        for name in ("join_seconds", "round_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, not {getattr(self, name)}")
        for name in ("min_replies", "attempts", "max_samples"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.outside not in ("reject", "clip"):
            raise ValueError(f"outside must be reject or clip, not {self.outside!r}")
        for name, limit in self.norms.items():
            if not (isinstance(limit, int | float) and limit > 0):
                raise ValueError(f"norms.{name} must be above 0, not {limit!r}")


def read_rules(path: Path, *, reveals: tuple[str, ...] | None = None) -> Rules:
    """Return the rules in a file, or the defaults if it does not exist; norms may name the fields in ``reveals``."""
    values: dict[str, Any] = read_toml(path) if path.exists() else {}
    names = [f.name for f in fields(Rules)]
    for name in values:
        if name not in names:
            raise ValueError(f"{path}: {nearest(name, names, what='rule')}")
    rules = Rules(**values)
    for name in rules.norms:
        if reveals is not None and name not in reveals:
            raise ValueError(f"{path}: {nearest(name, reveals, what='field of the method in norms')}")
    return rules


def write_rules(rules: Rules) -> str:
    """Return the text of a file with every rule and its meaning."""
    import inspect

    source = inspect.getsource(Rules)
    lines = ["# What the server accepts, and how long it waits.", ""]
    for f in fields(Rules):
        meaning = source.split(f"    {f.name}: ", 1)[1].split('"""', 2)[1]
        value = getattr(rules, f.name)
        if isinstance(value, dict):
            continue
        lines += [f"# {meaning}", f"{f.name} = {value!r}".replace("'", '"')]
    lines += ["", "# Field of the method's up -> the largest 2-norm accepted.", "[norms]"]
    lines += [f"{name} = {limit!r}" for name, limit in rules.norms.items()]
    return "\n".join(lines) + "\n"


def accept(rules: Rules, reply: Up) -> tuple[Up, list[str]]:
    """Return the accepted reply and the fields that were clipped; raise WireError with the reason if it is rejected."""
    if not all_finite(reply):
        raise WireError("not finite: it holds NaN or infinity")
    clipped: list[str] = []
    factors: dict[str, float] = {}
    for path, leaf in leaves(reply.up):
        name = path.rpartition(".")[2]  # switches may have wrapped the reply
        limit = rules.norms.get(name)
        if limit is None or not isinstance(leaf, Tensor):
            continue
        norm = float(torch.linalg.vector_norm(leaf, dtype=torch.float64))
        if norm <= limit:
            continue
        if rules.outside == "reject":
            raise WireError(f"norm of {name} is {norm:.6g}, above {limit:g}")
        factors[path] = limit / norm
        clipped.append(f"{name} from {norm:.6g} to {limit:g}")
    return reply._replace(up=_scaled(reply.up, factors)) if factors else reply, clipped


def _scaled(up: Any, factors: dict[str, float]) -> Any:
    from fedncv.flower.wire import fill

    return fill(up, {path: leaf * factors[path] for path, leaf in leaves(up) if path in factors})
