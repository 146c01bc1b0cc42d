"""Gradient variance at the model: how far mini-batches and clients are from the gradient of all samples.

At the frozen state of a round every client u holds n_u samples with gradients g_ui at the model it received
(engine/gradients.py explains the loss, and why there are no batch statistics). p_u = n_u / n. The study samples m of N
clients, each of which replies with probability q. A batch has b_u = min(b, n_u) samples:

    g_u, g    mean_i g_ui,   sum_u p_u g_u
    W_u       = (1 - b_u/n_u) / b_u * sum_i ||g_ui - g_u||^2 / (n_u - 1)     a batch drawn without replacement
    signal    = ||g||^2
    within    = sum_u p_u W_u                                                mini-batches around their client
    between   = sum_u p_u ||g_u - g||^2                                      clients: gradient dissimilarity
    snr       = signal / (within + between)
    sampling  = (1 - m/N) / (m (N - 1)) sum_u ||N p_u g_u - g||^2 + N/m (1 - q)/q sum_u p_u^2 ||g_u||^2
    batches   = N/(m q) sum_u p_u^2 W_u

By the law of total variance, within + between is the variance of one batch's gradient of a client drawn with
probability p_u, and sampling + batches is that of a round of one step, sum_{u in S} p_u N/(m q) g_u(batch), with
Horvitz-Thompson weights. All are squared norms summed over parameters, and exact: nothing is drawn at random.

Intervals are 95 %, over clients: the clients are treated as a random sample, and each is left out in turn (jackknife,
on the logarithm, because all numbers are positive). A client is always left out with all its samples.

N all clients, P parameters, L layers.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from fedncv.engine.gradients import Gradients, by_layer, of_run
from fedncv.engine.problem import Problem, State
from fedncv.layout import Layout
from fedncv.methods.base import weighted_sum

Numbers = NDArray[np.float64]
PREFIX = "variance_"


class Number(NamedTuple):
    """A value and its 95 % interval over clients; None if nothing can be measured without one of the clients."""

    value: float
    low: float | None
    high: float | None


class Split(NamedTuple):
    """See the top of the file; sampling and batches are None if clients are not sampled uniformly."""

    signal: Number
    within: Number
    between: Number
    snr: Number
    sampling: Number | None
    batches: Number | None


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How a study samples clients and batches."""

    batch: int
    per_round: int
    answering: float = 1.0
    """Probability q that a sampled client replies."""
    uniform: bool = True


class Scalars(NamedTuple):
    """The sums of the gradients that the numbers need."""

    n_N: Numbers
    spread_N: Numbers  # sum_i ||g_ui - g_u||^2
    deviation_N: Numbers  # ||g_u - g||^2
    along_N: Numbers  # <g_u - g, g>
    signal: float  # ||g||^2


def measure(problem: Problem, state: State) -> Split:
    """Return the numbers that a probed run writes, for any ``state``."""
    return split(of_run(problem, state), problem)


def measure_layers(problem: Problem, state: State) -> dict[str, Split]:
    """Return the split of every layer, by its name in the model; all except snr add up to those of ``measure``."""
    each = scalars(of_run(problem, state), problem.model.layout)
    return {name: split_of(one, draw_of(problem)) for name, one in zip(problem.model.layout.names, each, strict=True)}


def split(gradients: Gradients, problem: Problem) -> Split:
    return split_of(added(scalars(gradients, problem.model.layout)), draw_of(problem))


def draw_of(problem: Problem) -> Draw:
    config = problem.config
    return Draw(
        batch=config.batch_size,
        per_round=config.per_round,
        answering=1 - config.dropout,
        uniform=config.sampling == "uniform",
    )


def row(measured: Split) -> dict[str, Any]:
    """Return a row of metrics: variance_within, variance_within_low, variance_within_high and so on."""
    found: dict[str, Any] = {}
    for name, number in measured._asdict().items():
        if number is not None:
            for end, value in zip(("", "_low", "_high"), number, strict=True):
                found[PREFIX + name + end] = value if value is not None and np.isfinite(value) else None
    return found


# ---- gradients to scalars --------------------------------------------------------------------------------


def scalars(gradients: Gradients, layout: Layout) -> list[Scalars]:
    """Return the sums of every layer."""
    n_N = gradients.sizes_N.cpu().numpy()
    weight_N = (gradients.sizes_N / gradients.sizes_N.sum()).to(gradients.mean_NP.device)
    g_P = weighted_sum(weight_N, gradients.mean_NP)
    away_NP = gradients.mean_NP - g_P
    lengths = [shape.numel() for shape in layout.shapes]
    pieces = zip(torch.split(away_NP, lengths, dim=1), torch.split(g_P, lengths), strict=True)
    along_NL = torch.stack([(a.double() @ g.double()) for a, g in pieces], dim=1).cpu().numpy()
    deviation_NL = by_layer(away_NP, layout).cpu().numpy()
    signal_L = by_layer(g_P[None], layout)[0].cpu().numpy()
    spread_NL = gradients.spread_NL.cpu().numpy()
    columns = zip(spread_NL.T, deviation_NL.T, along_NL.T, signal_L, strict=True)
    return [Scalars(n_N, spread, deviation, along, float(s)) for spread, deviation, along, s in columns]


