"""Drift correction for a server that must not see single replies: clients keep the memory, the server needs sums.

    client   e_u = alpha * (c_u - c_bar), and 0 in its first round;     y <- y - lr * (d_B - e_u)
             c_u' = Delta_u / (lr * K_u) + e_u
             sends  c_u' - c_u  (c_u = 0 before the first round)  and whether it is new;   keeps c_u <- c_u'
    server   sum_c <- sum_c + sum_S n_u (c_u' - c_u);     n <- n + sum of n_u over the new clients
             c_bar = sum_c / n

It equals drift.py with one alpha for all clients, to rounding. The server uses only sums of the replies, so secure
aggregation can hide the single replies. n_u must not change during training, so streams are refused.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedncv.estimators import WeightedSum, weighted_mean
from fedncv.methods.base import (
    Ask,
    Batch,
    Changes,
    Federation,
    Method,
    Prediction,
    ServerAsk,
    Stepped,
    Sums,
    Work,
    field_of,
    for_all,
)
from fedncv.methods.switches.through import ROBUST, corrected, revealing, through


class Tracked(NamedTuple):
    server: Any  # the method's own
    sum_c: WeightedSum  # over the clients seen, in float64


class Down(NamedTuple):
    down: Any  # the method's own
    c_bar_P: Tensor


class Own(NamedTuple):
    own: Any  # the method's own
    c_P: Tensor  # mean raw gradient of the last round
    seen: Tensor  # 1 once it took part


class Scratch(NamedTuple):
    scratch: Any  # the method's own
    e_P: Tensor  # e_u


class Up(NamedTuple):
    up: Any  # the method's own
    dc_P: Tensor  # c_u' - c_u
    new: Tensor  # 1 in its first round


def with_drift_at_clients(method: Method, model: Callable[[Any], Tensor], alpha: float) -> Method:
    def init(x_P: Tensor, federation: Federation) -> Tracked:
        zero_P = torch.zeros_like(x_P, dtype=torch.float64)
        return Tracked(method.init(x_P, federation), WeightedSum(zero_P, zero_P.new_zeros(())))

    def init_own(ask: Ask, x_P: Tensor) -> Own:
        return Own(method.init_own(ask, x_P), torch.zeros_like(x_P), x_P.new_zeros(()))

    def broadcast(tracked: Tracked, ids_S: Tensor) -> Down:
        c_bar_P = weighted_mean(tracked.sum_c).to(model(tracked.server).dtype)
        return Down(method.broadcast(tracked.server, ids_S), for_all(c_bar_P, ids_S))

    def begin(ask: Ask, down: Down, own: Own) -> tuple[Tensor, Any]:
        y_P, scratch = method.begin(ask, down.down, own.own)
        return y_P, Scratch(scratch, own.seen * alpha * (own.c_P - down.c_bar_P))

    def direction(ask: Ask, y_P: Tensor, batch: Batch, down: Down, own: Own, scratch: Any) -> tuple[Tensor, Any]:
        d_P, inner = method.direction(ask, y_P, batch, down.down, own.own, scratch.scratch)
        return corrected(d_P, scratch.e_P), Scratch(inner, scratch.e_P)

    def finish(ask: Ask, y_P: Tensor, work: Work, down: Down, own: Own, scratch: Any) -> tuple[Up, Own]:
        up, kept = method.finish(ask, y_P, work, down.down, own.own, scratch.scratch)
        c_P = field_of(up, "delta_P") / work.total_step + scratch.e_P
        return Up(up, c_P - own.c_P, 1 - own.seen), Own(kept, c_P, torch.ones_like(own.seen))

    def predict(ask: Ask, y_P: Tensor, down: Down, own: Own) -> Prediction:
        return method.predict(ask, y_P, down.down, own.own)

    def step(ask: ServerAsk, tracked: Tracked, sums: Sums) -> Stepped:
        stepped = method.step(ask, tracked.server, sums)
        total_P, size = tracked.sum_c
        sum_c = WeightedSum(total_P + sums.sum("dc_P"), size + sums.sum("new"))
        return stepped._replace(server=Tracked(stepped.server, sum_c))

    switch = next((name for name in ("memory", "ht", *ROBUST) if name in method.switches), "")
    if switch:
        raise ValueError(
            f"drift:memory=clients hides single replies from the server, but +{switch} needs them; "
            f"use drift:memory=server, as in fedncv+{switch}"
        )
    if method.combine is not None:
        raise ValueError(
            "drift:memory=clients hides single replies from the server, but this method needs them; "
            "use drift:memory=server, or a method in the sums form, as in fedavg+drift:memory=clients"
        )
    return through(method)._replace(
        init=init,
        init_own=init_own,
        broadcast=broadcast,
        begin=begin,
        direction=direction,
        finish=finish,
        predict=predict,
        step=step,
        fixed_sizes=True,
        bounds={**method.bounds, "new": 1.0},
        changes=Changes(
            "dc_P", lambda own: own.c_P, lambda own, after, sent_P: after._replace(c_P=own.c_P + sent_P), new="new"
        ),
        reveals=revealing(
            method,
            dc_P="how its mean gradient changed; only the sum is needed",
            new="whether it takes part for the first time; only the sum is needed",
        ),
        needs_sgd="drift divides x - y by the sum of the step lengths, which is a mean gradient only with SGD",
        switches=(*method.switches, "drift"),
    )
