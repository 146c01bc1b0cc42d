"""Server memory: use the stored last updates of clients that were not drawn.

    server   g_hat = beta * h_bar + sum_S omega_u (Delta_u - beta * h_u)      the step, instead of sum_S omega_u Delta_u
             h_u <- Delta_u for u in S
             h_bar = sum_v p_v h_v over all clients
    unseen   mean: h_u of a client never seen is the mean of those seen; zero: it is 0
    beta     a number, or learned: Cov(Delta, h) / Var(h) of the weighted units, from scalars of earlier rounds, so
             that it is fixed before the draw; in [0, 1]

omega_u are the weights of the replies: p_u / sum_S p_v, or Horvitz-Thompson's with +ht, which make g_hat unbiased for
every beta fixed before the draw. beta = 0 is the method itself. On FedAvg with unseen=zero, beta = 1 is FedVARP and
0 < beta < 1 is FedStale. The memory removes sampling noise, not drift. With +drift it removes little, because an update
hardly resembles the client's previous one (docs/gallery.md).

Letters: S = clients of the round, N = all clients, P = parameters. Derivations: docs/theory.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedncv import estimators
from fedncv.estimators import Moments, WeightedSum
from fedncv.methods.base import Federation, Method, Replies, ServerAsk, Stepped, Sums, field_of, sums_of, weighted_sum
from fedncv.methods.switches.through import refuse_robust, through
from fedncv.rows import AnyRows, rows_of, with_rows


@dataclass(frozen=True, kw_only=True)
class Config:
    beta: float | Literal["learned"] = 1.0
    """Weight of the memory, from 0 to 1 (0 leaves the method unchanged), or learned from earlier rounds."""
    forget: float = 0.9
    """Decay factor per round of the moments that a learned beta comes from, from 0 to 1."""
    unseen: Literal["mean", "zero"] = "mean"
    """h_u of a client never seen: the mean of those seen, or zero as in FedVARP."""

    def __post_init__(self) -> None:
        for name in ("beta", "forget"):
            value = getattr(self, name)
            if value != "learned" and not 0 <= value <= 1:
                raise ValueError(f"{name} must be from 0 to 1, not {value}")


class Memory(NamedTuple):
    server: Any  # the method's own
    h: AnyRows  # last update of every client seen
    sum_h: WeightedSum  # over the clients seen, in float64; updated with the clients of each round
    n_N: Tensor  # samples of every client as last reported, float64
    moments: Moments  # of earlier rounds, for a learned beta


class Recalled(NamedTuple):
    """The sums that the method's step receives, and the memory after the round."""

    sums: Sums
    memory: Memory
    numbers: Mapping[str, float | Tensor] = {}


def no_memory(server: Any, x_P: Tensor, federation: Federation) -> Memory:
    zero = WeightedSum(torch.zeros_like(x_P, dtype=torch.float64), x_P.new_zeros((), dtype=torch.float64))
    return Memory(server, {}, zero, federation.sizes_N.to(x_P.device), estimators.no_moments(x_P.device))


def remember(memory: Memory, replies: Replies, ids_S: Tensor, h_SP: Tensor) -> Memory:
    """Return the memory with h_u <- Delta_u and n_u as reported; ``h_SP`` holds the clients' old h_u."""
    delta_SP, n_S = field_of(replies.ups, "delta_P"), replies.sizes_S.to(memory.n_N)
    seen_S = torch.tensor([u in memory.h for u in ids_S.tolist()]).to(n_S.device, non_blocking=True)
    old_S = memory.n_N[replies.ids_S] * seen_S  # a client never seen is in no sum
    return memory._replace(
        h=with_rows(memory.h, ids_S, delta_SP),
        sum_h=estimators.replace_rows(memory.sum_h, h_SP, old_S, delta_SP, n_S),
        n_N=memory.n_N.index_copy(0, replies.ids_S, n_S),
    )


def with_memory(method: Method, config: Config = Config()) -> Method:
    """Return ``method`` with a server that stores every client's last update."""
    if config.beta == 0:
        return method
    refuse_robust(method, "memory", "adds stored updates of other rounds to the mean, which has no bound then")
    if method.combine is not None or "delta_P" not in method.reveals or method.weights.get("delta_P") == "one":
        raise ValueError("memory needs a method in the sums form that averages updates by samples, as in fedavg+memory")

    def init(x_P: Tensor, federation: Federation) -> Memory:
        return no_memory(method.init(x_P, federation), x_P, federation)

    def combine(memory: Memory, replies: Replies) -> Recalled:
        delta_SP, ids_S = field_of(replies.ups, "delta_P"), replies.ids_S.cpu()  # the one wait for the device
        size = memory.sum_h.size if config.unseen == "mean" else memory.n_N.sum()
        h_bar_P = estimators.weighted_mean(memory.sum_h._replace(size=size)).to(delta_SP.dtype)
        h_SP = rows_of(memory.h, ids_S, h_bar_P if config.unseen == "mean" else torch.zeros_like(h_bar_P))
        beta: float | Tensor
        if config.beta == "learned":
            beta = estimators.running_beta(memory.moments).clamp(0, 1).to(delta_SP.dtype)
        else:
            beta = config.beta
        g_hat_P = estimators.server_estimate(delta_SP, h_SP, replies.weight_S, h_bar_P, beta=beta)
        after = remember(memory, replies, ids_S, h_SP)
        if config.beta == "learned":
            units, controls = _units(replies, delta_SP, h_SP, h_bar_P, after.n_N.sum())
            after = after._replace(moments=estimators.observe(memory.moments, units, controls, forget=config.forget))
        numbers = {"beta": beta} if config.beta == "learned" else {}
        return Recalled(sums_of(replies, method.weights).with_mean("delta_P", g_hat_P), after, numbers)

    def step(ask: ServerAsk, memory: Memory, recalled: Recalled) -> Stepped:
        stepped = method.step(ask, memory.server, recalled.sums)
        server, numbers = recalled.memory._replace(server=stepped.server), {**stepped.numbers, **recalled.numbers}
        return Stepped(server, stepped.move_P, numbers)

    return through(method)._replace(init=init, combine=combine, step=step, switches=(*method.switches, "memory"))


def _units(replies: Replies, delta_SP: Tensor, h_SP: Tensor, h_bar_P: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Return the terms that the draw adds up, of the updates and of the memory; their covariance gives beta."""
    p_S = (replies.sizes_S / n).to(delta_SP.dtype)
    if replies.omega_S is not None:  # Horvitz-Thompson: a plain sum
        return p_S[:, None] * delta_SP, p_S[:, None] * h_SP
    centre_P = weighted_sum(replies.weight_S, delta_SP)
    return estimators.linearised_units(delta_SP, p_S, centre_P), estimators.linearised_units(h_SP, p_S, h_bar_P)
