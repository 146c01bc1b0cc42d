"""Label regression: predict a client's update from its label shares, and use the prediction as a control variate.

    pi_u = n_{u,k} / n_u,   pi_bar = sum_v p_v pi_v over all clients       told once, when clients join
    server   h_u = (pi_u - pi_bar) B                                       sum_v p_v h_v = 0
             at=server   g_hat = sum_S omega_u (Delta_u - h_u)             the step, instead of sum_S omega_u Delta_u
             at=client   e_u = h_u is sent, and   y <- y - lr * (d_B - e_u)
             B: ridge regression of a_u on pi_u over the clients of earlier rounds, so it is fixed before the draw;
             a_u = Delta_u at the server, Delta_u / (lr * K_u) + e_u (the mean raw gradient) at the client

No client sends more than its update, and the server stores no client's update: its memory is classes x parameters. With
+ht the step is unbiased for every B. Clients that were never seen have h_u too. A client that does not tell its labels
counts as pi_bar, so its h_u is 0. It takes away what differs between clients because their labels differ. The label
prior (+prior) takes away much of the same, so together they gain little (docs/results).

Chambers and Clark, An Introduction to Model-Based Survey Sampling, 2012, for regression estimators; the rest is ours.
Derivations: docs/theory.md, section 5. Letters: S = clients of the round, N = all clients, C = classes, P = parameters.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedncv.estimators import Slopes, no_slopes, observe_labels, predicted, slopes
from fedncv.methods.base import (
    Ask,
    Batch,
    Federation,
    Method,
    ServerAsk,
    Stepped,
    Work,
    combined,
    field_of,
    rows_at,
    sums_of,
)
from fedncv.methods.sums import Replies
from fedncv.methods.switches.label_shares import Shares, shares_of
from fedncv.methods.switches.through import corrected, refuse_robust, revealing, through

TELLS = "the number of its samples of each class, once, when it joins"


@dataclass(frozen=True, kw_only=True)
class Config:
    at: Literal["server", "client"] = "server"
    """Where h_u is used: in the server's step, or as a drift correction that clients receive (one more array)."""
    ridge: float = 0.03
    """Ridge rho of the regression, above 0, in rounds of data; a larger one trusts the labels less."""
    forget: float = 0.9
    """Decay factor per round of the earlier rounds' sums, from 0 (the last round alone) to 1."""

    def __post_init__(self) -> None:
        if not 0 < self.ridge < math.inf:
            raise ValueError(f"ridge must be above 0 and finite, not {self.ridge}")
        if not 0 <= self.forget <= 1:
            raise ValueError(f"forget must be from 0 to 1, not {self.forget}")


class Labelled(NamedTuple):
    server: Any  # the method's own
    shares: Shares
    sums: Slopes


class Down(NamedTuple):
    down: Any  # the method's own
    e_P: Tensor  # drift correction


class Up(NamedTuple):
    up: Any  # the method's own
    total_step: Tensor  # lr * K_u


class Regressed(NamedTuple):
    """What the method's step receives, and the regression after the round."""

    combined: Any
    sums: Slopes


def memory(num_classes: int, x_P: Tensor) -> Slopes:
    """Return the server's memory, classes x parameters; raise ValueError if it does not fit."""
    try:
        return no_slopes(num_classes, x_P)
    except (RuntimeError, MemoryError):
        size = num_classes * len(x_P) * x_P.element_size() / 2**30
        raise ValueError(
            f"labels stores {num_classes} classes x {len(x_P):,} parameters at the server, {size:,.0f} GiB, which do "
            "not fit; use +calibrated, which stores none"
        ) from None


