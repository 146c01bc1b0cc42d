"""Fixed point: round what clients send to a grid, so that sums are exact. Secure sums send the same whole numbers.

    client   q = clip(round(a / step), -2^precision, 2^precision)     for every number a of every field
             sends step * q, and how many numbers were clipped;        step = bound / 2^precision, a power of two
             keeps what follows from step * q: SCAFFOLD's c_u' = c_u + step * q
    server   sum_S w_u q_u in whole numbers, then times step;          w_u = n_u, or 1 where the method says so
    room     S * samples * 2^precision < 2^(bits - 1), or the run is refused: no sum overflows

A sum of whole numbers is the same in every order. So a federation with secure sums, a simulation in one process and one
on a cluster have the same model, bit for bit, where the clients' training has the same bits. Running statistics are
rounded too, when they are summed. The default steps are 2^-20 for fields, 2^-14 for running statistics.

Bonawitz et al., CCS 2017, https://eprint.iacr.org/2017/281, section 4: sums modulo a number. docs/privacy.md has the
protocol that hides the single replies; this switch alone hides nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedncv.methods.base import Ask, Grid, Method, ServerAsk, Stepped, Sums, Work, field_of
from fedncv.methods.switches.through import revealing
from fedncv.secure.fixed_point import outside, rounded
from fedncv.tree import leaves

NEEDS_EACH = ("memory", "labels", "ht", "calibrated")  # switches that need single replies, or their sizes


@dataclass(frozen=True, kw_only=True)
class Config:
    bound: float = 16.0
    """Largest absolute value of a number that is sent, above 0 and at most 2^40; larger ones are clipped and counted.
    Fields unlike a model's update, such as FedNova's number of steps, have bounds of their own."""
    precision: int = 24
    """Bits of a value without its sign, from 8 to 40: the step is the bound, up to the next power of two, divided by
    2^precision. Up to 24, float32 holds every value exactly."""
    statistics: float = 1024.0
    """Largest absolute value of the running statistics, above 0 and at most 2^40."""
    samples: int = 1_000_000
    """Most training samples of a client, at least 1. A client with more is refused."""
    bits: int = 64
    """Bits of a number on the wire: 32, 40, 48, 56 or 64. The sum must have room in them."""

    def __post_init__(self) -> None:
        for name in ("bound", "statistics"):
            given = getattr(self, name)
            if not 2.0**-40 <= given <= 2.0**40:
                raise ValueError(f"{name} must be from 2^-40 to 2^40, not {given}")
        if not 8 <= self.precision <= 40:
            raise ValueError(f"precision must be from 8 to 40, not {self.precision}")
        if not 1 <= self.samples <= 2**40:
            raise ValueError(f"samples must be from 1 to 2^40, not {self.samples}")
        if self.bits not in (32, 40, 48, 56, 64):
            raise ValueError(f"bits must be 32, 40, 48, 56 or 64, not {self.bits}")


class Up(NamedTuple):
    up: Any  # the method's own
    beyond_bound: Tensor  # how many of its numbers were clipped to a bound


def with_fixed_point(method: Method, config: Config = Config()) -> Method:
    """Return ``method`` with messages on a grid, and with exact sums of them."""
    needs = next((name for name in NEEDS_EACH if name in method.switches), "")
    if needs:
        raise ValueError(f"fixed_point sums replies, but +{needs} needs single replies or their sizes; leave one out")
    if method.form != "sums" or method.joining:
        raise ValueError(
            "fixed_point sums replies, but this method needs single ones; use one in the sums form, as in "
            "fedavg+fixed_point or fedncv-sums+fixed_point"
        )
    if method.privacy is not None:
        raise ValueError("fixed_point and dp do not work together yet; leave one out")
    if not method.reveals:
        raise ValueError("fixed_point rounds what clients send, but with this method they send nothing")
    bounds: Mapping[str, float] = method.bounds
    grid = Grid(
        config.bits, config.precision, config.bound, config.statistics, config.samples, tuple(sorted(bounds.items()))
    )

    def finish(ask: Ask, y_P: Tensor, work: Work, down: Any, own: Any, scratch: Any) -> tuple[Up, Any]:
        up, kept = method.finish(ask, y_P, work, down, own, scratch)
        fields = {path.rpartition(".")[2]: leaf for path, leaf in leaves(up)}
        counts = [outside(grid, name, leaf).to(y_P.dtype) for name, leaf in fields.items()]
        sent = on_grid(grid, up)
        if method.changes is not None:
            kept = method.changes.keep(own, kept, field_of(sent, method.changes.field))
        return Up(sent, torch.stack(counts).sum()), kept

    def step(ask: ServerAsk, server: Any, sums: Sums) -> Stepped:
        stepped = method.step(ask, server, sums)
        return stepped._replace(numbers={**stepped.numbers, "beyond_bound": sums.sum("beyond_bound")})

    return method._replace(
        finish=finish,
        step=step,
        grid=grid,
        reveals=revealing(
            method, beyond_bound="how many of its numbers were clipped to a bound; only the sum is needed"
        ),
        weights={**method.weights, "beyond_bound": "one"},
        switches=(*method.switches, "fixed_point"),
    )


def on_grid(grid: Grid, up: Any, path: str = "") -> Any:
    """Return a reply with all its numbers rounded, each by the step of its field."""
    if isinstance(up, Tensor):
        return rounded(grid, path, up)
    names = getattr(up, "_fields", range(len(up)))
    parts = [on_grid(grid, part, str(name)) for name, part in zip(names, up, strict=True)]
    return type(up)(*parts) if hasattr(up, "_fields") else tuple(parts)
