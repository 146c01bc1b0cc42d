"""FedAdp: give more weight to clients whose updates point along the mean update.

    client   as FedAvg
    server   Delta     = sum_S p_u Delta_u
             theta_u   = arccos( <Delta, Delta_u> / (||Delta|| ||Delta_u||) )
             theta~_u  = mean of theta_u over the rounds in which u took part, this one included
             f(theta~) = alpha * (1 - exp(-exp(-alpha * (theta~ - 1))))           Gompertz's curve
             x <- x - sum_S psi_u Delta_u,      psi_u = n_u exp(f(theta~_u)) / sum_S n_v exp(f(theta~_v))

Wu and Wang, IEEE TCCN 2021, https://arxiv.org/abs/2012.00661, Algorithm 1.
Departures from the paper: the angle is averaged over the rounds in which a client took part (in the paper every
client takes part in every round). An update of zero has no direction; it is treated as orthogonal.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedncv.methods.base import Federation, Method, Replies, ServerAsk, Stepped, moved_by, weighted_sum
from fedncv.methods.fedavg import fedavg


@dataclass(frozen=True, kw_only=True)
class Config:
    alpha: float = 5.0
    """Steepness of the curve, and logarithm of the largest ratio of weights; at least 0. 0 is FedAvg."""

    def __post_init__(self) -> None:
        if not self.alpha >= 0:
            raise ValueError(f"alpha must be at least 0, not {self.alpha}")


class Server(NamedTuple):
    x_P: Tensor  # global model
    theta_N: Tensor  # mean angle of every client, in radians, float64
    times_N: Tensor  # rounds it took part in


def angle(delta_P: Tensor, delta_SP: Tensor) -> Tensor:
    """Return the angle between the mean update and each client's; pi/2 if one of them is zero.

    With unit vectors a, b: 2 atan2(|a - b|, |a + b|). The arc cosine would magnify rounding errors near 0 and pi.
    """
    a_P, b_SP = delta_P.double(), delta_SP.double()
    length, length_S = torch.linalg.vector_norm(a_P), torch.linalg.vector_norm(b_SP, dim=1)
    a_P, b_SP = a_P / length, b_SP / length_S[:, None]  # nan if a length is 0: the last line replaces it
    apart_S, together_S = (torch.linalg.vector_norm(v_SP, dim=1) for v_SP in (a_P - b_SP, a_P + b_SP))
    return torch.where(length * length_S > 0, 2 * torch.atan2(apart_S, together_S), torch.pi / 2)


def gompertz(theta: Tensor, alpha: float) -> Tensor:
    return alpha * (1 - torch.exp(-torch.exp(-alpha * (theta - 1))))


def fedadp(config: Config = Config()) -> Method:
    def init(x_P: Tensor, federation: Federation) -> Server:
        zeros_N = torch.zeros(federation.num_clients, dtype=torch.float64, device=x_P.device)
        return Server(x_P, zeros_N, zeros_N)

    def combine(_server: Server, replies: Replies) -> Replies:
        return replies  # angles need single updates

    def step(_ask: ServerAsk, server: Server, replies: Replies) -> Stepped:
        delta_SP, ids_S = replies.ups.delta_P, replies.ids_S
        theta_S = angle(weighted_sum(replies.weight_S, delta_SP), delta_SP)
        times_S = server.times_N[ids_S] + 1
        mean_S = server.theta_N[ids_S] + (theta_S - server.theta_N[ids_S]) / times_S
        votes_S = replies.sizes_S * torch.exp(gompertz(mean_S, config.alpha))
        return moved_by(
            server,
            weighted_sum(votes_S / votes_S.sum(), delta_SP),
            theta_N=server.theta_N.index_copy(0, ids_S, mean_S),
            times_N=server.times_N.index_copy(0, ids_S, times_S),
        )

    return fedavg()._replace(init=init, combine=combine, step=step)
