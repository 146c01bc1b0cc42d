"""Convolution, BatchNorm, ReLU and 2x2 maximum as one compiled operation, for one client on one CPU core.

oneDNN's kernels are made for many channels; a small model's three and six leave most of each vector empty. Here a
vector holds one pixel of many samples (cpu_block.c), which is as good for three channels as for sixty.
"""

import ctypes
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedncv.engine.blocks import blocks, replace_block
from fedncv.engine.cpu_library import Shape, library
from fedncv.engine.problem import Problem
from fedncv.flat import Model
from fedncv.keys import key_for

VECTOR_BYTES = 64  # of the widest vector; memory for it is enough for narrower ones (cpu_block.c)
TRIAL = 5  # samples on which both models are compared before the compiled one is used


class Block(torch.autograd.Function):
    """x, w, bias, gamma, beta, running_mean, running_var, eps, momentum -> out; updates the running statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, gamma: Tensor, beta: Tensor, running_mean: Tensor,
        running_var: Tensor, eps: float, momentum: float,
    ) -> Tensor:  # fmt: skip
        x, w = x.contiguous(), w.contiguous()
        s = ctx.shape = Shape(*x.shape, len(w), *w.shape[2:])
        height, width, samples = s.height - s.rows + 1, s.width - s.columns + 1, padded(s.samples, x.dtype)
        sizes = (s.inputs * s.height * s.width * samples, s.outputs * height * width * samples, w.numel())
        ctx.kept, (packed, z, filters, mean, rstd) = _room(x, *sizes, s.outputs, s.outputs)
        ctx.kept_at = packed, z, mean, rstd
        out = x.new_empty(s.samples, s.outputs, height // 2, width // 2)
        _library(x.dtype).forward(
            s, *_pointers(x, w, bias, gamma, beta, running_mean, running_var), eps, momentum,
            packed, z, mean, rstd, filters, out.data_ptr(),
        )  # fmt: skip
        ctx.save_for_backward(w, gamma, beta)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        g = g.contiguous()
        w, gamma, beta = ctx.saved_tensors
        s, one, samples = ctx.shape, lanes(g.dtype), padded(ctx.shape.samples, g.dtype)
        height, row = s.height - s.rows + 1, s.width + s.columns - 1  # with a margin on both sides
        pixels, pooled = s.inputs * s.height * s.width, s.outputs * (height // 2) * ((s.width - s.columns + 1) // 2)
        dx = g.new_empty(s.samples, s.inputs, s.height, s.width) if ctx.needs_input_grad[0] else None
        sizes = (pooled * samples, s.outputs * height * row * samples, w.numel() * one, pixels * one, w.numel())
        _held, scratch = _room(g, *sizes)
        dw, dgamma, dbeta = torch.empty_like(w), torch.empty_like(gamma), torch.empty_like(beta)
        _library(g.dtype).backward(
            s, *_pointers(g, w, gamma, beta), *ctx.kept_at, *scratch, *_pointers(dx, dw, dgamma, dbeta)
        )
        dbias = g.new_zeros(s.outputs) if ctx.needs_input_grad[2] else None
        return dx, dw, dbias, dgamma, dbeta, None, None, None, None


def lanes(dtype: torch.dtype) -> int:
    """Return the number of samples in the widest vector."""
    return VECTOR_BYTES // dtype.itemsize


def padded(samples: int, dtype: torch.dtype) -> int:
    """Return the number of samples, rounded up to the widest vectors."""
    return -(-samples // lanes(dtype)) * lanes(dtype)


def _library(dtype: torch.dtype) -> ctypes.CDLL:
    found = library(dtype)
    assert found is not None, "only models accepted by `fused` come here"
    return found


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    """Return the addresses; the caller must keep the tensors alive."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _room(like: Tensor, *sizes: int) -> tuple[Tensor, list[int]]:
    """Return memory, to be held as long as it is used, and the addresses in it of so many numbers each."""
    starts = [0, *accumulate(padded(size, like.dtype) for size in sizes)]  # of whole vectors
    room = like.new_empty(starts[-1])
    return room, [room.data_ptr() + start * like.dtype.itemsize for start in starts[:-1]]


