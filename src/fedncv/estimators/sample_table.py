"""The sample level: a table of each mini-batch's gradient at an earlier point.

    z_B = g_B − α (a_B − ā),     ā = Σ_B w_B a_B

SAGA: a_B is the gradient at the last visit, and a visit replaces it. SVRG: a_B is the gradient at the
round's start, and stays. w are the weights with which batches are visited: |B|/n if batches are drawn
in proportion to their size, 1/(number of batches) if a loop visits each once. Any other ā biases z.

Defazio et al., NeurIPS 2014; Johnson and Zhang, NeurIPS 2013. Shapes: B = batches, P = parameters.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedncv.estimators.control_variate import controlled
from fedncv.estimators.units import check_weights, weighted_total


class Table(NamedTuple):
    """Stored gradients and their w-weighted mean."""

    a_BP: Tensor
    mean_P: Tensor


def new_table(a_BP: Tensor, w_B: Tensor) -> Table:
    """Return a table of the given gradients: zeros for SAGA, gradients at the round's start for SVRG."""
    check_weights(w_B, a_BP)
    return Table(a_BP=a_BP, mean_P=weighted_total(w_B, a_BP))


def svrg_direction(table: Table, batch: Tensor, g_P: Tensor, *, alpha: float | Tensor) -> Tensor:
    """z_B = g_B − α (a_B − ā) for batch number ``batch``; the table does not change."""
    return controlled(g_P, _row(table.a_BP, batch), table.mean_P, alpha=alpha)


def saga_direction(
    table: Table, w_B: Tensor, batch: Tensor, g_P: Tensor, *, alpha: float | Tensor
) -> tuple[Tensor, Table]:
    """z_B = g_B − α (a_B − ā), then a_B ← g_B and ā ← ā + w_B (g_B − a_B)."""
    a_P = _row(table.a_BP, batch)
    z_P = controlled(g_P, a_P, table.mean_P, alpha=alpha)
    mean_P = table.mean_P + _row(w_B, batch) * (g_P - a_P)
    return z_P, Table(a_BP=table.a_BP.index_copy(0, batch.reshape(1), g_P.unsqueeze(0)), mean_P=mean_P)


def _row(x_BP: Tensor, batch: Tensor) -> Tensor:
    """x[batch] in a form that vmap can batch over ``batch``."""
    return torch.index_select(x_BP, 0, batch.reshape(1)).squeeze(0)
