"""MIFA: every round steps along the last updates of all clients, heard of or not.

    client   as FedAvg
    server   h_u <- Delta_u for u in S                     h_u = 0 until the first
             x <- x - server_lr * sum_v p_v h_v            over all clients

Gu et al., NeurIPS 2021, https://arxiv.org/abs/2106.04159, Algorithm 1.
Departures from the paper: clients are weighted by samples, where the paper's are of one size. The paper lets
every client answer in the first round; here a client never heard of counts with an update of zero, so the
first rounds step by the share of the data that was heard of. Updates are remembered with the learning rate
they were made with.
"""

from dataclasses import dataclass

from fedncv.methods.base import Method, Replies, ServerAsk
from fedncv.methods.fedavg import fedavg
from fedncv.methods.fedvarp import Server, init, remember


@dataclass(frozen=True, kw_only=True)
class Config:
    server_lr: float = 1.0
    """Server step, above 0."""

    def __post_init__(self) -> None:
        if not self.server_lr > 0:
            raise ValueError(f"server_lr must be above 0, not {self.server_lr}")


def mifa(config: Config = Config()) -> Method:
    def aggregate(_ask: ServerAsk, server: Server, replies: Replies) -> Server:
        server = remember(server, replies)
        return server._replace(x_P=server.x_P - config.server_lr * server.h_bar_P)

    return fedavg()._replace(init=init, aggregate=aggregate)
