# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"
"""Philox in one GPU kernel: the words of ``keys.philox``, which needs 160 small operations.

If every step draws noise, those operations take longer than the step itself.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
AXES = 3  # of a tensor that is read in place; one with more axes is copied first

WORDS = [f"{word}{axis}" for word in ("k0", "k1", "c0", "c1", "c2", "c3") for axis in ("", "_0", "_1", "_2")]


@triton.jit(do_not_specialize=["out", "n", "d1", "d2", *WORDS])  # compiled once, for all shapes
def _philox(out, n, d1, d2, k0, k0_0, k0_1, k0_2, k1, k1_0, k1_1, k1_2, c0, c0_0, c0_1, c0_2, c1, c1_0, c1_1, c1_2,
            c2, c2_0, c2_1, c2_2, c3, c3_0, c3_1, c3_2, BLOCK: tl.constexpr):  # fmt: skip
    """Ten rounds for each of n places (a, b, c) of a d0 x d1 x d2 box; name_i is the stride along axis i."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    a, b, c = i // (d1 * d2), (i // d2) % d1, i % d2
    x0 = tl.load(c0 + (a * c0_0 + b * c0_1 + c * c0_2), mask=inside, other=0).to(tl.uint64)
    x1 = tl.load(c1 + (a * c1_0 + b * c1_1 + c * c1_2), mask=inside, other=0).to(tl.uint64)
    x2 = tl.load(c2 + (a * c2_0 + b * c2_1 + c * c2_2), mask=inside, other=0).to(tl.uint64)
    x3 = tl.load(c3 + (a * c3_0 + b * c3_1 + c * c3_2), mask=inside, other=0).to(tl.uint64)
    y0 = tl.load(k0 + (a * k0_0 + b * k0_1 + c * k0_2), mask=inside, other=0).to(tl.uint64)
    y1 = tl.load(k1 + (a * k1_0 + b * k1_1 + c * k1_2), mask=inside, other=0).to(tl.uint64)
    for _ in tl.static_range(10):
        p0, p1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = (p1 >> 32) ^ x1 ^ y0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ x3 ^ y1, p0 & 0xFFFFFFFF
        y0, y1 = (y0 + 0x9E3779B9) & 0xFFFFFFFF, (y1 + 0xBB67AE85) & 0xFFFFFFFF
    tl.store(out + i, x0.to(tl.int64), mask=inside)
    tl.store(out + n + i, x1.to(tl.int64), mask=inside)
    tl.store(out + 2 * n + i, x2.to(tl.int64), mask=inside)
    tl.store(out + 3 * n + i, x3.to(tl.int64), mask=inside)


class Philox(torch.autograd.Function):
    """(k0, k1, c0, c1, c2, c3), of shapes that broadcast -> the four words, along a new first axis."""

    @staticmethod
    def forward(*words: Tensor) -> Tensor:
        spread = torch.broadcast_tensors(*words)
        shape = spread[0].shape
        if len(shape) > AXES:
            spread = tuple(word.reshape(-1) for word in spread)
        box = (1,) * (AXES - spread[0].dim()) + tuple(spread[0].shape)
        out = torch.empty((4, *shape), dtype=torch.int64, device=words[0].device)
        n = out.numel() // 4
        if n:
            strides = [(0,) * (AXES - word.dim()) + word.stride() for word in spread]
            arguments = [each for word, s in zip(spread, strides, strict=True) for each in (word, *s)]
            _philox[(triton.cdiv(n, BLOCK),)](out, n, box[1], box[2], *arguments, BLOCK=BLOCK)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None,) * 6

    @staticmethod
    def vmap(info: Any, in_dims: Any, *words: Tensor) -> Any:
        """Move the mapped axis first in every word, and pad the other axes to equal length."""
        axes = max(word.dim() - (dim is not None) for word, dim in zip(words, in_dims, strict=True))

        def moved(word: Tensor, dim: int | None) -> Tensor:
            if dim is None:
                return word
            first = word.movedim(dim, 0)
            return first.reshape(len(first), *[1] * (axes + 1 - first.dim()), *first.shape[1:])

        apply: Callable[..., Tensor] = Philox.apply
        return apply(*(moved(word, dim) for word, dim in zip(words, in_dims, strict=True))), 1


def philox(*words: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k0, k1, c0, c1, c2, c3 -> the four words after ten rounds."""
    apply: Callable[..., Tensor] = Philox.apply
    c0, c1, c2, c3 = apply(*words).unbind(0)
    return c0, c1, c2, c3