class FusedConv(nn.Module):
    """The convolution, which also does the work of the next three layers; they keep their names."""

    def __init__(self, plain: nn.Conv2d, norm: "PassedNorm") -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        self._norms = (norm,)  # in a tuple: not a child of this one

    def forward(self, x: Tensor) -> Tensor:
        (norm,) = self._norms
        vectors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        if not (norm.training and _fits(x, self.weight, self.bias, *vectors)):
            return F.max_pool2d(F.relu(norm.normalise(F.conv2d(x, self.weight, self.bias))), 2)
        apply: Callable[..., Tensor] = Block.apply
        return apply(x, self.weight, self.bias, *vectors, norm.eps, norm.momentum)


class PassedNorm(nn.Module):
    """Keeps the parameters and statistics; its arithmetic is done in the convolution before it."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, plain: nn.BatchNorm2d) -> None:
        super().__init__()
        self.eps, self.momentum = plain.eps, plain.momentum
        self.weight, self.bias = plain.weight, plain.bias
        self.register_buffer("running_mean", plain.running_mean)
        self.register_buffer("running_var", plain.running_var)

    def normalise(self, x: Tensor) -> Tensor:
        assert self.momentum is not None
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )

    def forward(self, x: Tensor) -> Tensor:
        return x


def _fits(x: Tensor, w: Tensor, *vectors: Tensor | None) -> bool:
    """Return whether the kernel, which checks nothing, accepts these; otherwise torch's layers report the error."""
    return (
        x.dim() == 4
        and x.shape[1] == w.shape[1]
        and x.shape[2] > w.shape[2]
        and x.shape[3] > w.shape[3]
        and x.dtype == w.dtype
        and library(x.dtype) is not None
        and not torch._C._are_functorch_transforms_active()
        and all(v is None or (v.shape == w.shape[:1] and v.dtype == x.dtype and v.is_contiguous()) for v in vectors)
    )


class CannotCompileError(ValueError):
    """The model has no layers that could be compiled, or there is no compiler for them."""


def fused(problem: Problem) -> Problem:
    """Return the problem with compiled layers; raise CannotCompileError if its model cannot use them."""
    model, fused_layers = problem.model, 0

    def change(module: nn.Module) -> None:
        nonlocal fused_layers
        fused_layers = fuse(module)

    if model.start_P.device.type != "cpu":
        raise CannotCompileError("compiled layers are for the CPU")
    other = model.changed(change)
    if not fused_layers:
        raise CannotCompileError("the model has no convolution with BatchNorm, ReLU and a 2x2 maximum after it")
    if library(problem.dtype) is None:
        raise CannotCompileError(f"there is no compiled library for {problem.config.dtype}")
    index = torch.arange(min(TRIAL, len(problem.dataset.x)))
    if not agree(model, other, problem.dataset.inputs(index, problem.dtype)):
        raise CannotCompileError("the model uses its layers in another way, and compiled ones give other numbers")
    return problem._replace(model=other, plain=model)


def agree(model: Model, other: Model, inputs: Tensor) -> bool:
    """Return whether both give the same logits, features, statistics and gradient; a module may use layers oddly."""
    results = [one_pass(each, inputs) for each in (model, other)]
    close = [a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(*results, strict=True)]
    return all(close)


def one_pass(model: Model, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits, features, running statistics and a gradient of a training pass at the start."""
    leaf_P = model.start_P.detach().requires_grad_()
    with torch.enable_grad():
        output, b_R = model.forward(leaf_P, model.start_R, inputs, mode="train", key=key_for(0, "trial"))
        (g_P,) = torch.autograd.grad(output.logits_BC.sin().sum(), leaf_P)
    return output.logits_BC, output.features_BF, b_R, g_P


def fuse(module: nn.Module) -> int:
    """Fuse all possible blocks; return their number."""
    found = list(blocks(module))
    for block in found:
        _, _, conv, norm = block
        passed = PassedNorm(norm)
        replace_block(block, FusedConv(conv, passed), passed)
    return len(found)
