"""Leave-one-out means, the paper's c_{D∖i} and c_{V∖u}.

    a_{∖u} = (Σ_v n_v a_v − n_u a_u) / (Σ_v n_v − n_u)

Shapes: U = units (samples of a client, or clients), P = parameters (any trailing shape).
"""

import torch
from torch import Tensor

from fedncv.estimators.units import check_sizes, column, ratio


def leave_one_out_mean(a_UP: Tensor, n_U: Tensor | None = None) -> Tensor:
    """Return the n-weighted mean of all other units, for every unit at once.

    n_U: sizes ≥ 0; only their proportions matter. Without it all units have the same weight.
    A unit with all the weight has no others: its leave-one-out mean is 0, which means "no control
    variate" (α = 0), never NaN.

    >>> leave_one_out_mean(torch.tensor([[1.0], [2.0], [6.0]])).flatten()
    tensor([4.0000, 3.5000, 1.5000])

    Chen et al., c below eq. (RLOO) with n_u = 1, and c below eq. (server_cv) with the clients' sizes.
    """
    if n_U is None:
        n_U = torch.ones(len(a_UP), dtype=a_UP.dtype, device=a_UP.device)
    check_sizes(n_U, a_UP)
    n_U1 = column(n_U, a_UP)
    weighted_UP = n_U1 * a_UP
    return ratio(weighted_UP.sum(dim=0) - weighted_UP, n_U1.sum(dim=0) - n_U1)
