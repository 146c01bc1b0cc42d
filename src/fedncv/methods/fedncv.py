"""FedNCV, the centred reading: one control-variate unit, at the server, at the client and at the sample.

The unit (docs/theory.md): for weights w of the draw that is averaged over and a_u known before it,
d_u = a_u - a_bar = (1 - w_u)(a_u - a_{without u}), the paper's leave-one-out difference scaled to have mean zero.

    client   y <- y - lr * (g(y; B) - e_u)                            over its batches, from y = x
             Delta_u = x - y
    server   g_hat = beta * h_bar + sum_S omega_u (Delta_u - beta * h_u)
             v <- momentum * v + g_hat;    x <- x - v
             a <- a + (x - a) / (1 + average * t)                     handed out for use
             h_u <- Delta_u                                           last update of client u
             c_u <- Delta_u / (lr * K_u) + e_u                        mean raw gradient along its path
             alpha_u = 1, or learned:  alpha_u <- alpha_u + rate * (alpha_u* - alpha_u)
             alpha_u* = <c_u' - c_bar, c_u - c_bar> / ||c_u - c_bar||^2, in [0, 1]
             e_u = alpha_u (c_u - c_bar) - sum_v p_v alpha_v (c_v - c_bar)
             beta from scalars of earlier rounds, so that it is fixed before the draw
    in use   a client predicts with a + (y - a) / (1 + blend * t), y trained from a; running statistics alike

and, as switches of their own, control variates for mini-batches (switches/sample_level.py), the label prior
(switches/label_prior.py) and the average (switches/server_average.py). A client never seen is remembered as the mean
of those seen: known before the draw as well, and closer than zero.

alpha_u* makes one client's gradient least noisy. The default is 1 all the same: what a smaller alpha_u leaves behind is
drift, which does not average out. With alpha = 1 an update no longer resembles the client's last one, so the memory of
h_u has nothing to give and is off; without the correction it lowers the noise of sampling (docs/gallery.md).

After Chen et al., "Taming Gradient Variance in Federated Learning with Networked Control Variates"; the literal
reading is fedncv_paper.py. Everything off is FedAvg to the last bit. Special cases: beta = 1 with equal sizes FedVARP,
0 < beta < 1 FedStale, alpha = 1 with equal sizes SCAFFOLD (option II); the last three once all clients were seen.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedncv import estimators
from fedncv.estimators import Moments, WeightedSum
from fedncv.methods.base import Ask, Batch, Federation, Method, Replies, ServerAsk, Work, for_all, weighted_sum
from fedncv.methods.fedavg import fedavg
from fedncv.methods.switches import even_samples, label_prior, sample_level, server_average
from fedncv.rows import AnyRows, rows_of, with_rows


@dataclass(frozen=True, kw_only=True)
class Config:
    memory: Literal["off", "fixed", "adaptive"] = "off"
    """Server memory h_u: off; with the given beta; or with beta from earlier rounds."""
    beta: float = 1.0
    """Trust in the memory where it is fixed, from 0 to 1; the ceiling where it is adaptive."""
    forget: float = 0.9
    """How much of the earlier rounds' moments is kept a round, from 0 to 1."""
    weights: Literal["self_normalised", "ht"] = "self_normalised"
    """omega_u: p_u / sum_S p_v, less noisy; or Horvitz-Thompson's p_u / P(u in S), unbiased."""
    drift: Literal["off", "fixed", "adaptive"] = "fixed"
    """Client drift correction e_u: off; with the given alpha for clients seen; or learned for each."""
    alpha: float = 1.0
    """Strength of the correction where it is fixed, from 0 to 1; the ceiling where it is adaptive."""
    rate: float = 0.5
    """How fast alpha_u follows alpha_u*, from 0, never, to 1, at once."""
    tau: float = 1.0
    """Weight of the label prior, at least 0; 0 is off."""
    epsilon: float = 1.0
    """Samples of every class that a client is taken to have beside its own, above 0."""
    even: bool = True
    """Every sample of a client weighs the same: a smaller last batch makes a smaller step."""
    samples: Literal["off", "saga", "svrg"] = "off"
    """A control variate for every mini-batch: off; its step in the epoch before; or its step at the round's start."""
    momentum: float = 0.5
    """Server momentum, from 0 to below 1; 0 is off."""
    average: float = 0.05
    """Share of the rounds so far whose models are averaged for use, at least 0; 0 is off."""
    personal: Literal["none", "head"] = "none"
    """What never leaves a client: nothing, or its head."""
    blend: float = 0.03
    """How fast a client's own training gives way to the shared model in what it predicts with, at least 0; 0: never."""

    def __post_init__(self) -> None:
        for name in ("beta", "forget", "alpha", "rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, not {getattr(self, name)}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, not {self.momentum}")
        label_prior.Config(tau=self.tau, epsilon=self.epsilon)
        for name in ("average", "blend"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")


class Server(NamedTuple):
    """Q = shared parameters (all of them unless the head is personal), N = all clients. Rows: of the clients seen."""

    x_Q: Tensor  # shared model
    v_Q: Tensor  # velocity
    a_Q: Tensor  # average of the latest models; empty where it is off
    n_N: Tensor  # samples of every client as last reported, float64
    h: AnyRows  # last update
    sum_h: WeightedSum  # over the clients seen
    c: AnyRows  # mean raw gradient of the last round
    sum_c: WeightedSum
    alpha: AnyRows  # scalars
    sum_alpha_c: WeightedSum  # of alpha_v c_v, with weights n_v alpha_v; where they are learned
    moments: Moments  # of earlier rounds, for beta


class Down(NamedTuple):
    x_Q: Tensor
    e_Q: Tensor  # drift correction; empty where it is off


class Up(NamedTuple):
    delta_Q: Tensor  # x - y
    total_step: Tensor  # lr * K_u


def fedncv(config: Config = Config()) -> Method:
    remembers, corrects = config.memory != "off", config.drift != "off"

    def shared_part(layout: Any) -> slice:
        return slice(0, layout.num_parameters) if config.personal == "none" else layout.body

    def init(x_P: Tensor, federation: Federation) -> Server:
        x_Q = x_P[shared_part(federation.layout)]
        nothing = WeightedSum(
            torch.zeros_like(x_Q, dtype=torch.float64), torch.zeros((), dtype=torch.float64, device=x_Q.device)
        )
        return Server(
            x_Q=x_Q,
            v_Q=torch.zeros_like(x_Q) if config.momentum else x_Q[:0],
            a_Q=x_Q if config.average else x_Q[:0],
            n_N=federation.sizes_N.to(x_Q.device),
            h={},
            sum_h=nothing,
            c={},
            sum_c=nothing,
            alpha={},
            sum_alpha_c=nothing,
            moments=estimators.no_moments(x_Q.device),
        )

    def init_own(ask: Ask, x_P: Tensor) -> Tensor:
        return x_P[shared_part(ask.layout).stop :]  # the personal slice; empty where there is none

    def corrections(server: Server, ids_S: Tensor) -> tuple[Tensor, Tensor]:
        """e_u of these clients, and the c_u that it is made of."""
        c_bar_Q = estimators.weighted_mean(server.sum_c)
        mean_Q = c_bar_Q.to(server.x_Q.dtype)
        c_SQ = rows_of(server.c, ids_S, mean_Q)
        if config.drift == "fixed":  # one alpha for all seen, and c_bar for the others: centred as it is
            return config.alpha * (c_SQ - mean_Q), c_SQ
        # recentred over all clients, those never seen included: sum_u p_u e_u = 0 from the first round on
        spread_Q = server.sum_alpha_c.total_P - server.sum_alpha_c.size * c_bar_Q
        alpha_S = rows_of(server.alpha, ids_S, server.x_Q.new_zeros(()))
        return estimators.drift_corrections(c_SQ, alpha_S, c_bar_Q, spread_Q / server.n_N.sum()), c_SQ

    def broadcast(server: Server, ids_S: Tensor) -> Down:
        e_SQ = corrections(server, ids_S.cpu())[0] if corrects else for_all(server.x_Q[:0], ids_S)
        return Down(for_all(server.x_Q, ids_S), e_SQ)

    def hand_out(server: Server, ids_S: Tensor) -> Down:
        return broadcast(server._replace(x_Q=server.a_Q), ids_S)

    def begin(_ask: Ask, down: Down, personal_H: Tensor) -> tuple[Tensor, Any]:
        return torch.cat([down.x_Q, personal_H]), ()

    def direction(ask: Ask, y_P: Tensor, batch: Batch, down: Down, own: Any, scratch: Any) -> tuple[Tensor, Any]:
        g_P = ask.grad(y_P, batch)
        if corrects:  # what is personal takes no correction
            g_P = g_P - (down.e_Q if config.personal == "none" else torch.cat([down.e_Q, torch.zeros_like(own)]))
        return g_P, scratch

    def finish(ask: Ask, y_P: Tensor, work: Work, down: Down, _own: Any, _scratch: Any) -> tuple[Up, Tensor]:
        shared = shared_part(ask.layout)
        total_step = torch.as_tensor(work.total_step, dtype=y_P.dtype, device=y_P.device)
        return Up(down.x_Q - y_P[shared], total_step), y_P[shared.stop :]

    def aggregate(ask: ServerAsk, server: Server, replies: Replies) -> Server:
        known = _known(server, replies)
        n_N = server.n_N.index_copy(0, replies.ids_S, replies.sizes_S.to(server.n_N))
        after = server._replace(n_N=n_N)
        if remembers:
            step_Q, after = _estimate(config, server, after, replies, known)
        else:
            step_Q = weighted_sum(_weights(config, replies, n_N), replies.ups.delta_Q)
        if corrects:
            after = _learn(config, server, after, replies, known, *corrections(server, known.ids_S))
        if config.momentum:
            step_Q = config.momentum * server.v_Q + step_Q
            after = after._replace(v_Q=step_Q)
        x_Q = server.x_Q - step_Q
        if config.average:
            after = after._replace(a_Q=server_average.moved(server.a_Q, x_Q, ask.round, config.average))
        return after._replace(x_Q=x_Q)

    def predict(ask: Ask, y_P: Tensor, down: Down, _own: Any) -> tuple[Tensor, None]:
        if config.blend == 0:
            return y_P, None
        share = 1 / (1 + config.blend * ask.round)
        shared = len(down.x_Q)
        x_P = torch.cat([down.x_Q, y_P[shared:]])
        ask.buffers_R = ask.received_R + share * (ask.buffers_R - ask.received_R)
        return x_P + share * (y_P - x_P), None

    def shared(server: Server) -> Tensor | None:
        if config.personal != "none":
            return None
        return server.a_Q if config.average else server.x_Q

    method = fedavg()._replace(
        init=init,
        init_own=init_own,
        broadcast=broadcast,
        begin=begin,
        direction=direction,
        finish=finish,
        aggregate=aggregate,
        predict=predict,
        shared=shared,
        buffers=server_average.averaged_statistics(config.average) if config.average else "averaged",
        hand_out=hand_out if config.average else None,
        switches=("momentum", "average"),
        reveals={"delta_Q": "the client's update of the shared slices", "total_step": "how many steps it made"},
    )
    if config.even:
        method = even_samples.with_even_samples(method)
    if config.samples != "off":
        method = sample_level.with_samples(method, sample_level.Config(kind=config.samples))
    return label_prior.with_prior(method, label_prior.Config(tau=config.tau, epsilon=config.epsilon))


class Known(NamedTuple):
    """What the server knew of the clients that answered, before they did."""

    ids_S: Tensor  # in main memory, where rows are found
    n_S: Tensor  # samples as last reported; 0 for a client never seen, which is in no sum


def _known(server: Server, replies: Replies) -> Known:
    ids_S = replies.ids_S.cpu()  # the one wait for the device
    seen_S = torch.tensor([u in server.c or u in server.h for u in ids_S.tolist()])
    return Known(ids_S, server.n_N[replies.ids_S] * seen_S.to(server.n_N.device, non_blocking=True))


def _weights(config: Config, replies: Replies, n_N: Tensor) -> Tensor:
    """omega_u."""
    if config.weights == "self_normalised":
        return replies.weight_S
    p_S = _shares(replies, n_N)
    return estimators.horvitz_thompson_weights(p_S, replies.inclusion_S.to(p_S))


def _shares(replies: Replies, n_N: Tensor) -> Tensor:
    """p_u among all clients."""
    return (replies.sizes_S / n_N.sum()).to(replies.ups.delta_Q.dtype)


def _estimate(config: Config, server: Server, after: Server, replies: Replies, known: Known) -> tuple[Tensor, Server]:
    """g_hat, and the server with the updates it will remember and the moments that the next rounds' beta is made of."""
    delta_SQ = replies.ups.delta_Q
    omega_S, p_S = _weights(config, replies, after.n_N), _shares(replies, after.n_N)
    h_bar_Q = estimators.weighted_mean(server.sum_h).to(delta_SQ.dtype)
    h_SQ = rows_of(server.h, known.ids_S, h_bar_Q)
    beta: float | Tensor = config.beta
    if config.memory == "adaptive":
        beta = estimators.running_beta(server.moments).clamp(0, config.beta).to(delta_SQ.dtype)
    step_Q = estimators.server_estimate(delta_SQ, h_SQ, omega_S, h_bar_Q, beta=beta)
    if config.weights == "ht":
        units, controls = p_S[:, None] * delta_SQ, p_S[:, None] * h_SQ
    else:
        centre_Q = weighted_sum(omega_S, delta_SQ)
        units = estimators.linearised_units(delta_SQ, p_S, centre_Q)
        controls = estimators.linearised_units(h_SQ, p_S, h_bar_Q)
    return step_Q, after._replace(
        h=with_rows(server.h, known.ids_S, delta_SQ),
        sum_h=estimators.replace_rows(server.sum_h, h_SQ, known.n_S, delta_SQ, replies.sizes_S.to(known.n_S)),
        moments=estimators.observe(server.moments, units, controls, forget=config.forget),
    )


def _learn(
    config: Config, server: Server, after: Server, replies: Replies, known: Known, e_SQ: Tensor, c_SQ: Tensor
) -> Server:
    """c_u and alpha_u of the clients that answered, and the sums that e_u is made of."""
    c_new_SQ = replies.ups.delta_Q / replies.ups.total_step[:, None] + e_SQ
    n_S = replies.sizes_S.to(server.n_N)
    after = after._replace(
        c=with_rows(server.c, known.ids_S, c_new_SQ),
        sum_c=estimators.replace_rows(server.sum_c, c_SQ, known.n_S, c_new_SQ, n_S),
    )
    if config.drift == "fixed":
        alpha = e_SQ.new_full((), config.alpha)
        return after._replace(alpha=server.alpha | dict.fromkeys(known.ids_S.tolist(), alpha))
    old_S = rows_of(server.alpha, known.ids_S, e_SQ.new_zeros(()))
    target_S = estimators.learned_alpha(c_new_SQ, c_SQ, estimators.weighted_mean(after.sum_c), known.n_S > 0)
    new_S = estimators.smoothed(old_S, target_S.clamp(max=config.alpha), rate=config.rate)
    return after._replace(
        alpha=with_rows(server.alpha, known.ids_S, new_S),
        sum_alpha_c=estimators.replace_rows(server.sum_alpha_c, c_SQ, known.n_S * old_S, c_new_SQ, n_S * new_S),
    )
