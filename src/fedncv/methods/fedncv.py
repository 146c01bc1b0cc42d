"""FedNCV, the centred reading: six parts, each a switch. One is the control variate (drift).

The control variate (docs/theory.md): for weights w of the draw that is averaged over and a_u known before it,
d_u = a_u - a_bar = (1 - w_u)(a_u - a_{without u}), the paper's leave-one-out difference scaled to have mean zero. Here
a_u = c_u and e_u = alpha * d_u.

    client   y <- y - lr * |B|/b * (g(y; B) - e_u)            over its batches, from y = x             even, drift
             g is the gradient of the loss of  logits + tau * log pi_u                                 prior
             Delta_u = x - y
    server   g_hat = sum_S p_u Delta_u                        p_u = n_u / sum_S n_v                    FedAvg
             v <- beta * v + g_hat;    x <- x - v                                                      momentum
             a <- a + (x - a) / (1 + share * t)               for inference, after t rounds            average
             c_u <- Delta_u / (lr * K_u) + e_u                mean raw gradient along u's path         drift
             c_bar = sum_v n_v c_v / sum_v n_v                over the clients seen
             e_u = alpha * (c_u - c_bar)                      0 for a client never seen
    in use   client u predicts with  a + (y - a) / (1 + rate * t),  y trained from a                   blend
             and adds  tau * log pi_u  to its logits                                                   prior

K_u counts full batches. pi_u are the smoothed label frequencies of client u and never leave it. Running statistics are
averaged and blended like the model. Defaults: alpha 1, tau 1, beta 0.5, share 0.05, rate 0.03.

    fedncv                       the chain  fedavg+even+drift+prior+momentum+average+blend
    fedncv:momentum=0.9          the same with another momentum;   fedncv:drift.alpha=learned,prior.epsilon=0.1
    fedncv:prior=off             the same without a part; with all of them off it is FedAvg to the last bit
    fedncv+memory:beta=learned   the same with one more switch: server memory h_u; also +samples, +ht

The ablation (docs/results) measures the effect of each part. Special cases: fedavg+drift with equal sizes is SCAFFOLD
(option II) once all clients have been seen; fedavg+memory:unseen=zero is FedVARP (beta = 1) or FedStale (beta < 1).

After Chen et al., "Taming Gradient Variance in Federated Learning with Networked Control Variates"; the literal reading
is fedncv_paper.py. fedncv_sums.py has the same chain for a server that must not see single updates.
"""

from dataclasses import dataclass

from fedncv.methods.base import Method
from fedncv.methods.fedavg import fedavg
from fedncv.methods.switches import chain
from fedncv.methods.switches.blend import Config as Blend
from fedncv.methods.switches.drift import Config as Drift
from fedncv.methods.switches.even_samples import Config as Even
from fedncv.methods.switches.label_prior import Config as Prior
from fedncv.methods.switches.server_average import Config as Average
from fedncv.methods.switches.server_momentum import Config as Momentum


@dataclass(frozen=True, kw_only=True)
class Config:
    """One field per part; None leaves the part out. Parts are applied in the order of ``SWITCHES``."""

    even: Even | None = Even()
    """Give every sample of a client the same weight: shorten the step of a smaller last batch."""
    drift: Drift | None = Drift()
    """Client drift correction e_u; a number sets alpha."""
    prior: Prior | None = Prior()
    """The client's label prior on its logits; a number sets tau."""
    momentum: Momentum | None = Momentum()
    """Server momentum; a number sets beta."""
    average: Average | None = Average()
    """Average of the latest models, for inference; a number sets share, the fraction of rounds that it covers."""
    blend: Blend | None = Blend()
    """Predict between the received and the trained model; a number sets rate."""


def fedncv(config: Config = Config()) -> Method:
    return chain(fedavg(), **vars(config))
