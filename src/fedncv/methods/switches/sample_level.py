"""The sample level: use the stored step of a mini-batch as its control variate.

    z_B   = d_B - alpha * (a_B - s_B * a_bar),     a_bar = sum_B a_B / sum_B s_B
    saga    a_B: the step of batch B in the epoch before; none in the first epoch, which is the method unchanged
    svrg    a_B: the step of batch B at the round's start, from one more pass over the data

d_B is the method's own step and s_B its length relative to a full step: 1, or |B|/b with even samples. Divided by s_B
this is z_B = g_B - alpha * (a_B - a_bar) on gradients. a_bar is the plain mean over batches, or the |B|-weighted mean
with even samples. Batches keep their samples during a round, an epoch visits each batch once, and a_B and a_bar are
fixed before the epoch. So the corrections of an epoch sum to zero in any order,

    sum_B (a_B - s_B * a_bar) = sum_B a_B - sum_B s_B * a_bar = 0

and each of them has mean zero over the orders. (SAGA as published updates a_bar at every visit, for batches drawn with
replacement. In an epoch that visits each batch once, those corrections would not sum to zero.)

Memory: during training a client holds one array per batch and two more, ceil(n_u / b) + 2 times the model; stacked
clients each hold as much as the client with the most batches. saga writes an array of that size in every step, svrg
only in its pass, which costs one epoch of gradients. Nothing is kept between rounds, and messages do not change.

Defazio et al., NeurIPS 2014, https://arxiv.org/abs/1407.0202; Johnson and Zhang, NeurIPS 2013.
Letters: B = batches of an epoch, P = parameters.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedncv.estimators import controlled
from fedncv.estimators.units import ratio
from fedncv.methods.base import Ask, Batch, Method, Phase, Work


@dataclass(frozen=True, kw_only=True)
class Config:
    kind: Literal["saga", "svrg"] = "saga"
    """Stored step of a batch: of the previous epoch, or at the round's start (one more epoch of work)."""
    alpha: float = 1.0
    """Weight of the stored step, from 0 to 1; 0 leaves the method unchanged."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be from 0 to 1, not {self.alpha}")


class Table(NamedTuple):
    a_BP: Tensor  # the step of every batch at its last visit
    a_bar_P: Tensor  # of the previous epoch
    sum_P: Tensor  # of this epoch's steps so far
    sum_s: Tensor  # of their lengths
    visits_B: Tensor
    scratch: Any  # the method's own


def with_samples(method: Method, config: Config = Config()) -> Method:
    """Return ``method`` with a control variate for every mini-batch."""
    if config.alpha == 0:
        return method
    even = "even" in method.switches
    passes = 1 if config.kind == "svrg" else 0  # phases before the method's own
    trains = next(i for i, phase in enumerate(method.phases(1)) if phase.trains)

    def phases(epochs: int) -> tuple[Phase, ...]:
        return with_passes(method.phases(epochs))

    def with_passes(own: tuple[Phase, ...]) -> tuple[Phase, ...]:
        return (*[Phase(1, trains=(), mode="still")] * passes, *own)

    def begin(ask: Ask, down: Any, own: Any) -> tuple[Tensor, Table]:
        y_P, scratch = method.begin(ask, down, own)
        zero_P = torch.zeros_like(y_P)
        a_BP = y_P.new_zeros(ask.num_batches, len(y_P))
        return y_P, Table(a_BP, zero_P, zero_P, y_P.new_zeros(()), y_P.new_zeros(ask.num_batches), scratch)

    def direction(ask: Ask, y_P: Tensor, batch: Batch, down: Any, own: Any, table: Table) -> tuple[Tensor, Table]:
        number = torch.as_tensor(batch.number, device=y_P.device).reshape(1)
        s = batch.size / ask.client.full_batch if even else torch.ones_like(batch.size)
        in_pass = ask.phase < passes
        ask = ask.replace(phase=trains if in_pass else ask.phase - passes)
        d_P, scratch = method.direction(ask, y_P, batch, down, own, table.scratch)
        if in_pass:
            return d_P, visited(table, number, d_P, s)
        held = turned(table, number)
        a_P = held.a_BP.index_select(0, number).squeeze(0)
        z_P = controlled(d_P, a_P, s * held.a_bar_P, alpha=config.alpha)
        table = visited(held, number, d_P, s) if config.kind == "saga" else table
        return z_P, table._replace(scratch=scratch)

    def finish(ask: Ask, y_P: Tensor, work: Work, down: Any, own: Any, table: Table) -> tuple[Any, Any]:
        return method.finish(ask, y_P, work, down, own, table.scratch)

    tuning = method.finetune
    return method._replace(
        finetune=tuning and tuning._replace(phases=lambda epochs: with_passes(tuning.phases(epochs))),
        phases=phases,
        begin=begin,
        direction=direction,
        finish=finish,
        same_batches=True,
        switches=(*method.switches, "samples"),
    )


def turned(table: Table, number: Tensor) -> Table:
    """Return the table with a_bar of the last epoch if this visit begins a new one: no batch had more visits."""
    first = table.visits_B.index_select(0, number).squeeze(0) == table.visits_B.max()
    return table._replace(
        a_bar_P=torch.where(first, ratio(table.sum_P, table.sum_s), table.a_bar_P),
        sum_P=torch.where(first, 0.0, table.sum_P),
        sum_s=torch.where(first, 0.0, table.sum_s),
    )


def visited(table: Table, number: Tensor, d_P: Tensor, s: Tensor) -> Table:
    """Return the table with the step of batch ``number`` stored."""
    return table._replace(
        a_BP=table.a_BP.index_copy(0, number, d_P.unsqueeze(0)),
        sum_P=table.sum_P + d_P,
        sum_s=table.sum_s + s,
        visits_B=table.visits_B.index_add(0, number, torch.ones_like(s).reshape(1)),
    )
