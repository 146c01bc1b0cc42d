"""FedNCV in one piece, as it was before it became a chain: the oracle that the chain is held to, bit for bit.

The server's memory, the drift correction, momentum, average and blend are written out here once more, in one file and
with one server state. The switches that existed before (even samples, sample level, label prior) are the library's.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedncv import estimators
from fedncv.estimators import Moments, WeightedSum
from fedncv.methods.base import BufferRule, Prediction, Stepped, for_all, weighted_sum
from fedncv.methods.fedavg import fedavg
from fedncv.methods.switches import even_samples, label_prior, sample_level
from fedncv.rows import rows_of, with_rows


@dataclass(frozen=True, kw_only=True)
class Config:
    memory: str = "off"  # off, fixed, adaptive
    beta: float = 1.0
    forget: float = 0.9
    weights: str = "self_normalised"  # or ht
    drift: str = "fixed"  # off, fixed, adaptive
    alpha: float = 1.0
    rate: float = 0.5
    tau: float = 1.0
    epsilon: float = 1.0
    even: bool = True
    samples: str = "off"  # off, saga, svrg
    momentum: float = 0.5
    average: float = 0.05
    blend: float = 0.03


class Server(NamedTuple):
    x_P: Tensor
    v_P: Tensor
    a_P: Tensor
    n_N: Tensor
    h: dict
    sum_h: WeightedSum
    c: dict
    sum_c: WeightedSum
    alpha: dict
    sum_alpha_c: WeightedSum
    moments: Moments


class Down(NamedTuple):
    x_P: Tensor
    e_P: Tensor


class Up(NamedTuple):
    delta_P: Tensor
    total_step: Tensor


def one_piece(config: Config = Config()):
    remembers, corrects = config.memory != "off", config.drift != "off"

    def init(x_P, federation):
        nothing = WeightedSum(torch.zeros_like(x_P, dtype=torch.float64), torch.zeros((), dtype=torch.float64))
        moments = estimators.no_moments(x_P.device)
        n_N = federation.sizes_N
        return Server(x_P, torch.zeros_like(x_P), x_P, n_N, {}, nothing, {}, nothing, {}, nothing, moments)

    def corrections(server, ids_S):
        c_bar_P = estimators.weighted_mean(server.sum_c)
        mean_P = c_bar_P.to(server.x_P.dtype)
        c_SP = rows_of(server.c, ids_S, mean_P)
        if config.drift == "fixed":
            return config.alpha * (c_SP - mean_P), c_SP
        spread_P = server.sum_alpha_c.total_P - server.sum_alpha_c.size * c_bar_P
        alpha_S = rows_of(server.alpha, ids_S, server.x_P.new_zeros(()))
        return estimators.drift_corrections(c_SP, alpha_S, c_bar_P, spread_P / server.n_N.sum()), c_SP

    def broadcast(server, ids_S):
        e_SP = corrections(server, ids_S)[0] if corrects else for_all(server.x_P[:0], ids_S)
        return Down(for_all(server.x_P, ids_S), e_SP)

    def hand_out(server, ids_S):
        return broadcast(server._replace(x_P=server.a_P), ids_S)

    def begin(_ask, down, _own):
        return down.x_P, ()

    def direction(ask, y_P, batch, down, _own, scratch):
        g_P = ask.grad(y_P, batch)
        return g_P - down.e_P if corrects else g_P, scratch

    def finish(_ask, y_P, work, down, own, _scratch):
        return Up(down.x_P - y_P, torch.as_tensor(work.total_step, dtype=y_P.dtype)), own

    def step(ask, server, replies):
        delta_SP, ids_S, n_S = replies.ups.delta_P, replies.ids_S, replies.sizes_S.to(server.n_N)
        seen_S = torch.tensor([u in server.c or u in server.h for u in ids_S.tolist()])
        known_S = server.n_N[ids_S] * seen_S
        n_N = server.n_N.index_copy(0, ids_S, n_S)
        after = server._replace(n_N=n_N)
        p_S = (replies.sizes_S / n_N.sum()).to(delta_SP.dtype)
        omega_S = replies.weight_S
        if config.weights == "ht":
            omega_S = estimators.horvitz_thompson_weights(p_S, replies.inclusion_S.to(p_S))
        if remembers:
            h_bar_P = estimators.weighted_mean(server.sum_h).to(delta_SP.dtype)
            h_SP = rows_of(server.h, ids_S, h_bar_P)
            beta: Any = config.beta
            if config.memory == "adaptive":
                beta = estimators.running_beta(server.moments).clamp(0, config.beta).to(delta_SP.dtype)
            step_P = estimators.server_estimate(delta_SP, h_SP, omega_S, h_bar_P, beta=beta)
            if config.weights == "ht":
                units, controls = p_S[:, None] * delta_SP, p_S[:, None] * h_SP
            else:
                centre_P = weighted_sum(omega_S, delta_SP)
                units = estimators.linearised_units(delta_SP, p_S, centre_P)
                controls = estimators.linearised_units(h_SP, p_S, h_bar_P)
            after = after._replace(
                h=with_rows(server.h, ids_S, delta_SP),
                sum_h=estimators.replace_rows(server.sum_h, h_SP, known_S, delta_SP, n_S),
                moments=estimators.observe(server.moments, units, controls, forget=config.forget),
            )
        else:
            step_P = weighted_sum(omega_S, delta_SP)
        if corrects:
            e_SP, c_SP = corrections(server, ids_S)
            c_new_SP = delta_SP / replies.ups.total_step[:, None] + e_SP
            after = after._replace(
                c=with_rows(server.c, ids_S, c_new_SP),
                sum_c=estimators.replace_rows(server.sum_c, c_SP, known_S, c_new_SP, n_S),
            )
            if config.drift == "adaptive":
                old_S = rows_of(server.alpha, ids_S, e_SP.new_zeros(()))
                mean_P = estimators.weighted_mean(after.sum_c)
                target_S = estimators.learned_alpha(c_new_SP, c_SP, mean_P, known_S > 0)
                new_S = estimators.smoothed(old_S, target_S, rate=config.rate)
                sums = estimators.replace_rows(server.sum_alpha_c, c_SP, known_S * old_S, c_new_SP, n_S * new_S)
                after = after._replace(alpha=with_rows(server.alpha, ids_S, new_S), sum_alpha_c=sums)
        if config.momentum:
            step_P = config.momentum * server.v_P + step_P
        x_P = server.x_P - step_P
        a_P = server.a_P + (x_P - server.a_P) / (1 + config.average * ask.round) if config.average else x_P
        return Stepped(after._replace(x_P=x_P, v_P=step_P, a_P=a_P))

    def predict(ask, y_P, down, _own):
        if config.blend == 0:
            return Prediction(y_P, ask.buffers_R)
        share = 1 / (1 + config.blend * ask.round)
        buffers_R = ask.received_R + share * (ask.buffers_R - ask.received_R)
        return Prediction(down.x_P + share * (y_P - down.x_P), buffers_R)

    statistics = BufferRule(
        init=lambda start_R, _federation: start_R,
        broadcast=lambda b_R, _server, ids_S: for_all(b_R, ids_S),
        step=lambda ask, b_R, _server, mean_R: b_R + (mean_R - b_R) / (1 + config.average * ask.round),
        shared=True,
    )
    method = fedavg()._replace(
        init=init,
        broadcast=broadcast,
        begin=begin,
        direction=direction,
        finish=finish,
        combine=lambda _server, replies: replies,
        step=step,
        predict=predict,
        shared=lambda server: server.a_P,
        buffers=statistics if config.average else "averaged",
        hand_out=hand_out if config.average else None,
        reveals={"delta_P": "its update", "total_step": "its steps"},
    )
    if config.even:
        method = even_samples.with_even_samples(method)
    if config.samples != "off":
        method = sample_level.with_samples(method, sample_level.Config(kind=config.samples))
    return label_prior.with_prior(method, label_prior.Config(tau=config.tau, epsilon=config.epsilon))
