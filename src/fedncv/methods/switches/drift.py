"""Drift correction: shift every client's gradient towards the mean gradient of all clients.

    client   y <- y - lr * (d_B - e_u)                              d_B: the method's own direction
             Delta_u = x - y
    server   c_u <- Delta_u / (lr * K_u) + e_u                      mean raw gradient along the client's path
             c_bar = sum_v n_v c_v / sum_v n_v                      over the clients seen
             e_u = alpha_u (c_u - c_bar) - sum_v p_v alpha_v (c_v - c_bar);       0 for a client never seen
    alpha    one number for all clients, or learned for each client, starting at 0:
             alpha_u <- alpha_u + rate * (alpha_u* - alpha_u)
             alpha_u* = <c_u' - c_bar, c_u - c_bar> / ||c_u - c_bar||^2, in [0, 1]; c_u' is the new c_u
    memory   server: the server keeps c_u and sends e_u, so each client receives one more array
             clients: each client keeps its c_u, and the server needs only sums (drift_clients.py)

The corrections sum to zero over all clients: sum_u p_u e_u = 0. Delta_u contains e_u, so c_u adds it back. alpha = 0 is
the method itself; alpha = 1 with equal sizes is SCAFFOLD (option II) once all clients have been seen. alpha_u* has
the least error of one gradient. The default is 1, because a smaller alpha_u leaves drift, which does not average out.
Derivations: docs/theory.md. Letters: S = clients of the round, N = all clients, P = parameters.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedncv import estimators
from fedncv.methods.base import Ask, Batch, Federation, Method, ServerAsk, Stepped, Work, combined
from fedncv.methods.sums import Replies, field_of
from fedncv.methods.switches.drift_clients import with_drift_at_clients
from fedncv.methods.switches.through import corrected, revealing, through
from fedncv.rows import AnyRows, rows_of, with_rows


@dataclass(frozen=True, kw_only=True)
class Config:
    alpha: float | Literal["learned"] = 1.0
    """Strength of the correction, from 0 to 1 (0 leaves the method unchanged), or learned for each client."""
    rate: float = 0.5
    """Step of a learned alpha_u towards alpha_u* per round, from 0 (never moves) to 1 (all the way)."""
    memory: Literal["server", "clients"] = "server"
    """Where c_u is stored. With clients the server needs only sums, and alpha cannot be learned."""

    def __post_init__(self) -> None:
        for name in ("alpha", "rate"):
            value = getattr(self, name)
            if value != "learned" and not 0 <= value <= 1:
                raise ValueError(f"{name} must be from 0 to 1, not {value}")
        if self.alpha == "learned" and self.memory == "clients":
            raise ValueError("drift:alpha=learned needs each reply, which memory=clients hides; use memory=server")


class Drift(NamedTuple):
    server: Any  # the method's own
    n_N: Tensor  # samples of every client as last reported, float64
    c: AnyRows  # mean raw gradient of the last round, of every client seen
    sum_c: estimators.WeightedSum
    alpha: AnyRows  # scalars, of every client seen
    sum_alpha_c: estimators.WeightedSum  # of alpha_v c_v, with weights n_v alpha_v; if they are learned


class Down(NamedTuple):
    down: Any  # the method's own
    e_P: Tensor  # drift correction


class Up(NamedTuple):
    up: Any  # the method's own
    total_step: Tensor  # lr * K_u


class Learned(NamedTuple):
    combined: Any  # the method's own
    drift: Drift


def with_drift(method: Method, config: Config = Config()) -> Method:
    """Return ``method`` with a correction of client drift."""
    if config.alpha == 0:
        return method
    model = method.model
    if "delta_P" not in method.reveals or model is None:
        raise ValueError("drift needs clients that send their update of a shared model, as in fedavg+drift")
    if "labels" in method.switches and "total_step" in method.reveals:
        raise ValueError("drift and labels:at=client both correct client drift; use one, as in fedavg+drift")
    if "median" in method.switches:
        raise ValueError(
            "drift cannot be used with median, which leaves nothing of single clients to correct; use trimmed, as in "
            "fedncv+trimmed"
        )
    if config.memory == "clients":
        return with_drift_at_clients(method, model, float(config.alpha))

    def init(x_P: Tensor, federation: Federation) -> Drift:
        zero_P = torch.zeros_like(x_P, dtype=torch.float64)
        zero = estimators.WeightedSum(zero_P, zero_P.new_zeros(()))
        return Drift(method.init(x_P, federation), federation.sizes_N.to(x_P.device), {}, zero, {}, zero)

    def corrections(drift: Drift, ids_S: Tensor) -> tuple[Tensor, Tensor]:
        """Return e_u and c_u of these clients."""
        x_P, c_bar_P = model(drift.server), estimators.weighted_mean(drift.sum_c)
        mean_P = c_bar_P.to(x_P.dtype)
        c_SP = rows_of(drift.c, ids_S, mean_P)
        if config.alpha != "learned":  # equal alpha for all seen, and c_bar for the others: already centred
            return config.alpha * (c_SP - mean_P), c_SP
        # recentre over all clients, also those never seen: sum_u p_u e_u = 0 from the first round on
        spread_P = drift.sum_alpha_c.total_P - drift.sum_alpha_c.size * c_bar_P
        alpha_S = rows_of(drift.alpha, ids_S, x_P.new_zeros(()))
        return estimators.drift_corrections(c_SP, alpha_S, c_bar_P, spread_P / drift.n_N.sum()), c_SP

    def broadcast(drift: Drift, ids_S: Tensor) -> Down:
        return Down(method.broadcast(drift.server, ids_S), corrections(drift, ids_S.cpu())[0])

    def direction(ask: Ask, y_P: Tensor, batch: Batch, down: Down, own: Any, scratch: Any) -> tuple[Tensor, Any]:
        d_P, scratch = method.direction(ask, y_P, batch, down.down, own, scratch)
        return corrected(d_P, down.e_P), scratch

    def finish(ask: Ask, y_P: Tensor, work: Work, down: Down, own: Any, scratch: Any) -> tuple[Up, Any]:
        up, own = method.finish(ask, y_P, work, down.down, own, scratch)
        return Up(up, torch.as_tensor(work.total_step, dtype=y_P.dtype, device=y_P.device)), own

    def combine(drift: Drift, replies: Replies) -> Learned:
        inner, ids_S = replies._replace(ups=replies.ups.up), replies.ids_S.cpu()  # the only wait for the device
        e_SP, c_SP = corrections(drift, ids_S)
        c_new_SP = field_of(inner.ups, "delta_P") / replies.ups.total_step[:, None] + e_SP
        if method.screen is not None:  # total_step is of single clients, so it is not screened; what it makes is
            c_new_SP = method.screen.rows(torch.nan_to_num(c_new_SP, 0.0, 0.0, 0.0), replies.sizes_S)
        seen_S = torch.tensor([u in drift.c for u in ids_S.tolist()]).to(drift.n_N.device, non_blocking=True)
        old_S, n_S = drift.n_N[replies.ids_S] * seen_S, replies.sizes_S.to(drift.n_N)  # no old terms for new clients
        after = drift._replace(
            n_N=drift.n_N.index_copy(0, replies.ids_S, n_S),
            c=with_rows(drift.c, ids_S, c_new_SP),
            sum_c=estimators.replace_rows(drift.sum_c, c_SP, old_S, c_new_SP, n_S),
        )
        if config.alpha != "learned":
            after = after._replace(alpha=drift.alpha | dict.fromkeys(ids_S.tolist(), e_SP.new_full((), config.alpha)))
        else:
            was_S = rows_of(drift.alpha, ids_S, e_SP.new_zeros(()))
            best_S = estimators.learned_alpha(c_new_SP, c_SP, estimators.weighted_mean(after.sum_c), old_S > 0)
            now_S = estimators.smoothed(was_S, best_S, rate=config.rate)
            sums = estimators.replace_rows(drift.sum_alpha_c, c_SP, old_S * was_S, c_new_SP, n_S * now_S)
            after = after._replace(alpha=with_rows(drift.alpha, ids_S, now_S), sum_alpha_c=sums)
        return Learned(combined(method, drift.server, inner), after)

    def step(ask: ServerAsk, drift: Drift, learned: Learned) -> Stepped:
        stepped = method.step(ask, drift.server, learned.combined)
        return stepped._replace(server=learned.drift._replace(server=stepped.server))

    return through(method)._replace(
        init=init,
        broadcast=broadcast,
        begin=lambda ask, down, own: method.begin(ask, down.down, own),
        direction=direction,
        finish=finish,
        predict=lambda ask, y_P, down, own: method.predict(ask, y_P, down.down, own),
        combine=combine,
        step=step,
        reveals=revealing(method, total_step="the sum of its step lengths: learning rate times full batches"),
        needs_sgd="drift divides x - y by the sum of the step lengths, which is a mean gradient only with SGD",
        switches=(*method.switches, "drift"),
    )
