"""Convolutions for gradients of single samples on a GPU: the weight's gradient as one product a sample.

Under ``torch.vmap`` the gradient of a convolution's weight is a convolution with a group for every sample, which
cuDNN is slow at. The same number is a product of matrices, of what comes back and the windows of what went in:

    dw[o, c, i, j] = sum_{h, w} g[o, h, w] x[c, s h + d i, s w + d j]

Forward, and back to the input, it is torch's own convolution. On a CPU it is the slower way (bench/probes.py --ways).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from fedncv.flat import Model


class Convolution(torch.autograd.Function):
    """x, w, stride, padding, dilation -> conv2d(x, w)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
        return F.conv2d(x, w, None, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, *ctx.window = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        back: Callable[..., Tensor] = conv2d_input
        dx = back(x.shape, w, g, *ctx.window) if ctx.needs_input_grad[0] else None
        dw = torch.einsum("bohw,bchwij->ocij", g, windows(x, w.shape[2:], *ctx.window))
        return dx, dw, None, None, None


def windows(x: Tensor, size: torch.Size, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """(B, C, H, W, I, J): what the filter sees at every place; a view."""
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    for axis in (0, 1):
        x = x.unfold(2 + axis, (size[axis] - 1) * dilation[axis] + 1, stride[axis])[..., :: dilation[axis]]
    return x


class SampleConv2d(nn.Module):
    """nn.Conv2d by the operation above."""

    def __init__(self, plain: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        self.window = (plain.stride, plain.padding, plain.dilation)

    def forward(self, x: Tensor) -> Tensor:
        apply: Callable[..., Tensor] = Convolution.apply
        z = apply(x, self.weight, *self.window)
        return z if self.bias is None else z + self.bias[:, None, None]


def by_products(model: Model) -> Model:
    """The model with such convolutions where they fit; everything else, names and numbers, stays."""

    def change(module: nn.Module) -> None:
        for name, part in list(module.named_modules()):
            if type(part) is nn.Conv2d and name and _fits(part):
                parent, _, child = name.rpartition(".")
                setattr(module.get_submodule(parent), child, SampleConv2d(part))

    return model.changed(change)


def _fits(conv: nn.Conv2d) -> bool:
    return conv.groups == 1 and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
