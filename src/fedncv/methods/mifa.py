"""MIFA: every round steps along the last updates of all clients, absent ones included.

    client   as FedAvg
    server   h_u <- Delta_u for u in S                     h_u = 0 until the first
             x <- x - server_lr * sum_v p_v h_v            over all clients

Gu et al., NeurIPS 2021, https://arxiv.org/abs/2106.04159, Algorithm 1.
Departures from the paper: clients are weighted by samples (the paper's clients have equal sizes). In the paper
every client answers in the first round. Here a client that has never answered counts with an update of zero, so
early steps are shorter, in proportion to the share of the data seen. Stored updates keep the learning rate of
their round.
"""

import torch
from torch import Tensor

from fedncv.estimators import weighted_mean
from fedncv.methods.base import Federation, Method, Replies, ServerAsk, Stepped, sums_of
from fedncv.methods.fedavg import Config, fedavg
from fedncv.methods.switches.memory import Memory, Recalled, no_memory, remember
from fedncv.methods.switches.through import through
from fedncv.rows import rows_of


def mifa(config: Config = Config()) -> Method:
    method = fedavg(config)

    def init(x_P: Tensor, federation: Federation) -> Memory:
        return no_memory(method.init(x_P, federation), x_P, federation)

    def combine(memory: Memory, replies: Replies) -> Recalled:
        ids_S, delta_SP = replies.ids_S.cpu(), replies.ups.delta_P
        after = remember(memory, replies, ids_S, rows_of(memory.h, ids_S, torch.zeros_like(delta_SP[0])))
        h_bar_P = weighted_mean(after.sum_h._replace(size=after.n_N.sum())).to(delta_SP.dtype)
        return Recalled(sums_of(replies, method.weights).with_mean("delta_P", h_bar_P), after)

    def step(ask: ServerAsk, memory: Memory, recalled: Recalled) -> Stepped:
        stepped = method.step(ask, memory.server, recalled.sums)
        return stepped._replace(server=recalled.memory._replace(server=stepped.server))

    return through(method)._replace(init=init, combine=combine, step=step)
