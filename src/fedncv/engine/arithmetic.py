"""The arithmetic of matrix products and convolutions: the setting ``precision``.

    torch      as PyTorch chooses: on a GPU TF32 in cuDNN (convolutions, recurrent layers), float32 in matrix products
    float32    float32 everywhere
    tf32       TF32 everywhere: 10 bits of mantissa instead of 23, float32's range; GPUs since Ampere
    bf16       bfloat16 where torch.autocast uses it: 7 bits of mantissa

Parameters, running statistics, losses, gradients and all of a method's algebra have the run's dtype in each of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedncv.config import RunConfig

EXACT = ("torch", "float32")  # precisions in which our own kernels may replace torch's layers


def check_precision(config: RunConfig, device: torch.device) -> None:
    """Raise ValueError if the device cannot compute in the run's precision."""
    name = config.precision
    if name in ("tf32", "bf16") and config.dtype == "float64":
        raise ValueError(f"precision={name} is lower than dtype=float64; use precision=torch, or dtype=float32")
    if name == "tf32" and not has_tf32(device):
        other = "" if device.type == "cpu" else " before Ampere"
        raise ValueError(f"precision=tf32 needs a GPU since Ampere; {device}{other} has none; use precision=float32")
    if name == "bf16" and not has_bf16(device):
        raise ValueError(
            f"precision=bf16: {device} has no bfloat16 arithmetic here; use precision=float32, or a GPU since Ampere"
        )


def has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8


def has_bf16(device: torch.device) -> bool:
    """Return whether the device computes in bfloat16 itself; PyTorch would emulate it, slowly."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def low_precision(config: RunConfig) -> torch.dtype | None:
    """Return the type in which the model's layers multiply, or None if it is the run's dtype."""
    return torch.bfloat16 if config.precision == "bf16" else None


@contextmanager
def arithmetic(config: RunConfig) -> Iterator[None]:
    """Set the precision, and kernels of cuDNN that give the same bits every time; put both back afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic
    try:
        cudnn.deterministic = True
        if config.precision in ("float32", "tf32"):
            matmul.allow_tf32 = cudnn.allow_tf32 = config.precision == "tf32"
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = before
