"""FedNova: normalise updates by the number of local steps.

    client   as FedAvg, then  d_u = Delta_u / a_u;  a_u is the sum of the weights of its gradients: the number of
             its steps, more with local momentum. Sends d_u and a_u
    server   tau_eff = sum_S p_u a_u
             x <- x - tau_eff * sum_S p_u d_u

Wang et al., NeurIPS 2020, https://arxiv.org/abs/2007.07481, the update with normalised gradients of section 4.
Departures from the paper: p_u is normalised over the clients that answered. The learning rate stays inside
Delta_u; the paper divides by it and multiplies it back.
With equal a_u it is FedAvg, to rounding.
"""

from typing import Any, NamedTuple

from torch import Tensor

from fedncv.methods.base import Ask, Method, ServerAsk, Stepped, Sums, Work, moved_by
from fedncv.methods.fedavg import Down, Server, fedavg


class Up(NamedTuple):
    d_P: Tensor  # (x - y) / a_u
    a: Tensor  # ||a_u||_1, at least 1


def fednova() -> Method:
    def finish(_ask: Ask, y_P: Tensor, work: Work, down: Down, own: Any, _scratch: Any) -> tuple[Up, Any]:
        a = y_P.new_ones(()) * (work.total_step / work.lr)
        return Up((down.x_P - y_P) / a, a), own

    def step(_ask: ServerAsk, server: Server, sums: Sums) -> Stepped:
        return moved_by(server, sums.mean("a") * sums.mean("d_P"))

    return fedavg()._replace(
        finish=finish,
        step=step,
        needs_sgd="a_u is the sum of the weights of its gradients in x - y, which only SGD's steps have",
        reveals={"d_P": "the client's model update per local step", "a": "how many local steps it made"},
        bounds={"a": 65536.0},
    )