def added(layers: list[Scalars]) -> Scalars:
    """Add the squared norms and inner products of all layers."""
    parts = zip(*(layer[1:] for layer in layers), strict=True)
    return Scalars(layers[0].n_N, *(sum(part) for part in parts))  # type: ignore[arg-type]


# ---- scalars to numbers ----------------------------------------------------------------------------------


class Sums(NamedTuple):
    """Sums of a federation, or, as vectors, of the federations without each client."""

    clients: Any  # N
    signal: Any  # ||g||^2
    between: Any  # sum_u p_u ||g_u - g||^2
    within: Any  # sum_u p_u W_u
    squares: Any  # sum_u p_u^2 ||g_u||^2
    batches: Any  # sum_u p_u^2 W_u


def split_of(s: Scalars, draw: Draw) -> Split:
    whole, without = sums(s, draw.batch), left_out(s, draw.batch)
    values, others = numbers(whole, draw), None if without is None else numbers(without, draw)

    def number(name: str) -> Number:
        value = float(values[name])
        return Number(value, *(None, None) if others is None else jackknife(value, others[name]))

    return Split(*(number(name) if name in values else None for name in Split._fields))  # type: ignore[arg-type]


def batch_variance(n_N: Numbers, spread_N: Numbers, batch: int) -> Numbers:
    """Return W_u; 0 for a client with all its samples in one batch.

    >>> batch_variance(np.array([4.0, 2.0]), np.array([12.0, 1.0]), 2)  # (1 - 2/4) / 2 * 12 / 3
    array([1., 0.])
    """
    b_N = np.minimum(batch, n_N)
    several = n_N > b_N
    n, b = np.where(several, n_N, 2.0), np.where(several, b_N, 1.0)
    return np.where(several, (1 - b / n) / b * spread_N / (n - 1), 0.0)


def sums(s: Scalars, batch: int) -> Sums:
    p_N, W_N = s.n_N / s.n_N.sum(), batch_variance(s.n_N, s.spread_N, batch)
    return Sums(
        clients=float(len(p_N)),
        signal=s.signal,
        between=p_N @ s.deviation_N,
        within=p_N @ W_N,
        squares=p_N**2 @ squared_norms(s),
        batches=p_N**2 @ W_N,
    )


def squared_norms(s: Scalars) -> Numbers:
    """||g_u||^2 = ||(g_u - g) + g||^2, 0 for a client without samples."""
    return np.where(s.n_N > 0, s.deviation_N + 2 * s.along_N + s.signal, 0.0)


def left_out(s: Scalars, batch: int) -> Sums | None:
    """Return the sums of the N federations without one client; None if one of them would have no samples.

    Without u, and with k = p_u / (1 - p_u), g moves by -k (g_u - g), and the others' weights grow by 1 / (1 - p_u).
    """
    p_N, W_N, whole = s.n_N / s.n_N.sum(), batch_variance(s.n_N, s.spread_N, batch), sums(s, batch)
    rest_N = 1 - p_N
    if len(p_N) < 3 or not (rest_N > 1e-12).all():
        return None
    k_N = p_N / rest_N
    return Sums(
        clients=whole.clients - 1,
        signal=whole.signal - 2 * k_N * s.along_N + k_N**2 * s.deviation_N,
        between=(whole.between - p_N * s.deviation_N) / rest_N - k_N**2 * s.deviation_N,
        within=(whole.within - p_N * W_N) / rest_N,
        squares=(whole.squares - p_N**2 * squared_norms(s)) / rest_N**2,
        batches=(whole.batches - p_N**2 * W_N) / rest_N**2,
    )


def numbers(of: Sums, draw: Draw) -> dict[str, Any]:
    """Apply the formulas at the top of the file; sum_u ||N p_u g_u - g||^2 = N^2 sum_u p_u^2 ||g_u||^2 - N ||g||^2."""
    noise = of.within + of.between
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {"signal": of.signal, "within": of.within, "between": of.between, "snr": of.signal / noise}
    if not draw.uniform:
        return found
    N, q = of.clients, draw.answering
    m = min(draw.per_round, N)
    spread = np.maximum(N**2 * of.squares - N * of.signal, 0.0)
    drawing = (1 - m / N) / (m * max(N - 1, 1)) * spread
    found["sampling"] = drawing + N / m * (1 - q) / q * of.squares
    found["batches"] = N / (m * q) * of.batches
    return found


def jackknife(value: float, without_N: Numbers, level: float = 0.95) -> tuple[float | None, float | None]:
    """exp(log value -+ t se), se^2 = (N - 1)/N sum_u (log value without u - their mean)^2, t with N - 1 degrees."""
    if not (value > 0 and np.isfinite(value) and (without_N > 0).all() and np.isfinite(without_N).all()):
        return None, None
    N, logs = len(without_N), np.log(without_N)
    deviation = np.sqrt((N - 1) / N * np.square(logs - logs.mean()).sum())
    width = float(stats.t.ppf((1 + level) / 2, N - 1) * deviation)
    return float(value * np.exp(-width)), float(value * np.exp(width))
