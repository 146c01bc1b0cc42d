"""Convolution, BatchNorm, ReLU and 2x2 maximum as one operation, for the models of many clients at once.

On a GPU these four layers are limited by memory traffic of activations; as one operation they store only one
activation. The operation is defined for K stacked models; ``torch.vmap`` adds its axis to K, at any depth.

    z = conv(x, w) + bias;   z^ = (z - mean) / sqrt(var + eps), both over the samples of weight 1
    out = maxpool(relu(gamma z^ + beta))
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedncv.engine.blocks import blocks, pairs, replace_block
from fedncv.engine.masked import MaskedBatchNorm
from fedncv.tasks import TASKS, Task

try:
    from fedncv.engine import fused_kernels
except ImportError:  # no triton: the reference below runs instead
    fused_kernels = None  # type: ignore[assignment]

HAVE_KERNELS = fused_kernels is not None
MOST_CHANNELS = 64  # of a filter that fits in a block of registers


class Forward(torch.autograd.Function):
    """x, w, bias, gamma, beta, run_mean, run_var, weight, eps, momentum -> out, z, mean, rstd, new_mean, new_var."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return (fused_kernels.forward if _on_gpu(arguments[0]) else forward)(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, _, gamma, beta, _, _, weight, _, _ = inputs
        _, z, mean, rstd, new_mean, new_var = output
        ctx.mark_non_differentiable(z, mean, rstd, new_mean, new_var)
        ctx.set_materialize_grads(False)  # else zeros of the size of z are written for outputs without a gradient
        ctx.save_for_backward(x, w, gamma, beta, weight, z, mean, rstd)

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> Any:
        apply: Callable[..., tuple[Tensor, ...]] = Backward.apply
        dx, *others = apply(g, *ctx.saved_tensors, bool(ctx.needs_input_grad[0]))
        return (dx if ctx.needs_input_grad[0] else None), *others, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _fold(Forward, info.batch_size, in_dims, arguments)


