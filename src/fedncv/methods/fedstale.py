"""FedStale: between FedAvg, which forgets absent clients, and FedVARP, which trusts their last update fully.

    client   as FedAvg
    server   h_u, h_bar as in FedVARP
             x <- x - server_lr * ( beta * h_bar + sum_S w_u (Delta_u - beta * h_u) )    w_u = p_u / sum_S p_v
             h_u <- Delta_u for u in S

Rodio and Neglia, 2024, https://arxiv.org/abs/2405.04171, Algorithm 1.
Departures from the paper: w_u is normalised over the clients that answered, where the paper divides by known
probabilities of participation; so beta = 0 is FedAvg to the last bit. The paper tunes beta; here 0.5.
"""

from dataclasses import dataclass

from fedncv.methods.base import Method, Replies, ServerAsk, weighted_sum
from fedncv.methods.fedavg import fedavg
from fedncv.methods.fedvarp import Server, init, remember, remembered


@dataclass(frozen=True, kw_only=True)
class Config:
    beta: float = 0.5
    """Trust in remembered updates, from 0 to 1; 0 is FedAvg, 1 is FedVARP."""
    server_lr: float = 1.0
    """Server step, above 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta must be from 0 to 1, not {self.beta}")
        if not self.server_lr > 0:
            raise ValueError(f"server_lr must be above 0, not {self.server_lr}")


def fedstale(config: Config = Config()) -> Method:
    beta = config.beta

    def aggregate(_ask: ServerAsk, server: Server, replies: Replies) -> Server:
        news_SP = replies.ups.delta_P - beta * remembered(server, replies)
        step_P = beta * server.h_bar_P + weighted_sum(replies.weight_S, news_SP)
        return remember(server, replies)._replace(x_P=server.x_P - config.server_lr * step_P)

    return fedavg()._replace(init=init, aggregate=aggregate)
