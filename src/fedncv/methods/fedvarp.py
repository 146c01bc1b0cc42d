"""FedVARP: the server stores every client's last update and uses it while the client is absent.

    client   as FedAvg
    server   h_u = the last Delta_u it had from u, 0 until the first;   h_bar = sum_v p_v h_v over all clients
             x <- x - server_lr * ( h_bar + sum_S w_u (Delta_u - h_u) )      w_u = p_u / sum_S p_v
             h_u <- Delta_u for u in S

The chain fedavg+memory:unseen=zero. Jhunjhunwala et al., UAI 2022, https://arxiv.org/abs/2207.14130.
Departures from the paper: clients are weighted by samples; equal sizes give the paper's 1/|S| and 1/N. The
weights w_u are normalised over the clients that answered, as in FedAvg.
At the fixed point h_u = Delta_u: no sampling noise remains, and the model is the one of FedAvg with all clients.
"""

from fedncv.methods.base import Method
from fedncv.methods.fedavg import Config, fedavg
from fedncv.methods.switches import memory


def fedvarp(config: Config = Config()) -> Method:
    return memory.with_memory(fedavg(config), memory.Config(beta=1.0, unseen="zero"))
