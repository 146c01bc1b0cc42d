"""RelaySGD: neighbours on a tree pass on the sum of what they heard, so every model reaches everyone unmixed.

    client   as FedAvg
    server   as FedAvg;  on a tree, with a_v = (x_v, N p_v Delta_v),
             m_{v->u} <- a_v + sum_{k -> v, k != u} m_{k->v}
             x_u      <- (x - Delta) of  (a_u + sum_{v -> u} m_{v->u}) / (number of clients in the sum)

Gossip loses a share of what it carries at every hop; a relayed sum loses nothing and is only late, by a round for every
hop after the first. At rest all clients have the mean of all trained models: it rests where FedAvg with a server and
all clients rests. With a server it is FedAvg, to the last bit.

Vogels et al., NeurIPS 2021, https://arxiv.org/abs/2110.04175, Algorithm 1.
Departures from the paper: none. While sums are not complete, in the first rounds, they are divided by the number of
models in them. All clients take part in every round. Running statistics are mixed with those of the neighbours.
"""

from fedncv.methods.base import Method
from fedncv.methods.fedavg import fedavg


def relaysgd() -> Method:
    return fedavg()._replace(graph="tree")
