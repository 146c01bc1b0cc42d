# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated,import"
"""Triton kernels for conv -> BatchNorm -> ReLU -> 2x2 maximum of many small models at once, float32.

Model k has its own weights. Between kernels only the convolution's output z and a few sums are kept; columns
of the convolution are gathered on the fly and never stored.

K models, B samples, C -> D channels, H x W inputs, i x j filter, P = HO x WO outputs of the convolution,
T = C i j terms of one output.

In the convolutions a thread (a lane of a one-dimensional block) owns R pixels of one column of one sample, and
neighbouring threads own neighbouring columns. So loads are coalesced, a loaded pixel serves i taps and several
channels, and all running sums are registers: tuples of blocks, one block for each sum. Programs are single warps.
Sums over lanes and programs have a fixed order: the same call gives the same bits.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZES = ["B", "K", "blocks", "capacity", "chunks", "pieces", "m_k", "m_b", "t_k", "t_b"]  # compiled once for all
LANES = 32  # of a program of a convolution: one warp, so that its sums need no barrier
MOST_SUMS = 100  # running sums that a thread holds
FEW_SUMS = 10  # below, a thread loads almost as much as it multiplies
WHOLE = 32  # pixels of a column that a thread of the input gradient owns: then no product is with padding
ENOUGH = 800  # programs of a convolution that keep an H200 busy
PIECES = 1500  # programs of a weight gradient: those that run at once
BLOCK_Q = 512
PRECISION = tl.constexpr("tf32x3")  # matrix products of three parts: the error of float32


@triton.jit(do_not_specialize=SIZES)
def _convolve(x, w, bias, weight, z, part, x_k, x_b, w_k, bias_k, m_k, m_b, B, blocks, C: tl.constexpr,
              H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, KI: tl.constexpr, KJ: tl.constexpr, HO: tl.constexpr,
              WO: tl.constexpr, R: tl.constexpr, DG: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """z = w * x + bias; and count, mean and squared deviations of the block's outputs in samples of weight 1."""
    block, d0 = tl.program_id(0) % blocks, tl.program_id(1) * DG
    k = (tl.program_id(0) // blocks).to(tl.int64)
    n = block * BN + tl.arange(0, BN)
    column, row, b = n % WO, (n // WO) % (HO // R) * R, n // (WO * (HO // R))
    inside = b < B
    mask = tl.load(weight + k * m_k + b * m_b, mask=inside, other=0.0)
    b = tl.minimum(b, B - 1).to(tl.int64)
    mine = x + k * x_k + b * x_b + (row * W + column)
    weights = w + k * w_k + d0 * (C * KI * KJ)
    acc = ()
    for d in tl.static_range(DG):
        acc += (tl.zeros((BN,), dtype=tl.float32) + tl.load(bias + k * bias_k + d0 + d),) * R
    for cj in range(C * KJ):
        c, j = cj // KJ, cj % KJ
        x_N = ()
        for r in tl.static_range(R + KI - 1):
            x_N += (tl.load(mine + (c * (H * W) + j + r * W)),)
        new = ()
        for d in tl.static_range(DG):
            w_I = ()
            for i in tl.static_range(KI):
                w_I += (tl.load(weights + (c * (KI * KJ) + j + (d * C * KI + i) * KJ)),)
            for r in tl.static_range(R):
                one = acc[d * R + r]
                for i in tl.static_range(KI):
                    one += w_I[i] * x_N[r + i]
                new += (one,)
        acc = new
    to = z + ((k * B + b) * D + d0) * (HO * WO) + (row * WO + column)
    count = tl.sum(mask, 0) * R
    for d in tl.static_range(DG):
        total = tl.zeros((BN,), dtype=tl.float32)
        for r in tl.static_range(R):
            tl.store(to + (d * (HO * WO) + r * WO), acc[d * R + r], mask=inside)
            total += acc[d * R + r]
        mean = tl.sum(mask * total, 0) / tl.maximum(count, 1.0)
        away = tl.zeros((BN,), dtype=tl.float32)
        for r in tl.static_range(R):
            off = acc[d * R + r] - mean
            away += off * off
        at = part + (k * D + d0 + d) * 3 * blocks + block
        tl.store(at, count)
        tl.store(at + blocks, mean)
        tl.store(at + 2 * blocks, tl.sum(mask * away, 0))


@triton.jit(do_not_specialize=SIZES)
def _pool(z, part, gamma, beta, run_mean, run_var, out, mean_out, rstd_out, new_mean, new_var, gamma_k, beta_k, mean_k,
          var_k, eps, momentum, B, blocks, chunks, D: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
          BQ: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """out = max over 2x2 of ReLU(gamma (z - mean) rstd + beta); and the statistics, from those of the blocks."""
    WP: tl.constexpr = WO // 2
    PP: tl.constexpr = WP * (HO // 2)
    kd, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    k, d = kd // D, kd % D
    count, total = 0.0, 0.0
    for first in range(0, blocks, BP):
        p = first + tl.arange(0, BP)
        at = part + kd * 3 * blocks + p
        n = tl.load(at, mask=p < blocks, other=0.0)
        count += tl.sum(n, 0)
        total += tl.sum(n * tl.load(at + blocks, mask=p < blocks, other=0.0), 0)
    mean = total / count
    squares = 0.0
    for first in range(0, blocks, BP):
        p = first + tl.arange(0, BP)
        at = part + kd * 3 * blocks + p
        n = tl.load(at, mask=p < blocks, other=0.0)
        off = tl.load(at + blocks, mask=p < blocks, other=0.0) - mean
        squares += tl.sum(tl.load(at + 2 * blocks, mask=p < blocks, other=0.0) + n * off * off, 0)
    var = squares / count
    rstd = 1.0 / tl.sqrt(var + eps)
    if chunk == 0:
        tl.store(mean_out + kd, mean)
        tl.store(rstd_out + kd, rstd)
        tl.store(new_mean + kd, (1 - momentum) * tl.load(run_mean + k * mean_k + d) + momentum * mean)
        old = tl.load(run_var + k * var_k + d)
        tl.store(new_var + kd, (1 - momentum) * old + momentum * (count / (count - 1)) * var)
    scale, shift = rstd * tl.load(gamma + k * gamma_k + d), tl.load(beta + k * beta_k + d)
    i = chunk * BQ + tl.arange(0, BQ)
    inside, q = i < B * PP, i % PP
    plane = (k * B + i // PP) * D + d
    at = z + plane * (HO * WO) + ((q // WP) * 2 * WO + (q % WP) * 2)
    top = tl.maximum((tl.load(at, mask=inside) - mean) * scale, (tl.load(at + 1, mask=inside) - mean) * scale)
    low = tl.maximum((tl.load(at + WO, mask=inside) - mean) * scale, (tl.load(at + WO + 1, mask=inside) - mean) * scale)
    tl.store(out + plane * PP + q, tl.maximum(tl.maximum(top, low) + shift, 0.0), mask=inside)


@triton.jit
def _window(z, mean, rstd, gamma, beta, g, gamma_k, beta_k, B, kd, chunk, D: tl.constexpr, HO: tl.constexpr,
            WO: tl.constexpr, BQ: tl.constexpr):  # fmt: skip
    """Standardised values of each 2x2 window, and the place of its gradient: the first largest, if above 0."""
    WP: tl.constexpr = WO // 2
    PP: tl.constexpr = WP * (HO // 2)
    k, d = kd // D, kd % D
    i = chunk * BQ + tl.arange(0, BQ)
    inside, q = i < B * PP, i % PP
    plane = (k * B + i // PP) * D + d
    m, s = tl.load(mean + kd), tl.load(rstd + kd)
    gm, bt = tl.load(gamma + k * gamma_k + d), tl.load(beta + k * beta_k + d)
    at = plane * (HO * WO) + ((q // WP) * 2 * WO + (q % WP) * 2)
    z0, z1 = (tl.load(z + at, mask=inside, other=0.0) - m) * s, (tl.load(z + at + 1, mask=inside, other=0.0) - m) * s
    z2 = (tl.load(z + at + WO, mask=inside, other=0.0) - m) * s
    z3 = (tl.load(z + at + WO + 1, mask=inside, other=0.0) - m) * s
    v0, v1, v2, v3 = z0 * gm + bt, z1 * gm + bt, z2 * gm + bt, z3 * gm + bt
    most = tl.maximum(tl.maximum(v0, v1), tl.maximum(v2, v3))
    grad = tl.load(g + plane * PP + q, mask=inside, other=0.0)
    grad = tl.where(most > 0, grad, 0.0)
    is0 = v0 == most
    is1 = (v1 == most) & ~is0
    is2 = (v2 == most) & ~is0 & ~is1
    is3 = ~is0 & ~is1 & ~is2
    g0, g1 = tl.where(is0, grad, 0.0), tl.where(is1, grad, 0.0)
    g2, g3 = tl.where(is2, grad, 0.0), tl.where(is3, grad, 0.0)
    return at, inside, i // PP, z0, z1, z2, z3, g0, g1, g2, g3


@triton.jit(do_not_specialize=SIZES)
def _sums(z, mean, rstd, gamma, beta, g, sums, gamma_k, beta_k, B, chunks, D: tl.constexpr, HO: tl.constexpr,
          WO: tl.constexpr, BQ: tl.constexpr):  # fmt: skip
    """For each channel and chunk: the sum of gradients of the standardised values, and of their products."""
    kd, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    _, _, _, z0, z1, z2, z3, g0, g1, g2, g3 = _window(
        z, mean, rstd, gamma, beta, g, gamma_k, beta_k, B, kd, chunk, D, HO, WO, BQ
    )  # fmt: skip
    tl.store(sums + kd * 2 * chunks + chunk, tl.sum(g0 + g1 + g2 + g3, 0))
    tl.store(sums + (kd * 2 + 1) * chunks + chunk, tl.sum(g0 * z0 + g1 * z1 + g2 * z2 + g3 * z3, 0))


@triton.jit(do_not_specialize=SIZES)
def _through(z, mean, rstd, gamma, beta, g, sums, weight, dz, small, gamma_k, beta_k, m_k, m_b, B,
             chunks, D: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, BQ: tl.constexpr, BB: tl.constexpr,
             BS: tl.constexpr):  # fmt: skip
    """dz = gamma rstd (g - w / n (sum g + z^ sum g z^)), and the gradients of the bias, gamma and beta.

    That of the bias is 0, because dz sums to 0 over the samples.
    """
    kd, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    k, d = kd // D, kd % D
    each, some = tl.arange(0, BB), tl.arange(0, BS)
    s1 = tl.sum(tl.load(sums + kd * 2 * chunks + some, mask=some < chunks, other=0.0), 0)
    s2 = tl.sum(tl.load(sums + (kd * 2 + 1) * chunks + some, mask=some < chunks, other=0.0), 0)
    n = tl.sum(tl.load(weight + k * m_k + each * m_b, mask=each < B, other=0.0), 0) * (HO * WO)
    if chunk == 0:
        tl.store(small + kd * 3, 0.0)
        tl.store(small + kd * 3 + 1, s2)
        tl.store(small + kd * 3 + 2, s1)
    at, inside, b, z0, z1, z2, z3, g0, g1, g2, g3 = _window(
        z, mean, rstd, gamma, beta, g, gamma_k, beta_k, B, kd, chunk, D, HO, WO, BQ
    )  # fmt: skip
    a = tl.load(gamma + k * gamma_k + d) * tl.load(rstd + kd)
    share = tl.load(weight + k * m_k + b * m_b, mask=inside, other=0.0) / n
    tl.store(dz + at, a * (g0 - share * (s1 + z0 * s2)), mask=inside)
    tl.store(dz + at + 1, a * (g1 - share * (s1 + z1 * s2)), mask=inside)
    tl.store(dz + at + WO, a * (g2 - share * (s1 + z2 * s2)), mask=inside)
    tl.store(dz + at + WO + 1, a * (g3 - share * (s1 + z3 * s2)), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _weight_gradient(x, dz, part, x_k, x_b, B, pieces, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
                     D: tl.constexpr, KI: tl.constexpr, KJ: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
                     R: tl.constexpr, DG: tl.constexpr, CG: tl.constexpr, JG: tl.constexpr,
                     BN: tl.constexpr):  # fmt: skip
    """Gradients of w for DG x CG channels and JG columns of the filter, over a piece of the samples' columns."""
    T: tl.constexpr = C * KI * KJ
    piece, tile = tl.program_id(0) % pieces, tl.program_id(1)
    k = (tl.program_id(0) // pieces).to(tl.int64)
    j0, c0, d0 = tile % (KJ // JG) * JG, tile // (KJ // JG) % (C // CG) * CG, tile // (KJ // JG) // (C // CG) * DG
    acc = (tl.zeros((BN,), dtype=tl.float32),) * (DG * CG * JG * KI)
    for first in range(piece * BN, B * ((HO // R) * WO), pieces * BN):
        n = first + tl.arange(0, BN)
        column, row, b = n % WO, (n // WO) % (HO // R) * R, n // (WO * (HO // R))
        inside = b < B
        b = tl.minimum(b, B - 1).to(tl.int64)
        mine = x + k * x_k + b * x_b + (c0 * (H * W) + row * W + column + j0)
        theirs = dz + ((k * B + b) * D + d0) * (HO * WO) + (row * WO + column)
        dz_N = ()
        for d in tl.static_range(DG):
            for r in tl.static_range(R):
                dz_N += (tl.load(theirs + (d * (HO * WO) + r * WO), mask=inside, other=0.0),)
        new = ()
        for c in tl.static_range(CG):
            for j in tl.static_range(JG):
                x_N = ()
                for r in tl.static_range(R + KI - 1):
                    x_N += (tl.load(mine + (c * (H * W) + r * W + j)),)
                for d in tl.static_range(DG):
                    for i in tl.static_range(KI):
                        one = acc[((c * JG + j) * DG + d) * KI + i]
                        for r in tl.static_range(R):
                            one += dz_N[d * R + r] * x_N[r + i]
                        new += (one,)
        acc = new
    to = part + ((k * pieces + piece) * D + d0) * T + (c0 * (KI * KJ) + j0)
    for c in tl.static_range(CG):
        for j in tl.static_range(JG):
            for d in tl.static_range(DG):
                for i in tl.static_range(KI):
                    tl.store(to + (d * T + (c * KI + i) * KJ + j), tl.sum(acc[((c * JG + j) * DG + d) * KI + i], 0))


@triton.jit(do_not_specialize=SIZES)
def _input_gradient(dz, w, dx, w_k, B, blocks, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
                    KI: tl.constexpr, KJ: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, R: tl.constexpr,
                    CG: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """dx_c(q) = sum over d, i, j of dz_d(q - (i, j)) w_dc(i, j)."""
    block, c0 = tl.program_id(0) % blocks, tl.program_id(1) * CG
    k = (tl.program_id(0) // blocks).to(tl.int64)
    n = block * BN + tl.arange(0, BN)
    column, row, b = n % W, (n // W) % (H // R) * R, n // (W * (H // R))
    inside = b < B
    b = tl.minimum(b, B - 1)
    theirs = dz + (k * B + b) * (D * HO * WO) + ((row - (KI - 1)) * WO + column)
    weights = w + k * w_k + c0 * (KI * KJ)
    acc = (tl.zeros((BN,), dtype=tl.float32),) * (CG * R)
    for dj in range(D * KJ):
        d, j = dj // KJ, dj % KJ
        right = (column >= j) & (column - j < WO)
        dz_N = ()
        for r in tl.static_range(R + KI - 1):
            if R == H:
                if r >= KI - 1 and r < KI - 1 + HO:
                    dz_N += (tl.load(theirs + (d * (HO * WO) - j + r * WO), mask=right, other=0.0),)
                else:
                    dz_N += (0.0,)  # not used
            else:
                here = right & (row + r >= KI - 1) & (row + r < KI - 1 + HO)
                dz_N += (tl.load(theirs + (d * (HO * WO) - j + r * WO), mask=here, other=0.0),)
        new = ()
        for c in tl.static_range(CG):
            w_I = ()
            for i in tl.static_range(KI):
                w_I += (tl.load(weights + (d * (C * KI * KJ) + j + (c * KI + i) * KJ)),)
            for r in tl.static_range(R):
                one = acc[c * R + r]
                for i in tl.static_range(KI):
                    if R < H or (r >= i and r - i < HO):
                        one += w_I[i] * dz_N[r - i + KI - 1]
                new += (one,)
        acc = new
    to = dx + ((k * B + b) * C + c0) * (H * W) + (row * W + column)
    for c in tl.static_range(CG):
        for r in tl.static_range(R):
            tl.store(to + (c * (H * W) + r * W), acc[c * R + r], mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _linear(x, w, bias, y, w_k, bias_k, B, RELU: tl.constexpr, N: tl.constexpr, M: tl.constexpr, BB: tl.constexpr,
            BN: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """y = x w' + bias, then ReLU."""
    k = tl.program_id(0).to(tl.int64)
    b, m = tl.program_id(1) * BB + tl.arange(0, BB), tl.program_id(2) * BM + tl.arange(0, BM)
    samples, outputs = (b < B)[:, None], m < M
    mine, weights = x + k * B * N + b[:, None] * N, w + k * w_k + m[:, None] * N
    acc_BM = tl.zeros((BB, BM), dtype=tl.float32) + tl.load(bias + k * bias_k + m, mask=outputs, other=0.0)[None, :]
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)[None, :]
        x_BN = tl.load(mine + n, mask=samples & (n < N), other=0.0)
        w_MN = tl.load(weights + n, mask=outputs[:, None] & (n < N), other=0.0)
        acc_BM += tl.dot(x_BN, tl.trans(w_MN), input_precision=PRECISION)
    if RELU:
        acc_BM = tl.maximum(acc_BM, 0.0)
    tl.store(y + k * B * M + (b[:, None] * M + m[None, :]), acc_BM, mask=samples & outputs[None, :])


@triton.jit
def _masked(g, y, at, mask, RELU: tl.constexpr):
    """The gradient before ReLU."""
    g = tl.load(g + at, mask=mask, other=0.0)
    if RELU:
        g = tl.where(tl.load(y + at, mask=mask, other=0.0) > 0, g, 0.0)
    return g


@triton.jit(do_not_specialize=SIZES)
def _linear_gradient(g, x, w, y, dx, dw, dbias, w_k, B, RELU: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
                     BB: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """The first programs give dw = g' x and dbias, each for a block of outputs; the others dx = g w."""
    MB: tl.constexpr = (M + BM - 1) // BM
    k = tl.program_id(0).to(tl.int64)
    n, block = tl.program_id(1) * BN + tl.arange(0, BN)[None, :], tl.program_id(2)
    if block < MB:
        m = block * BM + tl.arange(0, BM)
        dw_MN, dbias_M = tl.zeros((BM, BN), dtype=tl.float32), tl.zeros((BM,), dtype=tl.float32)
        for first in range(0, B, BB):
            b = first + tl.arange(0, BB)[:, None]
            g_BM = _masked(g + k * B * M, y + k * B * M, b * M + m[None, :], (b < B) & (m < M)[None, :], RELU)
            x_BN = tl.load(x + k * B * N + b * N + n, mask=(b < B) & (n < N), other=0.0)
            dw_MN += tl.dot(tl.trans(g_BM), x_BN, input_precision=PRECISION)
            dbias_M += tl.sum(g_BM, 0)
        tl.store(dw + k * M * N + (m[:, None] * N + n), dw_MN, mask=(m < M)[:, None] & (n < N))
        if tl.program_id(1) == 0:
            tl.store(dbias + k * M + m, dbias_M, mask=m < M)
    else:
        b = (block - MB) * BB + tl.arange(0, BB)[:, None]
        dx_BN = tl.zeros((BB, BN), dtype=tl.float32)
        for first in range(0, M, BM):
            m = first + tl.arange(0, BM)
            g_BM = _masked(g + k * B * M, y + k * B * M, b * M + m[None, :], (b < B) & (m < M)[None, :], RELU)
            w_MN = tl.load(w + k * w_k + m[:, None] * N + n, mask=(m < M)[:, None] & (n < N), other=0.0)
            dx_BN += tl.dot(g_BM, w_MN, input_precision=PRECISION)
        tl.store(dx + k * B * N + b * N + n, dx_BN, mask=(b < B) & (n < N))


@triton.jit(do_not_specialize=SIZES)
def _batch(step, index, weight, number, key, x, y, x_out, y_out, weight_out, number_out, key_out, B, capacity, K,
           N: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Copy the step's rows of the tables, and the samples whose numbers they hold."""
    t, b, k = tl.load(step), tl.program_id(0) // K, tl.program_id(0) % K
    at, to = (t * B + b) * capacity + k, (b * K + k).to(tl.int64)
    sample, n = tl.load(index + at), tl.program_id(1) * BN + tl.arange(0, BN)
    tl.store(x_out + to * N + n, tl.load(x + sample * N + n, mask=n < N), mask=n < N)
    if tl.program_id(1) == 0:
        tl.store(y_out + to, tl.load(y + sample))
        tl.store(weight_out + to, tl.load(weight + at))
        if b == 0:
            tl.store(number_out + k, tl.load(number + t * capacity + k))
            for i in tl.static_range(2):
                tl.store(key_out + k * 2 + i, tl.load(key + (t * capacity + k) * 2 + i))


@triton.jit(do_not_specialize=SIZES)
def _entropy(logits, target, g, losses, dlogits, t_k, t_b, B, C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
             GRADIENT: tl.constexpr):  # fmt: skip
    """Cross entropy of each row, or its gradient times g."""
    k = tl.program_id(0).to(tl.int64)
    b, c = tl.program_id(1) * BR + tl.arange(0, BR), tl.arange(0, BC)
    mask = (b < B)[:, None] & (c < C)[None, :]
    rows = (k * B + b)[:, None] * C + c[None, :]
    value = tl.load(logits + rows, mask=mask, other=-float("inf"))
    value = tl.where((b < B)[:, None], value, 0.0)
    value = value - tl.max(value, 1)[:, None]
    power = tl.exp(value)
    total = tl.sum(power, 1)
    label = tl.load(target + k * t_k + b * t_b, mask=b < B, other=0)
    mine = c[None, :] == label[:, None]
    if GRADIENT:
        scale = tl.load(g + k * B + b, mask=b < B, other=0.0)
        tl.store(dlogits + rows, (power / total[:, None] - tl.where(mine, 1.0, 0.0)) * scale[:, None], mask=mask)
    else:
        tl.store(losses + k * B + b, tl.log(total) - tl.sum(tl.where(mine, value, 0.0), 1), mask=b < B)


def _wide(n: int) -> int:
    return int(triton.next_power_of_2(n))


def _divisors(n: int, most: int) -> list[int]:
    return [i for i in range(1, min(n, most) + 1) if n % i == 0]


def _rows(*tensors: Tensor) -> list[Tensor]:
    """Make each model's values contiguous; models may have any stride."""
    return [a if a[0].is_contiguous() else a.contiguous() for a in tensors]


@functools.cache
def _tiles(channels: int, taps: int, rows: tuple[int, ...], most: int) -> list[tuple[int, int]]:
    """Return a large and a small tile, rows and channels that a thread owns, with the fewest loads per product.

    A load of a pixel counts as three, because its warp reads several lines; a weight is the same for all threads.
    """
    tiles = sorted(((r, g) for r in rows for g in _divisors(channels, 16)), key=lambda tile: tile[0] * tile[1])

    def best(least: int, most: int) -> tuple[int, int]:
        fit = [(r, g) for r, g in tiles if least <= r * g <= most]
        nearest = tiles[0] if tiles[0][0] * tiles[0][1] > most else tiles[-1]
        return min(fit or [nearest], key=lambda t: (3 * (t[0] + taps - 1) + taps * t[1]) / (t[0] * t[1]))

    return [best(2 * FEW_SUMS, most), best(FEW_SUMS, 2 * FEW_SUMS)]


def _tile(columns: int, height: int, channels: int, taps: int, rows: tuple[int, ...], most: int) -> tuple[int, int]:
    """Return the large tile if its programs fill the GPU, and else the small one."""
    large, small = _tiles(channels, taps, rows, most)
    r, g = large
    return large if columns * (height // r) * (channels // g) >= ENOUGH * LANES else small


def _heights(height: int) -> tuple[int, ...]:
    """Return the rows that a thread may own: divisors of the height, not too few, because a thread loads i - 1 more."""
    rows = _divisors(height, 14)
    return tuple(r for r in rows if r >= min(4, rows[-1]))


@functools.cache
def _gradient_tile(C: int, D: int, KI: int, KJ: int, HO: int) -> tuple[int, int, int, int]:
    """Return rows, output channels, input channels and filter columns of a thread: the fewest loads per product."""
    r = _divisors(HO, 5)[-1]
    tiles = [(d, c, j) for d in _divisors(D, D) for c in _divisors(C, C) for j in _divisors(KJ, KJ)]
    tiles = [(d, c, j) for d, c, j in tiles if d * c * j * KI <= MOST_SUMS] or [(1, 1, 1)]
    best = min(tiles, key=lambda t: (t[1] * t[2] * (r + KI - 1) + t[0] * r) / (t[0] * t[1] * t[2]))
    return r, *best


def forward(
    x: Tensor, w: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, run_mean: Tensor, run_var: Tensor,
    weight: Tensor, eps: float, momentum: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return out, z, mean, rstd, and the running statistics afterwards."""
    x = x if x[0, 0].is_contiguous() else x.contiguous()
    w, bias, gamma, beta, run_mean, run_var = _rows(w, bias, gamma, beta, run_mean, run_var)
    (K, B, C, H, W), (_, D, _, KI, KJ) = x.shape, w.shape
    HO, WO = H - KI + 1, W - KJ + 1
    R, DG = _tile(K * B * WO, HO, D, KI, _heights(HO), MOST_SUMS)
    blocks = triton.cdiv(B * (HO // R) * WO, LANES)
    z = x.new_empty(K, B, D, HO, WO)
    part = x.new_empty(K, D, 3, blocks)
    out = x.new_empty(K, B, D, HO // 2, WO // 2)
    mean, rstd, new_mean, new_var = (x.new_empty(K, D) for _ in range(4))
    shape: dict[str, Any] = {"C": C, "H": H, "W": W, "D": D, "KI": KI, "KJ": KJ, "HO": HO, "WO": WO}
    _convolve[(K * blocks, D // DG)](
        x, w, bias, weight, z, part, x.stride(0), x.stride(1), w.stride(0), bias.stride(0), weight.stride(0),
        weight.stride(1), B, blocks, **shape, R=R, DG=DG, BN=LANES, num_warps=1,
    )  # fmt: skip
    chunks = triton.cdiv(B * (HO // 2) * (WO // 2), BLOCK_Q)
    _pool[(K * D * chunks,)](
        z, part, gamma, beta, run_mean, run_var, out, mean, rstd, new_mean, new_var, gamma.stride(0), beta.stride(0),
        run_mean.stride(0), run_var.stride(0), eps, momentum, B, blocks, chunks, D=D, HO=HO, WO=WO, BQ=BLOCK_Q,
        BP=128, num_warps=4,
    )  # fmt: skip
    return out, z, mean, rstd, new_mean, new_var


def backward(
    g: Tensor, x: Tensor, w: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, z: Tensor, mean: Tensor,
    rstd: Tensor, wants_x: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of x (empty unless wanted), w, bias, gamma and beta."""
    x = x if x[0, 0].is_contiguous() else x.contiguous()
    w, gamma, beta = _rows(w, gamma, beta)
    g, z, mean, rstd = (a.contiguous() for a in (g, z, mean, rstd))
    (K, B, C, H, W), (_, D, _, KI, KJ) = x.shape, w.shape
    HO, WO = H - KI + 1, W - KJ + 1
    chunks = triton.cdiv(B * (HO // 2) * (WO // 2), BLOCK_Q)
    sums, dz = x.new_empty(K, D, 2, chunks), torch.empty_like(z)
    small = x.new_empty(K, D, 3)  # not three tensors: torch.cat of all gradients is twice as slow if all are contiguous
    shape: dict[str, Any] = {"C": C, "H": H, "W": W, "D": D, "KI": KI, "KJ": KJ, "HO": HO, "WO": WO}
    strides = gamma.stride(0), beta.stride(0)
    chunked: dict[str, Any] = {"D": D, "HO": HO, "WO": WO, "BQ": BLOCK_Q, "num_warps": 4}
    _sums[(K * D * chunks,)](z, mean, rstd, gamma, beta, g, sums, *strides, B, chunks, **chunked)
    _through[(K * D * chunks,)](
        z, mean, rstd, gamma, beta, g, sums, weight, dz, small, *strides, weight.stride(0),
        weight.stride(1), B, chunks, **chunked, BB=_wide(B), BS=_wide(chunks),
    )  # fmt: skip
    R, DG, CG, JG = _gradient_tile(C, D, KI, KJ, HO)
    tiles, items = (D // DG) * (C // CG) * (KJ // JG), B * (HO // R) * WO
    pieces = max(1, min(triton.cdiv(items, LANES), PIECES // (K * tiles)))
    part = x.new_empty(K, pieces, *w.shape[1:])
    _weight_gradient[(K * pieces, tiles)](
        x, dz, part, x.stride(0), x.stride(1), B, pieces, **shape, R=R, DG=DG, CG=CG, JG=JG, BN=LANES, num_warps=1
    )
    dx = x.new_empty(0)
    if wants_x:
        dx = x.new_empty(K, B, C, H, W)
        rows = (H,) if H <= WHOLE else _heights(H)
        R, CG = _tile(K * B * W, H, C, KI, rows, MOST_SUMS // 2)
        blocks = triton.cdiv(B * (H // R) * W, LANES)
        _input_gradient[(K * blocks, C // CG)](
            dz, w, dx, w.stride(0), B, blocks, **shape, R=R, CG=CG, BN=LANES, num_warps=1
        )  # fmt: skip
    return dx, part.sum(1) if pieces > 1 else part[:, 0], *small.unbind(2)


def linear(x: Tensor, w: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """Return x w' + bias, after ReLU if wanted: (K, B, N), (K, M, N), (K, M) -> (K, B, M)."""
    x, (w, bias) = x.contiguous(), _rows(w, bias)
    (K, B, N), M = x.shape, w.shape[1]
    y = x.new_empty(K, B, M)
    blocks = _linear_blocks(B)
    grid = (K, triton.cdiv(B, blocks["BB"]), triton.cdiv(M, blocks["BM"]))
    _linear[grid](x, w, bias, y, w.stride(0), bias.stride(0), B, RELU=relu, N=N, M=M, **blocks)
    return y


def linear_backward(
    g: Tensor, x: Tensor, w: Tensor, y: Tensor, relu: bool, wants_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x (empty unless wanted), w and bias."""
    g, x, y, (w,) = g.contiguous(), x.contiguous(), y.contiguous(), _rows(w)
    (K, B, N), M = x.shape, w.shape[1]
    dx, dw, dbias = torch.empty_like(x) if wants_x else x.new_empty(0), x.new_empty(K, M, N), x.new_empty(K, M)
    blocks = _linear_blocks(B)
    last = triton.cdiv(B, blocks["BB"]) if wants_x else 0
    grid = (K, triton.cdiv(N, blocks["BN"]), triton.cdiv(M, blocks["BM"]) + last)
    _linear_gradient[grid](g, x, w, y, dx, dw, dbias, w.stride(0), B, RELU=relu, N=N, M=M, **blocks)
    return dx, dw, dbias


def _linear_blocks(B: int) -> dict[str, int]:
    return {"BB": max(16, min(32, _wide(B))), "BN": 64, "BM": 32, "num_warps": 4}


def batch(tables: tuple[Tensor, ...], step: Tensor, x: Tensor, y: Tensor, K: int) -> tuple[Tensor, ...]:
    """Return inputs (B, K, …), targets, weights, numbers and keys of a step's first K clients in one launch."""
    index_TBK, _, number_TK, key_TK2 = tables
    _, B, capacity = index_TBK.shape
    out = (
        x.new_empty(B, K, *x.shape[1:]), y.new_empty(B, K), tables[1].new_empty(B, K), number_TK.new_empty(K),
        key_TK2.new_empty(K, 2),
    )  # fmt: skip
    N = x[0].numel()
    _batch[(B * K, triton.cdiv(N, 1024))](step, *tables, x, y, *out, B, capacity, K, N=N, BN=1024)
    return out


def entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of every row of (K, B, C)."""
    losses = logits.new_empty(logits.shape[:2])
    _entropy[_grid(logits)](logits.contiguous(), target, losses, losses, losses, *_entropy_shape(target, logits),
                            GRADIENT=False)  # fmt: skip
    return losses


def entropy_backward(g: Tensor, logits: Tensor, target: Tensor) -> Tensor:
    logits = logits.contiguous()
    dlogits = torch.empty_like(logits)
    _entropy[_grid(logits)](logits, target, g.contiguous(), g, dlogits, *_entropy_shape(target, logits),
                            GRADIENT=True)  # fmt: skip
    return dlogits


def _grid(logits: Tensor) -> tuple[int, int]:
    return len(logits), int(triton.cdiv(logits.shape[1], 16))


def _entropy_shape(target: Tensor, logits: Tensor) -> tuple[int, ...]:
    classes = logits.shape[2]
    return target.stride(0), target.stride(1), logits.shape[1], classes, int(triton.next_power_of_2(classes)), 16
