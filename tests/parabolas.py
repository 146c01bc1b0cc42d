"""Six clients with parabolas f_u = a_u/2 (x - b_u)^2 on a graph, and what NumPy needs to say what they do."""

import numpy as np
from federations import quadratics

from fedncv.topology.network import find_topology

A, B = (1.0, 4.0, 2.0, 3.0, 0.5, 2.5), (0.0, 1.0, -1.0, 2.0, 4.0, -3.0)
SAMPLES = (1, 3, 2, 2, 1, 3)
WEIGHT = np.array(SAMPLES) / 2  # N p_u
OPTIMUM = float(np.dot(A, B) / sum(A))


def on(topology, method="fedavg", *, lr=0.1, x=0.5, **config):
    """The six clients on this graph."""
    return quadratics(method, a=A, b=B, x=x, lr=lr, topology=topology, **{"steps": 1} | config)


def W_of(text, num_clients, round=0, seed=0):
    return find_topology(text, num_clients, seed).mixing(round).W_NN.toarray()


def models(state):
    """Every client's own model, as NumPy's numbers."""
    server = state.server.server
    while not hasattr(server, "x_P"):
        server = server.server
    return server.x_P[:, 0].numpy()
