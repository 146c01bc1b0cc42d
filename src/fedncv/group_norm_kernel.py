# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found,operator"
"""Triton kernels for GroupNorm of channels-last memory, forward and backward: the formulas are in ``group_norm``.

N samples, C channels, HW positions, groups of CG channels. A tile is one group of one sample: HW rows of CG channels. A
program holds a block of R rows x BC channels of a tile in registers, so that mean and deviations need one load.

A tile of one block is the work of one program. A larger one is cut into S pieces of ROWS rows, with a program for each
and two kernels: the first leaves sums of the pieces, the second combines them. Sums have a fixed order and there are no
atomics: the same call gives the same bits. Grids depend on shapes alone, so a CUDA graph can hold the kernels.

x may have lower precision than REAL, float32 or float64, in which everything is computed.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # values of a tile that a program holds at a time, in float32
EACH = 32  # of them in a thread
MOST_PIECES = 32  # of a tile
MOST_CHANNELS = 4096  # of a group: a block has at least one row

PLAIN = ["gamma", "beta"]  # parts of a flat vector, at any place: a kernel compiled for one must serve all


@triton.jit
def _place(tile, row, C: tl.constexpr, HW: tl.constexpr, CG: tl.constexpr, R: tl.constexpr, BC: tl.constexpr):
    """Offsets of the R rows of a tile from ``row`` on, and which of them are in the tile."""
    r, c = tl.arange(0, R)[:, None], tl.arange(0, BC)[None, :]
    first = (tile // (C // CG) * HW + row) * C + tile % (C // CG) * CG
    return first + (r * C + c), (row + r < HW) & (c < CG)


@triton.jit
def _of_channels(vector, tile, C: tl.constexpr, CG: tl.constexpr, BC: tl.constexpr, REAL: tl.constexpr):
    """The values of the tile's channels."""
    c = tl.arange(0, BC)
    return tl.load(vector + (tile % (C // CG) * CG + c), mask=c < CG, other=0.0).to(REAL)[None, :]


@triton.jit
def _affine(z, gamma, beta, tile, C: tl.constexpr, CG: tl.constexpr, BC: tl.constexpr, GAMMA: tl.constexpr,
            BETA: tl.constexpr, REAL: tl.constexpr):  # fmt: skip
    """gamma z + beta."""
    if GAMMA:
        z = z * _of_channels(gamma, tile, C, CG, BC, REAL)
    if BETA:
        z = z + _of_channels(beta, tile, C, CG, BC, REAL)
    return z


@triton.jit(do_not_specialize=PLAIN)
def _whole(x, gamma, beta, y, stats, EPS: tl.constexpr, C: tl.constexpr, HW: tl.constexpr, CG: tl.constexpr,
           R: tl.constexpr, BC: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr,
           REAL: tl.constexpr):  # fmt: skip
    """y of a tile of one block, and its mean and rstd."""
    tile = tl.program_id(0).to(tl.int64)
    at, inside = _place(tile, 0, C, HW, CG, R, BC)
    value = tl.load(x + at, mask=inside, other=0.0).to(REAL)
    mean = tl.sum(value) / (HW * CG)
    off = tl.where(inside, value - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(off * off) / (HW * CG) + tl.full((), EPS, REAL))
    tl.store(stats + 2 * tile, mean)
    tl.store(stats + 2 * tile + 1, rstd)
    out = _affine(off * rstd, gamma, beta, tile, C, CG, BC, GAMMA, BETA, REAL)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _moments(x, part, C: tl.constexpr, HW: tl.constexpr, CG: tl.constexpr, R: tl.constexpr, BC: tl.constexpr,
             ROWS: tl.constexpr, S: tl.constexpr, REAL: tl.constexpr):  # fmt: skip
    """Mean and sum of squared deviations of a piece."""
    tile, first = (tl.program_id(0) // S).to(tl.int64), tl.program_id(0) % S * ROWS
    count, mean, squares = tl.full((), 0.0, REAL), tl.full((), 0.0, REAL), tl.full((), 0.0, REAL)
    for i in range(ROWS // R):
        row = first + i * R
        at, inside = _place(tile, row, C, HW, CG, R, BC)
        value = tl.load(x + at, mask=inside, other=0.0).to(REAL)
        more = (tl.maximum(tl.minimum(HW - row, R), 0) * CG).to(REAL)
        new = tl.sum(value) / tl.maximum(more, 1.0)
        off = tl.where(inside, value - new, 0.0)
        away = new - mean
        squares += tl.sum(off * off) + away * away * (count * more / (count + more))
        mean += away * (more / (count + more))
        count += more
    to = part + tl.program_id(0).to(tl.int64) * 2
    tl.store(to, mean)
    tl.store(to + 1, squares)


@triton.jit(do_not_specialize=PLAIN)
def _normalise(x, part, gamma, beta, y, stats, EPS: tl.constexpr, C: tl.constexpr, HW: tl.constexpr,
               CG: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr, S: tl.constexpr,
               BS: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, REAL: tl.constexpr):  # fmt: skip
    """y of a piece, with mean and rstd from the pieces of its tile."""
    tile, first = (tl.program_id(0) // S).to(tl.int64), tl.program_id(0) % S * ROWS
    i = tl.arange(0, BS)
    n = (tl.maximum(tl.minimum(HW - i * ROWS, ROWS), 0) * CG).to(REAL)
    theirs = part + (tile * S + i) * 2
    means = tl.load(theirs, mask=i < S, other=0.0)
    mean = tl.sum(n * means) / (HW * CG)
    squares = tl.sum(tl.load(theirs + 1, mask=i < S, other=0.0) + n * (means - mean) * (means - mean))
    rstd = 1.0 / tl.sqrt(squares / (HW * CG) + tl.full((), EPS, REAL))
    if first == 0:
        tl.store(stats + 2 * tile, mean)
        tl.store(stats + 2 * tile + 1, rstd)
    for i in range(ROWS // R):
        at, inside = _place(tile, first + i * R, C, HW, CG, R, BC)
        z = (tl.load(x + at, mask=inside, other=0.0).to(REAL) - mean) * rstd
        out = _affine(z, gamma, beta, tile, C, CG, BC, GAMMA, BETA, REAL)
        tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _pair(x, g, stats, tile, at, inside, REAL: tl.constexpr):
    """The standardised values z and the gradients of a block."""
    mean, rstd = tl.load(stats + 2 * tile), tl.load(stats + 2 * tile + 1)
    z = (tl.load(x + at, mask=inside, other=0.0).to(REAL) - mean) * rstd
    return z, tl.load(g + at, mask=inside, other=0.0).to(REAL), rstd


@triton.jit
def _to_parts(part, piece, g_C, gz_C, tile, C: tl.constexpr, CG: tl.constexpr, BC: tl.constexpr):
    """Store the sums of a piece in its row of (N S, 2, C)."""
    c = tl.arange(0, BC)
    to = part + piece * 2 * C + (tile % (C // CG) * CG + c)
    tl.store(to, g_C, mask=c < CG)
    tl.store(to + C, gz_C, mask=c < CG)


@triton.jit(do_not_specialize=PLAIN)
def _whole_gradient(x, g, gamma, stats, dx, part, C: tl.constexpr, HW: tl.constexpr, CG: tl.constexpr,
                    R: tl.constexpr, BC: tl.constexpr, GAMMA: tl.constexpr, REAL: tl.constexpr):  # fmt: skip
    """dx of a tile of one block; and for each channel the sums of g and g z."""
    tile = tl.program_id(0).to(tl.int64)
    at, inside = _place(tile, 0, C, HW, CG, R, BC)
    z, grad, rstd = _pair(x, g, stats, tile, at, inside, REAL)
    _to_parts(part, tile // (C // CG), tl.sum(grad, 0), tl.sum(grad * z, 0), tile, C, CG, BC)
    if GAMMA:
        grad = grad * _of_channels(gamma, tile, C, CG, BC, REAL)
    out = rstd * (grad - tl.sum(grad) / (HW * CG) - z * (tl.sum(grad * z) / (HW * CG)))
    tl.store(dx + at, out.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _sums(x, g, stats, part, C: tl.constexpr, HW: tl.constexpr, CG: tl.constexpr, R: tl.constexpr, BC: tl.constexpr,
          ROWS: tl.constexpr, S: tl.constexpr, REAL: tl.constexpr):  # fmt: skip
    """For each channel of a piece: the sums of g and g z."""
    tile, s = (tl.program_id(0) // S).to(tl.int64), tl.program_id(0) % S
    g_C, gz_C = tl.zeros((BC,), dtype=REAL), tl.zeros((BC,), dtype=REAL)
    for i in range(ROWS // R):
        at, inside = _place(tile, s * ROWS + i * R, C, HW, CG, R, BC)
        z, grad, _ = _pair(x, g, stats, tile, at, inside, REAL)
        g_C += tl.sum(grad, 0)
        gz_C += tl.sum(grad * z, 0)
    _to_parts(part, tile // (C // CG) * S + s, g_C, gz_C, tile, C, CG, BC)


@triton.jit(do_not_specialize=PLAIN)
def _through(x, g, gamma, stats, part, dx, C: tl.constexpr, HW: tl.constexpr, CG: tl.constexpr, R: tl.constexpr,
             BC: tl.constexpr, ROWS: tl.constexpr, S: tl.constexpr, GAMMA: tl.constexpr,
             REAL: tl.constexpr):  # fmt: skip
    """dx of a piece, with the sums of all pieces of its tile."""
    tile, first = (tl.program_id(0) // S).to(tl.int64), tl.program_id(0) % S * ROWS
    g_C, gz_C = tl.zeros((1, BC), dtype=REAL), tl.zeros((1, BC), dtype=REAL)
    for i in range(S):
        theirs = part + (tile // (C // CG) * S + i) * 2 * C
        g_C += _of_channels(theirs, tile, C, CG, BC, REAL)
        gz_C += _of_channels(theirs + C, tile, C, CG, BC, REAL)
    if GAMMA:
        g_C, gz_C = (
            g_C * _of_channels(gamma, tile, C, CG, BC, REAL),
            gz_C * _of_channels(gamma, tile, C, CG, BC, REAL),
        )
    mean_g, mean_gz = tl.sum(g_C) / (HW * CG), tl.sum(gz_C) / (HW * CG)
    for i in range(ROWS // R):
        at, inside = _place(tile, first + i * R, C, HW, CG, R, BC)
        z, grad, rstd = _pair(x, g, stats, tile, at, inside, REAL)
        if GAMMA:
            grad = grad * _of_channels(gamma, tile, C, CG, BC, REAL)
        out = rstd * (grad - mean_g - z * mean_gz)
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=inside)


def forward(x: Tensor, gamma: Tensor | None, beta: Tensor | None, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return y, and mean and rstd (N, groups, 2). ``x`` is channels last in memory."""
    whole, shape, more, warps = _blocks(x, groups)
    y, stats = torch.empty_like(x), x.new_empty(len(x), groups, 2, dtype=_real(x))
    given: dict[str, Any] = {"EPS": eps, "GAMMA": gamma is not None, "BETA": beta is not None, "num_warps": warps}
    gamma, beta = (x if each is None else each.contiguous() for each in (gamma, beta))
    if whole:
        _whole[(len(x) * groups,)](x, gamma, beta, y, stats, **shape, **given)
        return y, stats
    part = stats.new_empty(len(x), groups, more["S"], 2)
    grid = (part.numel() // 2,)
    _moments[grid](x, part, **shape, **more, num_warps=warps)
    wide = int(triton.next_power_of_2(more["S"]))
    _normalise[grid](x, part, gamma, beta, y, stats, **shape, **more, BS=wide, **given)
    return y, stats


def backward(g: Tensor, x: Tensor, gamma: Tensor | None, stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, and the gradients of gamma and beta in the precision of ``stats``."""
    groups = stats.shape[1]
    whole, shape, more, warps = _blocks(x, groups)
    g, dx = g.contiguous(memory_format=torch.channels_last), torch.empty_like(x)
    part = stats.new_empty(len(x) * more["S"], 2, x.shape[1])
    given: dict[str, Any] = {"GAMMA": gamma is not None, "num_warps": warps}
    gamma = x if gamma is None else gamma.contiguous()
    if whole:
        _whole_gradient[(len(x) * groups,)](x, g, gamma, stats, dx, part, **shape, **given)
    else:
        grid = (len(part) * groups,)
        _sums[grid](x, g, stats, part, **shape, **more, num_warps=warps)
        _through[grid](x, g, gamma, stats, part, dx, **shape, **more, **given)
    dbeta, dgamma = part.sum(0).unbind(0)
    return dx, dgamma, dbeta


def _real(x: Tensor) -> torch.dtype:
    """Return the precision to compute in."""
    return torch.promote_types(x.dtype, torch.float32)


def _blocks(x: Tensor, groups: int) -> tuple[bool, dict[str, Any], dict[str, int], int]:
    """Return whether a tile is one block, the shape of tile and block, that of a piece, and the warps of a program."""
    C, HW = x.shape[1], x.shape[2] * x.shape[3]
    CG, double = C // groups, _real(x) == torch.float64
    BC = int(triton.next_power_of_2(CG))
    R = max(1, min(int(triton.next_power_of_2(HW)), BLOCK // (2 if double else 1) // BC))
    blocks = triton.cdiv(HW, R)
    rows = triton.cdiv(blocks, MOST_PIECES) * R
    shape = {"C": C, "HW": HW, "CG": CG, "R": R, "BC": BC, "REAL": tl.float64 if double else tl.float32}
    return blocks == 1, shape, {"ROWS": rows, "S": int(triton.cdiv(HW, rows))}, max(1, min(8, R * BC // (32 * EACH)))
