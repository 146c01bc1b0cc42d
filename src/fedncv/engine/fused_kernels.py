# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"
"""Triton kernels for conv -> BatchNorm -> ReLU -> 2x2 maximum of many small models at once, float32.

Model k has its own weights. Between kernels only the convolution's output z and a few sums are kept; columns
of the convolution are gathered on the fly and never stored.

K models, B samples, C -> D channels, H x W inputs, i x j filter, P = HO x WO outputs of the convolution,
T = C i j terms of one output. A program of the grid handles one sample of one model (or a part of it).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_Q = 256
SUMS = 64  # running sums a thread holds


@triton.jit
def _convolve(x, w, bias, z, part, x_k, x_b, w_k, bias_k, B, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
              D: tl.constexpr, KI: tl.constexpr, KJ: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
              BP: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """z = w * x + bias, and the mean and sum of squared deviations of each block of outputs."""
    T: tl.constexpr = C * KI * KJ
    P: tl.constexpr = HO * WO
    kb = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    k = kb // B
    p, d = block * BP + tl.arange(0, BP), tl.arange(0, BD)
    inside = p < P
    mine = x + k * x_k + (kb % B) * x_b + ((p // WO) * W + p % WO)
    weights = w + k * w_k + d * T
    acc_DP = tl.zeros((BD, BP), dtype=tl.float32) + tl.load(bias + k * bias_k + d, mask=d < D, other=0.0)[:, None]
    for ci in range(C * KI):
        row = (ci // KI) * (H * W) + (ci % KI) * W
        for j in tl.static_range(KJ):
            x_P = tl.load(mine + (row + j), mask=inside, other=0.0)
            w_D = tl.load(weights + (ci * KJ + j), mask=d < D, other=0.0)
            acc_DP += w_D[:, None] * x_P[None, :]
    tl.store(z + kb * (D * P) + (d[:, None] * P + p[None, :]), acc_DP, mask=(d < D)[:, None] & inside[None, :])
    n = tl.minimum(BP, P - block * BP).to(tl.float32)
    mean_D = tl.sum(tl.where(inside[None, :], acc_DP, 0.0), 1) / n
    away_DP = tl.where(inside[None, :], acc_DP - mean_D[:, None], 0.0)
    to = part + (kb * tl.num_programs(1) + block) * 2 * D + d
    tl.store(to, mean_D, mask=d < D)
    tl.store(to + D, tl.sum(away_DP * away_DP, 1), mask=d < D)


@triton.jit
def _statistics(part, weight, run_mean, run_var, mean_out, rstd_out, new_mean, new_var, w_k, w_b, eps, momentum,
                B: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr,
                BN: tl.constexpr):  # fmt: skip
    """Combine the blocks' means and deviations over the samples of weight 1; update running statistics."""
    BLOCKS: tl.constexpr = (P + BP - 1) // BP
    k = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BD)
    total = tl.zeros((BD,), dtype=tl.float32)
    n = 0.0
    for first in range(0, B * BLOCKS, BN):
        i = first + tl.arange(0, BN)
        real = i < B * BLOCKS
        w = tl.load(weight + k * w_k + (i // BLOCKS) * w_b, mask=real, other=0.0)
        w = w * tl.minimum(BP, P - (i % BLOCKS) * BP).to(tl.float32)
        mean = tl.load(part + (k * B * BLOCKS + i)[:, None] * 2 * D + o[None, :],
                       mask=real[:, None] & (o < D)[None, :], other=0.0)  # fmt: skip
        total += tl.sum(w[:, None] * mean, 0)
        n += tl.sum(w, 0)
    centre = total / n
    squares = tl.zeros((BD,), dtype=tl.float32)
    for first in range(0, B * BLOCKS, BN):
        i = first + tl.arange(0, BN)
        real = i < B * BLOCKS
        w = tl.load(weight + k * w_k + (i // BLOCKS) * w_b, mask=real, other=0.0)
        m = tl.minimum(BP, P - (i % BLOCKS) * BP).to(tl.float32)
        at = part + (k * B * BLOCKS + i)[:, None] * 2 * D + o[None, :]
        mask = real[:, None] & (o < D)[None, :]
        off = tl.load(at, mask=mask, other=0.0) - centre[None, :]
        squares += tl.sum(w[:, None] * (tl.load(at + D, mask=mask, other=0.0) + m[:, None] * off * off), 0)
    var = squares / n
    to, mask = k * D + o, o < D
    tl.store(mean_out + to, centre, mask=mask)
    tl.store(rstd_out + to, 1.0 / tl.sqrt(var + eps), mask=mask)
    old_mean, old_var = tl.load(run_mean + to, mask=mask), tl.load(run_var + to, mask=mask)
    tl.store(new_mean + to, (1 - momentum) * old_mean + momentum * centre, mask=mask)
    tl.store(new_var + to, (1 - momentum) * old_var + momentum * (n / (n - 1)) * var, mask=mask)


@triton.jit
def _pool(z, mean, rstd, gamma, beta, out, gamma_k, beta_k, B, D: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
          BQ: tl.constexpr):  # fmt: skip
    """out = max over 2x2 of ReLU(gamma (z - mean) rstd + beta)."""
    WP: tl.constexpr = WO // 2
    PP: tl.constexpr = WP * (HO // 2)
    kb = tl.program_id(0).to(tl.int64)
    k = kb // B
    i = tl.program_id(1) * BQ + tl.arange(0, BQ)
    inside = i < D * PP
    o, q = i // PP, i % PP
    m = tl.load(mean + k * D + o, mask=inside)
    a = tl.load(rstd + k * D + o, mask=inside) * tl.load(gamma + k * gamma_k + o, mask=inside)
    c = tl.load(beta + k * beta_k + o, mask=inside)
    at = z + (kb * D + o) * (HO * WO) + (q // WP) * 2 * WO + (q % WP) * 2
    top = tl.maximum((tl.load(at, mask=inside) - m) * a + c, (tl.load(at + 1, mask=inside) - m) * a + c)
    low = tl.maximum((tl.load(at + WO, mask=inside) - m) * a + c, (tl.load(at + WO + 1, mask=inside) - m) * a + c)
    tl.store(out + kb * (D * PP) + i, tl.maximum(tl.maximum(top, low), 0.0), mask=inside)


@triton.jit
def _window(z, mean, rstd, gamma, beta, g, gamma_k, beta_k, kb, k, o, D: tl.constexpr, HO: tl.constexpr,
            WO: tl.constexpr, BQ: tl.constexpr):  # fmt: skip
    """Standardised values of each 2x2 window, and the place of its gradient: the first largest, if above 0."""
    WP: tl.constexpr = WO // 2
    PP: tl.constexpr = WP * (HO // 2)
    q = tl.arange(0, BQ)
    inside = q < PP
    m, s = tl.load(mean + k * D + o), tl.load(rstd + k * D + o)
    gm, bt = tl.load(gamma + k * gamma_k + o), tl.load(beta + k * beta_k + o)
    at = (kb * D + o) * (HO * WO) + (q // WP) * 2 * WO + (q % WP) * 2
    z0, z1 = (tl.load(z + at, mask=inside, other=0.0) - m) * s, (tl.load(z + at + 1, mask=inside, other=0.0) - m) * s
    z2 = (tl.load(z + at + WO, mask=inside, other=0.0) - m) * s
    z3 = (tl.load(z + at + WO + 1, mask=inside, other=0.0) - m) * s
    v0, v1, v2, v3 = z0 * gm + bt, z1 * gm + bt, z2 * gm + bt, z3 * gm + bt
    most = tl.maximum(tl.maximum(v0, v1), tl.maximum(v2, v3))
    grad = tl.load(g + (kb * D + o) * PP + q, mask=inside, other=0.0)
    grad = tl.where(most > 0, grad, 0.0)
    is0 = v0 == most
    is1 = (v1 == most) & ~is0
    is2 = (v2 == most) & ~is0 & ~is1
    is3 = ~is0 & ~is1 & ~is2
    g0, g1 = tl.where(is0, grad, 0.0), tl.where(is1, grad, 0.0)
    g2, g3 = tl.where(is2, grad, 0.0), tl.where(is3, grad, 0.0)
    return at, inside, z0, z1, z2, z3, g0, g1, g2, g3


@triton.jit
def _sums(z, mean, rstd, gamma, beta, g, sums, gamma_k, beta_k, B, D: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
          BQ: tl.constexpr):  # fmt: skip
    """For each sample and channel: the sum of gradients of the standardised values, and of their products."""
    kb, o = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, _, z0, z1, z2, z3, g0, g1, g2, g3 = _window(
        z, mean, rstd, gamma, beta, g, gamma_k, beta_k, kb, kb // B, o, D, HO, WO, BQ
    )  # fmt: skip
    tl.store(sums + (kb * D + o) * 2, tl.sum(g0 + g1 + g2 + g3, 0))
    tl.store(sums + (kb * D + o) * 2 + 1, tl.sum(g0 * z0 + g1 * z1 + g2 * z2 + g3 * z3, 0))


@triton.jit
def _through(z, mean, rstd, gamma, beta, g, sums, weight, dz, dgamma, dbeta, gamma_k, beta_k, w_k, w_b, B,
             D: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, BQ: tl.constexpr, BB: tl.constexpr):  # fmt: skip
    """dz = gamma rstd (g - w / n (sum g + z^ sum g z^)), and the gradients of gamma and beta."""
    kb, o = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, b = kb // B, kb % B
    each = tl.arange(0, BB)
    at_sums = sums + ((k * B + each) * D + o) * 2
    s1 = tl.sum(tl.load(at_sums, mask=each < B, other=0.0), 0)
    s2 = tl.sum(tl.load(at_sums + 1, mask=each < B, other=0.0), 0)
    n = tl.sum(tl.load(weight + k * w_k + each * w_b, mask=each < B, other=0.0), 0) * (HO * WO)
    if b == 0:
        tl.store(dbeta + k * D + o, s1)
        tl.store(dgamma + k * D + o, s2)
    at, inside, z0, z1, z2, z3, g0, g1, g2, g3 = _window(
        z, mean, rstd, gamma, beta, g, gamma_k, beta_k, kb, k, o, D, HO, WO, BQ
    )  # fmt: skip
    a = tl.load(gamma + k * gamma_k + o) * tl.load(rstd + k * D + o)
    share = tl.load(weight + k * w_k + b * w_b) / n
    tl.store(dz + at, a * (g0 - share * (s1 + z0 * s2)), mask=inside)
    tl.store(dz + at + 1, a * (g1 - share * (s1 + z1 * s2)), mask=inside)
    tl.store(dz + at + WO, a * (g2 - share * (s1 + z2 * s2)), mask=inside)
    tl.store(dz + at + WO + 1, a * (g3 - share * (s1 + z3 * s2)), mask=inside)


@triton.jit
def _weight_gradient(x, dz, part, x_k, x_b, B, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
                     KI: tl.constexpr, KJ: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, S: tl.constexpr,
                     BP: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    """Gradients of w (T columns) and of the bias (column T) for every S samples of a model."""
    T: tl.constexpr = C * KI * KJ
    P: tl.constexpr = HO * WO
    pieces = (B + S - 1) // S
    ks = tl.program_id(0).to(tl.int64)
    k, b = ks // pieces, (ks % pieces) * S
    t, d = tl.program_id(1) * BT + tl.arange(0, BT), tl.arange(0, BD)
    r = t % (KI * KJ)
    at = (t // (KI * KJ)) * (H * W) + (r // KJ) * W + r % KJ
    acc_DTP = tl.zeros((BD, BT, BP), dtype=tl.float32)
    for s in range(S):
        mine, theirs = x + k * x_k + (b + s) * x_b, dz + (k * B + b + s) * (D * P)
        real = b + s < B
        for first in range(0, P, BP):
            p = first + tl.arange(0, BP)
            inside = (p < P) & real
            dz_DP = tl.load(theirs + (d[:, None] * P + p[None, :]), mask=(d < D)[:, None] & inside[None, :], other=0.0)
            place = (p // WO) * W + p % WO
            x_TP = tl.load(mine + (at[:, None] + place[None, :]), mask=(t < T)[:, None] & inside[None, :], other=0.0)
            x_TP = tl.where((t == T)[:, None], 1.0, x_TP)
            acc_DTP += dz_DP[:, None, :] * x_TP[None, :, :]
    to = part + ks * (D * (T + 1)) + (d[:, None] * (T + 1) + t[None, :])
    tl.store(to, tl.sum(acc_DTP, 2), mask=(d < D)[:, None] & (t <= T)[None, :])


@triton.jit
def _input_gradient(dz, w, dx, w_k, B, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
                    KI: tl.constexpr, KJ: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, BP: tl.constexpr,
                    BC: tl.constexpr):  # fmt: skip
    """dx_c(q) = sum over d, i, j of dz_d(q - (i, j)) w_dc(i, j)."""
    kb = tl.program_id(0).to(tl.int64)
    q, c = tl.program_id(1) * BP + tl.arange(0, BP), tl.arange(0, BC)
    row, column = q // W, q % W
    theirs = dz + kb * (D * HO * WO) + (row * WO + column)
    weights = w + (kb // B) * w_k + c * (KI * KJ)
    acc_CQ = tl.zeros((BC, BP), dtype=tl.float32)
    for i in range(KI):
        right_row = (q < H * W) & (row >= i) & (row - i < HO)
        for d in range(D):
            for j in tl.static_range(KJ):
                mask = right_row & (column >= j) & (column - j < WO)
                dz_Q = tl.load(theirs + (d * (HO * WO) - i * WO - j), mask=mask, other=0.0)
                w_C = tl.load(weights + (d * (C * KI * KJ) + i * KJ + j), mask=c < C, other=0.0)
                acc_CQ += w_C[:, None] * dz_Q[None, :]
    tl.store(dx + kb * (C * H * W) + (c[:, None] * (H * W) + q[None, :]), acc_CQ,
             mask=(c < C)[:, None] & (q < H * W)[None, :])  # fmt: skip


@triton.jit
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


def _block(channels: int, places: int, sums: int = SUMS) -> dict[str, int]:
    """Return a block of outputs with all channels, and the warps for which a thread holds about ``sums`` of them."""
    block = min(_wide(places), max(32, 128 * sums // _wide(channels)))
    return {"BP": block, "num_warps": max(1, min(4, _wide(channels) * block // (32 * sums)))}


def _rows(*tensors: Tensor) -> list[Tensor]:
    """Make each model's values contiguous; models may have any stride."""
    return [a if a[0].is_contiguous() else a.contiguous() for a in tensors]


def forward(
    x: Tensor, w: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, run_mean: Tensor, run_var: Tensor,
    weight: Tensor, eps: float, momentum: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return out, z, mean, rstd, and the running statistics afterwards."""
    x = x if x[0, 0].is_contiguous() else x.contiguous()
    w, bias, gamma, beta = _rows(w, bias, gamma, beta)
    run_mean, run_var = run_mean.contiguous(), run_var.contiguous()
    (K, B, C, H, W), (_, D, _, KI, KJ) = x.shape, w.shape
    HO, WO = H - KI + 1, W - KJ + 1
    block = _block(D, HO * WO)
    blocks = triton.cdiv(HO * WO, block["BP"])
    z = x.new_empty(K, B, D, HO, WO)
    part = x.new_empty(K, B, blocks, 2, D)
    out = x.new_empty(K, B, D, HO // 2, WO // 2)
    mean, rstd, new_mean, new_var = (x.new_empty(K, D) for _ in range(4))
    shape: dict[str, Any] = {"C": C, "H": H, "W": W, "D": D, "KI": KI, "KJ": KJ, "HO": HO, "WO": WO}
    _convolve[(K * B, blocks)](
        x, w, bias, z, part, x.stride(0), x.stride(1), w.stride(0), bias.stride(0), B, **shape,
        **block, BD=_wide(D),
    )  # fmt: skip
    _statistics[(K,)](
        part, weight, run_mean, run_var, mean, rstd, new_mean, new_var, weight.stride(0), weight.stride(1),
        eps, momentum, B=B, D=D, P=HO * WO, BP=block["BP"], BD=_wide(D), BN=64,
    )  # fmt: skip
    grid = (K * B, triton.cdiv(out[0, 0].numel(), BLOCK_Q))
    _pool[grid](
        z, mean, rstd, gamma, beta, out, gamma.stride(0), beta.stride(0), B, D=D, HO=HO, WO=WO, BQ=BLOCK_Q
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
    T, block_q = C * KI * KJ, int(triton.next_power_of_2((HO // 2) * (WO // 2)))
    warps = max(1, min(4, block_q // 64))
    sums, dz = x.new_empty(K, B, D, 2), torch.empty_like(z)
    dgamma, dbeta = torch.empty_like(mean), torch.empty_like(mean)
    block_t = max(1, SUMS // _wide(D))
    columns = triton.cdiv(T + 1, block_t)
    samples = min(8, _wide(1 + K * B * columns // 2048))  # per program: more if there are many programs
    pieces = triton.cdiv(B, samples)
    part = x.new_empty(K, pieces, D, T + 1)
    shape: dict[str, Any] = {"C": C, "H": H, "W": W, "D": D, "KI": KI, "KJ": KJ, "HO": HO, "WO": WO}
    strides = gamma.stride(0), beta.stride(0)
    _sums[(K * B, D)](z, mean, rstd, gamma, beta, g, sums, *strides, B, D=D, HO=HO, WO=WO, BQ=block_q, num_warps=warps)
    _through[(K * B, D)](
        z, mean, rstd, gamma, beta, g, sums, weight, dz, dgamma, dbeta, *strides, weight.stride(0), weight.stride(1),
        B, D=D, HO=HO, WO=WO, BQ=block_q, BB=triton.next_power_of_2(B), num_warps=warps,
    )  # fmt: skip
    _weight_gradient[(K * pieces, columns)](
        x, dz, part, x.stride(0), x.stride(1), B, **shape, S=samples, BP=128, BD=_wide(D), BT=block_t, num_warps=4
    )
    dx = x.new_empty(0)
    if wants_x:
        dx = x.new_empty(K, B, C, H, W)
        block = _block(C, H * W, SUMS // 2)  # measured: half as many hide loads better here
        grid = (K * B, triton.cdiv(H * W, block["BP"]))
        _input_gradient[grid](dz, w, dx, w.stride(0), B, **shape, **block, BC=_wide(C))
    gradient = part.sum(1)
    return dx, gradient[..., :-1].reshape(w.shape), gradient[..., -1], dgamma, dbeta


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
