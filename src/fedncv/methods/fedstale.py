"""FedStale: between FedAvg, which ignores absent clients, and FedVARP, which uses their full last update.

    client   as FedAvg
    server   h_u, h_bar as in FedVARP
             x <- x - server_lr * ( beta * h_bar + sum_S w_u (Delta_u - beta * h_u) )    w_u = p_u / sum_S p_v
             h_u <- Delta_u for u in S

The chain fedavg+memory:beta=0.5,unseen=zero. Rodio and Neglia, 2024, https://arxiv.org/abs/2405.04171, Algorithm 1.
Departures from the paper: w_u is normalised over the clients that answered, so beta = 0 is FedAvg to the last bit;
the paper divides by known probabilities of participation. The paper tunes beta; here 0.5.
"""

from dataclasses import dataclass

from fedncv.methods.base import Method
from fedncv.methods.fedavg import Config as FedAvgConfig
from fedncv.methods.fedavg import fedavg
from fedncv.methods.switches import memory


@dataclass(frozen=True, kw_only=True)
class Config:
    beta: float = 0.5
    """Weight of stored updates, from 0 to 1; 0 is FedAvg, 1 is FedVARP."""
    server_lr: float = 1.0
    """Server step, above 0."""


def fedstale(config: Config = Config()) -> Method:
    remembers = memory.Config(beta=config.beta, unseen="zero")
    return memory.with_memory(fedavg(FedAvgConfig(server_lr=config.server_lr)), remembers)
