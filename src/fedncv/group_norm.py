"""GroupNorm for channels-last memory on a GPU, where torch's own first copies to channels first and back.

    z = (x - mean) rstd,   rstd = 1 / sqrt(var + eps),   y = gamma z + beta
    dx = rstd (gamma g - m(gamma g) - z m(gamma g z)),   dgamma = sum g z,   dbeta = sum g

mean, var and m(...) are over the positions and channels of one group in one sample; sums are over samples and
positions. The kernels compute in float32, or in float64 for such inputs, and y has the precision of x. So with autocast
y is bfloat16 after a convolution, as BatchNorm's is; torch's own GroupNorm would be float32.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Normalised(torch.autograd.Function):
    """x (N, C, H, W) with channels last in memory, gamma, beta, groups, eps -> y; not for torch.vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, groups: int, eps: float) -> Tensor:
        y: Tensor
        y, stats = _kernels().forward(x, gamma, beta, groups, eps)
        ctx.save_for_backward(x, gamma, stats)
        ctx.dtypes = [None if each is None else each.dtype for each in (gamma, beta)]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, gamma, stats = ctx.saved_tensors
        dx, *others = _kernels().backward(g, x, gamma, stats)
        parameters = [None if t is None else each.to(t) for each, t in zip(others, ctx.dtypes, strict=True)]
        return dx, *parameters, None, None


class GroupNorm(nn.GroupNorm):
    """torch's own layer, by the kernels where they fit."""

    def forward(self, x: Tensor) -> Tensor:
        if not fits(self, x):
            return super().forward(x)
        y: Tensor = Normalised.apply(x, self.weight, self.bias, self.num_groups, self.eps)  # type: ignore[no-untyped-call]
        return y


def fits(layer: nn.GroupNorm, x: Tensor) -> bool:
    """Return whether the kernels can compute this; what is wrong in a call is left to torch's own errors."""
    return (
        x.is_cuda
        and x.dim() == 4
        and x.is_contiguous(memory_format=torch.channels_last)
        and x.shape[1] == layer.num_channels
        and x.numel() > len(x) * layer.num_groups  # more than one value in a group, and samples at all
        and x.dtype in FLOATS
        and all(p is None or (p.is_cuda and p.dtype in (x.dtype, torch.float32)) for p in (layer.weight, layer.bias))
        and layer.num_channels // layer.num_groups <= _kernels().MOST_CHANNELS
        and not torch._C._are_functorch_transforms_active()
    )


def usable(device: torch.device) -> bool:
    """Return whether there are kernels for tensors on this device."""
    try:
        return device.type == "cuda" and bool(_kernels())
    except ImportError:  # no triton
        return False


def use_kernels(module: nn.Module) -> None:
    """Let torch's own GroupNorms in the module use the kernels; they stay the same objects with the same parameters."""
    for part in module.modules():
        if type(part) is nn.GroupNorm:  # no subclass, whose forward may be another one
            part.__class__ = GroupNorm


@functools.cache
def _kernels() -> ModuleType:
    from fedncv import group_norm_kernel

    return group_norm_kernel
