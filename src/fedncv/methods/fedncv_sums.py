"""FedNCV for a server that must not see single updates: clients keep their memory, the server needs only sums.

    client   e_u = alpha * (c_u - c_bar), and 0 in its first round
             y <- y - lr * |B|/b * (g(y; B) - e_u)            over its batches, from y = x
             Delta_u = x - y;   c_u' = Delta_u / (lr * K_u) + e_u
             sends  Delta_u,  c_u' - c_u,  whether it is new;      keeps c_u <- c_u'
    server   g_hat = sum_S n_u Delta_u / sum_S n_u
             c_bar from  sum_S n_u (c_u' - c_u)  and the new clients' samples
             momentum, average, prior and blend as in fedncv.py

The chain of fedncv.py with drift:memory=clients. It equals ``fedncv`` to rounding and sends one more array up. The
server uses only sums of the replies, so secure aggregation can hide the single replies. Limits: alpha is one number for
all clients, and a client's number of samples must not change during training.

After Chen et al., "Taming Gradient Variance in Federated Learning with Networked Control Variates". Derivation:
docs/theory.md, section 6.
"""

from dataclasses import dataclass

from fedncv.methods import fedncv
from fedncv.methods.base import Method
from fedncv.methods.switches.drift import Config as Drift


@dataclass(frozen=True, kw_only=True)
class Config(fedncv.Config):
    """The parts of ``fedncv``, with the memory of the drift correction at the clients."""

    drift: Drift | None = Drift(memory="clients")
    """Client drift correction e_u with the memory at the clients; a number sets alpha."""


def fedncv_sums(config: Config = Config()) -> Method:
    return fedncv.fedncv(config)