def with_labels(method: Method, config: Config = Config()) -> Method:
    """Return ``method`` with a control variate that is predicted from the clients' label shares."""
    chain = "fedavg+labels"
    refuse_robust(method, "labels", "adds a regression over all replies to the mean, which has no bound then")
    if "delta_P" not in method.reveals or method.model is None or method.weights.get("delta_P") == "one":
        raise ValueError(f"labels needs clients that send their update, averaged by samples, as in {chain}")
    if config.at == "server" and method.combine is not None:
        raise ValueError(f"labels needs a method in the sums form, as in {chain}; or use labels:at=client")

    def init(x_P: Tensor, federation: Federation) -> Labelled:
        shares = shares_of(federation, x_P.device)
        return Labelled(method.init(x_P, federation), shares, memory(federation.num_classes, x_P))

    def h(labelled: Labelled, ids_S: Tensor) -> Tensor:
        B_CP = slopes(labelled.sums, ridge=config.ridge)
        pi_SC = rows_at(labelled.shares.pi_NC, ids_S, labelled.shares.mean_C)
        return predicted(pi_SC, labelled.shares.mean_C, B_CP)

    def observed(labelled: Labelled, replies: Replies, a_SP: Tensor) -> Slopes:
        w_S = replies.sizes_S / replies.sizes_S.sum()
        return observe_labels(labelled.sums, w_S, labelled.shares.pi_NC[replies.ids_S], a_SP, forget=config.forget)

    def combine_at_server(labelled: Labelled, replies: Replies) -> Regressed:
        delta_SP, omega_S = field_of(replies.ups, "delta_P"), replies.weight_S
        sums = sums_of(replies, method.weights)
        estimate_P = sums.mean("delta_P") - omega_S.to(delta_SP.dtype) @ h(labelled, replies.ids_S)
        return Regressed(sums.with_mean("delta_P", estimate_P), observed(labelled, replies, delta_SP))

    def step(ask: ServerAsk, labelled: Labelled, regressed: Regressed) -> Stepped:
        stepped = method.step(ask, labelled.server, regressed.combined)
        return stepped._replace(server=Labelled(stepped.server, labelled.shares, regressed.sums))

    # ---- at the client ------------------------------------------------------------------------------

    def broadcast(labelled: Labelled, ids_S: Tensor) -> Down:
        return Down(method.broadcast(labelled.server, ids_S), h(labelled, ids_S))

    def direction(ask: Ask, y_P: Tensor, batch: Batch, down: Down, own: Any, scratch: Any) -> tuple[Tensor, Any]:
        d_P, scratch = method.direction(ask, y_P, batch, down.down, own, scratch)
        return corrected(d_P, down.e_P), scratch

    def finish(ask: Ask, y_P: Tensor, work: Work, down: Down, own: Any, scratch: Any) -> tuple[Up, Any]:
        up, own = method.finish(ask, y_P, work, down.down, own, scratch)
        return Up(up, torch.as_tensor(work.total_step, dtype=y_P.dtype, device=y_P.device)), own

    def combine_at_client(labelled: Labelled, replies: Replies) -> Regressed:
        inner = replies._replace(ups=replies.ups.up)
        raw_SP = field_of(inner.ups, "delta_P") / replies.ups.total_step[:, None] + h(labelled, replies.ids_S)
        return Regressed(combined(method, labelled.server, inner), observed(labelled, replies, raw_SP))

    common = through(method)._replace(
        init=init,
        step=step,
        fixed_sizes=True,
        joining={**method.joining, "label_counts_C": TELLS},
        switches=(*method.switches, "labels"),
    )
    if config.at == "server":
        return common._replace(combine=combine_at_server)
    return common._replace(
        broadcast=broadcast,
        begin=lambda ask, down, own: method.begin(ask, down.down, own),
        direction=direction,
        finish=finish,
        predict=lambda ask, y_P, down, own: method.predict(ask, y_P, down.down, own),
        combine=combine_at_client,
        reveals=revealing(method, total_step="the sum of its step lengths: learning rate times full batches"),
        needs_sgd="labels:at=client divides x - y by the sum of the step lengths, a mean gradient only with SGD",
    )
