"""Weighted collections of units: checks of shapes and values, weights shaped to multiply, safe ratios.

Shapes: U = units (samples, batches or clients), P = parameters (any trailing shape).
"""

import torch
from torch import Tensor


def readable(x: Tensor) -> bool:
    """Return True if reading a value is cheap.

    Under ``torch.func.vmap`` a tensor has no single value, and reading one from a GPU would wait for the
    stream. So values are checked only for plain tensors in main memory.
    """
    return x.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def check_same_shape(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")


def check_sizes(n_U: Tensor, a_UP: Tensor) -> None:
    """Raise ValueError unless there is one size per unit and none is negative."""
    if n_U.ndim != 1 or len(n_U) != len(a_UP):
        raise ValueError(f"{len(a_UP)} units need sizes of shape ({len(a_UP)},), got {tuple(n_U.shape)}")
    if readable(n_U) and bool((n_U < 0).any()):
        raise ValueError(f"sizes must not be negative, got {n_U.min().item()}")


def check_weights(w_U: Tensor, a_UP: Tensor) -> None:
    """Raise ValueError unless the weights sum to one, up to the rounding of the sum."""
    check_sizes(w_U, a_UP)
    if readable(w_U):
        total = w_U.sum()
        if abs(total - 1.0) > len(w_U) * torch.finfo(w_U.dtype).eps:
            raise ValueError(f"weights must sum to one, got {total}")


def column(w_U: Tensor, a_UP: Tensor) -> Tensor:
    """Return w_U in a's dtype, with enough trailing axes of length one to multiply a_UP."""
    return w_U.to(a_UP.dtype).reshape(-1, *(1 for _ in a_UP.shape[1:]))


def weighted_total(w_U: Tensor, a_UP: Tensor) -> Tensor:
    """Σ_u w_u a_u in a's dtype, as a row times a matrix.

    Every estimator uses this reduction, the same as FedAvg's, so that equal estimates have equal bits.
    """
    return (w_U.to(a_UP.dtype) @ a_UP.reshape(len(a_UP), -1)).reshape(a_UP.shape[1:])


def ratio(x: Tensor, y: Tensor) -> Tensor:
    """Return x / y where y > 0, and 0 elsewhere.

    The inner ``where`` keeps the unused branch finite, so that its derivative is finite too.
    """
    positive = y > 0
    return torch.where(positive, x / torch.where(positive, y, 1.0), 0.0)
