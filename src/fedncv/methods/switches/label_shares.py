"""The label shares of all clients, as they told them when they joined."""

from typing import NamedTuple

import torch
from torch import Tensor

from fedncv.methods.base import Federation


class Shares(NamedTuple):
    """N = all clients, C = classes; float64."""

    pi_NC: Tensor  # pi_u; pi_bar for a client that did not tell
    mean_C: Tensor  # pi_bar = sum_v p_v pi_v over those that told


def shares_of(federation: Federation, device: torch.device) -> Shares:
    """Return the shares of all clients; raise ValueError if nobody told any."""
    if federation.label_counts is None:
        raise ValueError("this method needs the label counts of the clients, which nobody asked for here")
    counts_NC = federation.label_counts().double()
    n_N = counts_NC.sum(dim=1)
    if not n_N.sum() > 0:
        raise ValueError("this method needs clients with classes, and there are no label counts; leave it out")
    mean_C = counts_NC.sum(dim=0) / n_N.sum()
    pi_NC = torch.where((n_N > 0)[:, None], counts_NC / n_N.clamp(min=1)[:, None], mean_C)
    return Shares(pi_NC.to(device), mean_C.to(device))
