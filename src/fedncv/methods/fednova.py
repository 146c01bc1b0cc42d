"""FedNova: updates normalised by the local work behind them.

    client   as FedAvg; sends also  a_u, the sum of the weights of its gradients: the number of its steps,
             more with local momentum
    server   d_u     = Delta_u / a_u
             tau_eff = sum_S p_u a_u
             x <- x - tau_eff * sum_S p_u d_u

Wang et al., NeurIPS 2020, https://arxiv.org/abs/2007.07481, the update with normalised gradients of section 4.
Departures from the paper: p_u is normalised over the clients that answered; the learning rate stays inside
Delta_u, where the paper divides by it and multiplies it back.
Clients with equal a_u give FedAvg, to rounding.
"""

from typing import Any, NamedTuple

from torch import Tensor

from fedncv.methods.base import Ask, Method, Replies, ServerAsk, Work, weighted_sum
from fedncv.methods.fedavg import Down, Server, fedavg


class Up(NamedTuple):
    delta_P: Tensor  # x - y
    a: Tensor  # ||a_u||_1, at least 1


def fednova() -> Method:
    def finish(_ask: Ask, y_P: Tensor, work: Work, down: Down, own: Any, _scratch: Any) -> tuple[Up, Any]:
        return Up(down.x_P - y_P, y_P.new_ones(()) * (work.total_step / work.lr)), own

    def aggregate(_ask: ServerAsk, server: Server, replies: Replies) -> Server:
        delta_SP, a_S = replies.ups
        tau_eff = weighted_sum(replies.weight_S, a_S)
        return Server(server.x_P - tau_eff * weighted_sum(replies.weight_S, delta_SP / a_S[:, None]))

    return fedavg()._replace(
        finish=finish,
        aggregate=aggregate,
        reveals={"delta_P": "the client's model update", "a": "how many local steps it made"},
    )