class Backward(torch.autograd.Function):
    """(g, x, w, gamma, beta, weight, z, mean, rstd; wants_x) -> dx, dw, dbias, dgamma, dbeta."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return (fused_kernels.backward if _on_gpu(arguments[0]) else backward)(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("the fused layers have no second derivatives")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _fold(Backward, info.batch_size, in_dims, arguments)


class Affine(torch.autograd.Function):
    """x w' + bias, after ReLU if wanted: (K, B, N), (K, M, N), (K, M), relu -> (K, B, M). Only on a GPU."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor, relu: bool) -> Tensor:
        return fused_kernels.linear(x, w, bias, relu)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, _, ctx.relu = inputs
        ctx.save_for_backward(x, w, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        apply: Callable[..., tuple[Tensor, ...]] = AffineBackward.apply
        dx, *others = apply(g, *ctx.saved_tensors, ctx.relu, bool(ctx.needs_input_grad[0]))
        return (dx if ctx.needs_input_grad[0] else None), *others, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _fold(Affine, info.batch_size, in_dims, arguments)


class AffineBackward(torch.autograd.Function):
    """(g, x, w, out; relu, wants_x) -> dx, dw, dbias."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return fused_kernels.linear_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("the fused layers have no second derivatives")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _fold(AffineBackward, info.batch_size, in_dims, arguments)


class Entropy(torch.autograd.Function):
    """Cross entropy of every row: (K, B, C) logits, (K, B) classes -> (K, B)."""

    @staticmethod
    def forward(logits: Tensor, target: Tensor) -> Tensor:
        if _on_gpu(logits):
            return fused_kernels.entropy(logits, target)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        apply: Callable[..., Tensor] = EntropyBackward.apply
        return apply(g, *ctx.saved_tensors), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _fold(Entropy, info.batch_size, in_dims, arguments)


class EntropyBackward(torch.autograd.Function):
    """(softmax(logits) - one at the class) g."""

    @staticmethod
    def forward(g: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        if _on_gpu(logits):
            return fused_kernels.entropy_backward(g, logits, target)
        one_hot = F.one_hot(target, logits.shape[2]).to(logits.dtype)
        return (torch.softmax(logits, 2) - one_hot) * g.unsqueeze(2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("the fused layers have no second derivatives")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _fold(EntropyBackward, info.batch_size, in_dims, arguments)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of the task "classification" in two kernels instead of thirty; other shapes use torch's."""
    if outputs.dim() != 2 or targets.dim() != 1:
        return TASKS["classification"].loss(outputs, targets)
    apply: Callable[..., Tensor] = Entropy.apply
    return apply(outputs.unsqueeze(0), targets.unsqueeze(0)).squeeze(0)


def fused_task(task: Task) -> Task:
    return task._replace(loss=cross_entropy) if task is TASKS["classification"] else task


def batch(tables: tuple[Tensor, ...], step: Tensor, x: Tensor, y: Tensor, k: int) -> tuple[Tensor, ...]:
    """Return inputs, targets, weights, numbers and keys of a step's first k clients in one launch. Only on a GPU."""
    return fused_kernels.batch(tables, step, x, y, k)


def _fold(operation: Any, size: int, in_dims: Any, arguments: Any) -> Any:
    """Merge the mapped axis into the axis of models, and split it again in the results."""

    def folded(argument: Any, dim: int | None) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        moved = argument.expand(size, *argument.shape) if dim is None else argument.movedim(dim, 0)
        return moved.flatten(0, 1)

    results = operation.apply(*[folded(a, dim) for a, dim in zip(arguments, in_dims, strict=True)])
    if isinstance(results, Tensor):
        return results.view(size, -1, *results.shape[1:]), 0
    unfolded = tuple(r.unflatten(0, (size, -1)) if r.numel() else r.new_empty(size, 0) for r in results)
    return unfolded, (0,) * len(unfolded)


def _on_gpu(x: Tensor) -> bool:
    return HAVE_KERNELS and x.is_cuda and x.dtype == torch.float32


# ---- the same in torch's own operations: the reference, used without a GPU ------------------------------


def _convolution(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    K, B, C = x.shape[:3]
    flat = x.movedim(0, 1).reshape(B, K * C, *x.shape[3:])
    z = F.conv2d(flat, w.flatten(0, 1), None if bias is None else bias.flatten(), groups=K)
    return z.view(B, K, -1, *z.shape[2:]).movedim(1, 0)


def _apart(flat: Tensor, like: Tensor) -> Tensor:
    """Split the joint axis of models and samples into two again."""
    return flat.view(*like.shape[:2], *flat.shape[1:])


def _wide(a_KO: Tensor) -> Tensor:
    return a_KO[:, None, :, None, None]


def forward(
    x: Tensor, w: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, run_mean: Tensor, run_var: Tensor,
    weight: Tensor, eps: float, momentum: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    z = _convolution(x, w, bias)
    w_B = weight[:, :, None, None, None]
    n = (weight.sum(1) * z[0, 0, 0].numel())[:, None]
    mean = (w_B * z).sum((1, 3, 4)) / n
    var = (w_B * (z - _wide(mean)).square()).sum((1, 3, 4)) / n
    rstd = torch.rsqrt(var + eps)
    values = (z - _wide(mean)) * _wide(rstd * gamma) + _wide(beta)
    out = _apart(F.max_pool2d(F.relu(values).flatten(0, 1), 2), z)
    new_mean = (1 - momentum) * run_mean + momentum * mean
    new_var = (1 - momentum) * run_var + momentum * (n / (n - 1)) * var
    return out, z.contiguous(), mean, rstd, new_mean, new_var


def backward(
    g: Tensor, x: Tensor, w: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, z: Tensor, mean: Tensor,
    rstd: Tensor, wants_x: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    standard = (z - _wide(mean)) * _wide(rstd)
    values = F.relu(standard * _wide(gamma) + _wide(beta)).flatten(0, 1)
    _, where = F.max_pool2d(values, 2, return_indices=True)
    g_values = F.max_unpool2d(g.flatten(0, 1), where, (2, 2), output_size=values.shape[-2:]) * (values > 0)
    g_values = _apart(g_values, z)
    dbeta, dgamma = g_values.sum((1, 3, 4)), (g_values * standard).sum((1, 3, 4))
    share = (weight / (weight.sum(1, keepdim=True) * z[0, 0, 0].numel()))[:, :, None, None, None]
    dz = _wide(gamma * rstd) * (g_values - share * (_wide(dbeta) + standard * _wide(dgamma)))
    columns = _apart(F.unfold(x.flatten(0, 1), w.shape[-2:]), z)  # K B T P
    dw = torch.einsum("kbop,kbtp->kot", dz.flatten(3), columns).view(w.shape)
    dx = x.new_empty(0)
    if wants_x:
        spread = torch.einsum("kot,kbop->kbtp", w.flatten(2), dz.flatten(3))
        dx = _apart(F.fold(spread.flatten(0, 1), x.shape[-2:], w.shape[-2:]), z)
    return dx, dw, dz.sum((1, 3, 4)), dgamma, dbeta


# ---- layers --------------------------------------------------------------------------------------------


class FusedConv(nn.Module):
    """The convolution, which also does the work of the next three layers; they keep their names."""

    def __init__(self, plain: nn.Conv2d, norm: "FusedNorm") -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        self._norms = (norm,)  # in a tuple: not a child of this one

    def forward(self, x: Tensor) -> Tensor:
        (norm,) = self._norms
        bias = self.bias
        odd = (x.shape[-2] - self.weight.shape[-2] + 1) % 2 or (x.shape[-1] - self.weight.shape[-1] + 1) % 2
        if odd or not norm.training:
            return F.max_pool2d(F.relu(norm.normalise(F.conv2d(x, self.weight, bias))), 2)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        weight_B = x.new_ones(len(x)) if norm.weight_B is None else norm.weight_B
        bias = x.new_zeros(len(self.weight)) if bias is None else bias
        stacked = (x, self.weight, bias, norm.weight, norm.bias, norm.running_mean, norm.running_var, weight_B)
        apply: Callable[..., tuple[Tensor, ...]] = Forward.apply
        out, _, _, _, new_mean, new_var = apply(*(a.unsqueeze(0) for a in stacked), norm.eps, norm.momentum)
        norm.running_mean, norm.running_var = new_mean.squeeze(0).detach(), new_var.squeeze(0).detach()
        return out.squeeze(0)  # not out[0]: its gradient would write zeros first


class FusedNorm(MaskedBatchNorm):
    """Keeps the parameters and statistics; its arithmetic is done in the convolution before it."""

    def normalise(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Linear(nn.Module):
    """nn.Linear, which under vmap would add its bias with one more kernel, and the ReLU after it if ``relu``."""

    def __init__(self, plain: nn.Linear, relu: bool = False) -> None:
        super().__init__()
        self.weight, self.bias, self.relu = plain.weight, plain.bias, relu
        self.in_one = False  # all of it in one kernel, which has no second derivatives

    def forward(self, x: Tensor) -> Tensor:
        if self.in_one and self.bias is not None and x.dim() == 2 and _on_gpu(x):
            apply: Callable[..., Tensor] = Affine.apply
            return apply(*(a.unsqueeze(0) for a in (x, self.weight, self.bias)), self.relu).squeeze(0)
        out = x @ self.weight.T
        out = out if self.bias is None else out + self.bias
        return F.relu(out) if self.relu else out


def fuse(module: nn.Module) -> None:
    """Fuse all possible blocks, and replace all linear layers; with the ReLU after them if there are fused blocks."""
    found = [block for block in blocks(module) if max(block[2].in_channels, block[2].out_channels) <= MOST_CHANNELS]
    for block in found:
        fused = FusedNorm(block[3])
        replace_block(block, FusedConv(block[2], fused), fused)
    rectified = {id(sequence[i]): (sequence, i + 1) for sequence, i in pairs(module)} if found else {}
    for name, part in list(module.named_modules()):
        if type(part) is nn.Linear and name:
            parent, _, child = name.rpartition(".")
            linear = Linear(part, relu=id(part) in rectified)
            linear.in_one = bool(found)
            setattr(module.get_submodule(parent), child, linear)
            if linear.relu:
                sequence, i = rectified[id(part)]
                sequence[i] = nn.Identity()
