"""Statements about client drift: fixed points of rounds of local training on quadratics.

Client u minimises a_u/2 (x − b_u)² by K full gradient steps, y ← y − η (a_u (y − b_u) − e_u). All clients
take part, and the server steps by Σ_u p_u Δ_u. A round maps the state (x, c_1, …, c_N) affinely, so its
fixed point is the solution of one linear system; no long run is needed. Derivations:
docs/theory.md, section 6.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from fedncv.estimators import (
    drift_corrections,
    horvitz_thompson_weights,
    raw_gradient,
    recentring,
    server_estimate,
    weighted_mean,
    weighted_sum,
)
from fedncv.theory.rounds import Round, Weights, rounds, self_normalised, uniform_ht
from fedncv.theory.statement import Finding, Statement, distance, tensor

LR = 0.1


class Quadratics(NamedTuple):
    """Curvatures, minimisers, sizes and coefficients of the clients, and the number of local steps."""

    curvature: tuple[float, ...]
    minimiser: tuple[float, ...]
    sizes: tuple[int, ...]
    alpha: tuple[float, ...]
    num_steps: int

    def __str__(self) -> str:
        numbers = (self.curvature, self.minimiser, self.sizes, self.alpha)
        a, b, n, alpha = (f"({', '.join(f'{x:g}' for x in row)})" for row in numbers)
        return f"a = {a}, b = {b}, n = {n}, α = {alpha}, K = {self.num_steps}"

    @property
    def p_N(self) -> Tensor:
        return tensor(self.sizes) / sum(self.sizes)

    @property
    def optimum(self) -> float:
        weight_N = self.p_N * tensor(self.curvature)
        return (weight_N @ tensor(self.minimiser) / weight_N.sum()).item()

    @property
    def fedavg_rest(self) -> float:
        """Σ_u p_u A_u (x − b_u) = 0 with A_u = 1 − (1 − η a_u)^K, the share of its way to b_u that client u goes."""
        weight_N = self.p_N * (1 - (1 - LR * tensor(self.curvature)) ** self.num_steps)
        return (weight_N @ tensor(self.minimiser) / weight_N.sum()).item()


def local_training(q: Quadratics, x: Tensor, e_N: Tensor) -> Tensor:
    """Δ_u = x − y_u after K steps."""
    a_N, b_N = tensor(q.curvature), tensor(q.minimiser)
    y_N = x.expand_as(b_N)
    for _ in range(q.num_steps):
        y_N = y_N - LR * (a_N * (y_N - b_N) - e_N)
    return x - y_N


def one_round(q: Quadratics, state: Tensor, *, recentred: bool, raw: bool) -> Tensor:
    """Map (x, c_1, …, c_N) to the state one round later; ``raw`` adds e_u back into the memory."""
    x, c_N1 = state[0], state[1:, None]
    n_N, alpha_N = tensor(q.sizes), tensor(q.alpha)
    c, alpha_c = weighted_sum(c_N1, n_N), weighted_sum(c_N1, n_N * alpha_N)
    r_1 = recentring(c, alpha_c) if recentred else torch.zeros(1, dtype=torch.float64)
    e_N = drift_corrections(c_N1, alpha_N, weighted_mean(c), r_1)[:, 0]
    delta_N = local_training(q, x, e_N)
    c_new_N = raw_gradient(delta_N, e_N if raw else torch.zeros_like(e_N), lr=LR, steps=q.num_steps)
    return torch.cat([(x - q.p_N @ delta_N).reshape(1), c_new_N])


def rest(q: Quadratics, *, recentred: bool = True, raw: bool = True) -> Tensor:
    """Return the fixed point s of a round: s = J s + step(0), with J computed one unit vector at a time."""
    step: Callable[[Tensor], Tensor] = lambda state: one_round(q, state, recentred=recentred, raw=raw)  # noqa: E731
    identity = torch.eye(1 + len(q.sizes), dtype=torch.float64)
    offset = step(torch.zeros_like(identity[0]))
    jacobian = torch.stack([step(unit) - offset for unit in identity], dim=1)
    state: Tensor = torch.linalg.solve(identity - jacobian, offset)
    return state


def federations(alphas: tuple[tuple[float, float], ...], steps: tuple[int, ...]) -> Iterator[tuple[Quadratics]]:
    """Yield federations of two clients, ordered by K, so that the smallest counterexample has the fewest steps."""
    for num_steps, sizes, curvature in product(steps, ((1, 1), (1, 3)), ((1.0, 2.0), (1.0, 4.0))):
        for alpha in alphas:
            yield (Quadratics(curvature, (0.0, 1.0), sizes, alpha, num_steps),)


ONE, MANY = (1,), (1, 2, 5)


def all_off() -> Iterator[tuple[Quadratics]]:
    return federations(((0.0, 0.0),), MANY)


def all_on() -> Iterator[tuple[Quadratics]]:
    return federations(((1.0, 1.0),), MANY)


def partly_on() -> Iterator[tuple[Quadratics]]:
    return federations(((0.5, 0.5), (0.2, 0.8)), MANY)


def equal_alphas() -> Iterator[tuple[Quadratics]]:
    return federations(((0.0, 0.0), (0.25, 0.25), (0.5, 0.5), (1.0, 1.0)), MANY)


def unequal_one_step() -> Iterator[tuple[Quadratics]]:
    return federations(((0.5, 0.5), (0.2, 0.8), (1.0, 0.0)), ONE)


def at_optimum(q: Quadratics, *, recentred: bool = True, raw: bool = True) -> Finding:
    x = rest(q, recentred=recentred, raw=raw)[0].item()
    return Finding(abs(x - q.optimum), f"{q}: fixed point {x:.4f}, optimum {q.optimum:.4f}")


def without_recentring(q: Quadratics) -> Finding:
    return at_optimum(q, recentred=False)


def with_corrected_memory(q: Quadratics) -> Finding:
    return at_optimum(q, raw=False)


def corrected_memory_is_a_smaller_alpha(q: Quadratics) -> Finding:
    """With c_u⁺ = Δ_u/(ηK): c_u = ḡ_u − α c_u at the fixed point, so e_u = α/(1 + α) ḡ_u."""
    smaller = q._replace(alpha=tuple(alpha / (1 + alpha) for alpha in q.alpha))
    corrected, raw = rest(q, raw=False)[0].item(), rest(smaller)[0].item()
    return Finding(abs(corrected - raw), f"{q}: {corrected:.4f} against {raw:.4f}")


def at_fedavgs_rest(q: Quadratics) -> Finding:
    x = rest(q)[0].item()
    return Finding(abs(x - q.fedavg_rest), f"{q}: fixed point {x:.4f}, FedAvg's {q.fedavg_rest:.4f}")


def rests_between(q: Quadratics) -> Finding:
    """Equal α: Σ_u p_u κ_u a_u (x − b_u) = 0, κ_u = k_u/(1 − α + α k_u), k_u = A_u/(η K a_u)."""
    a_N, alpha = tensor(q.curvature), q.alpha[0]
    k_N = (1 - (1 - LR * a_N) ** q.num_steps) / (LR * q.num_steps * a_N)
    weight_N = q.p_N * k_N / (1 - alpha + alpha * k_N) * a_N
    expected, x = (weight_N @ tensor(q.minimiser) / weight_N.sum()).item(), rest(q)[0].item()
    return Finding(abs(x - expected), f"{q}: fixed point {x:.4f}, expected {expected:.4f}")


def fedavg_finds_the_optimum(q: Quadratics) -> Finding:
    return Finding(abs(q.fedavg_rest - q.optimum), f"{q}: fixed point {q.fedavg_rest:.4f}, optimum {q.optimum:.4f}")


def mean_raw_gradient_vanishes(q: Quadratics) -> Finding:
    mean = (q.p_N @ rest(q)[1:]).item()
    return Finding(abs(mean), f"{q}: c̄ = {mean:.4g} at the fixed point")


def corrections_cancel(q: Quadratics) -> Finding:
    """Check with one memory, c = (1, −3)."""
    c_N1, n_N, alpha_N = tensor([[1.0], [-3.0]]), tensor(q.sizes), tensor(q.alpha)
    c, alpha_c = weighted_sum(c_N1, n_N), weighted_sum(c_N1, n_N * alpha_N)
    e_N1 = drift_corrections(c_N1, alpha_N, weighted_mean(c), recentring(c, alpha_c))
    return Finding(abs((q.p_N @ e_N1).item()), f"{q}")


def every_draw_stays(q: Quadratics, beta: float) -> Finding:
    """Draw one of two clients at FedAvg's fixed point, with h = Δ, and find how far a draw moves the model."""
    x, p_N, zero_N = tensor(q.fedavg_rest), q.p_N, torch.zeros(2, dtype=torch.float64)
    delta_N1 = local_training(q, x, zero_N)[:, None]
    omega_N = horvitz_thompson_weights(p_N, tensor([0.5, 0.5]))
    moves = [server_estimate(delta_N1[[u]], delta_N1[[u]], omega_N[[u]], p_N @ delta_N1, beta=beta) for u in range(2)]
    worst = max(distance(move, torch.zeros_like(move)) for move in moves)
    return Finding(worst, f"{q}: one client drawn moves the model by {worst:.4f}")


def with_memory(q: Quadratics) -> Finding:
    return every_draw_stays(q, 1.0)


def without_memory(q: Quadratics) -> Finding:
    return every_draw_stays(q, 0.0)


def one_step_is_server_memory(r: Round, _beta: float) -> Finding:
    """Δ_u = η (g_u − e_u) with K = 1; h_u = η c_u, and a client never seen has the mean of those seen in both."""
    return one_step(r, self_normalised)


def one_step_is_server_memory_ht(r: Round, _beta: float) -> Finding:
    return one_step(r, uniform_ht)


def one_step(r: Round, weights: Weights) -> Finding:
    n_N, seen_N = tensor(r.sizes), tensor([float(h is not None) for h in r.memory])
    mean_c = weighted_mean(weighted_sum(r.h_N1, n_N * seen_N))
    c_N1 = torch.where(seen_N[:, None] > 0, r.h_N1, mean_c)
    e_N1 = drift_corrections(c_N1, torch.ones_like(n_N), mean_c, torch.zeros_like(mean_c))
    worst = 0.0
    for S in r.draws:
        omega_S, g_S1 = weights(r, S), r.delta_N1[S]
        corrected = omega_S @ (LR * (g_S1 - e_N1[S]))
        remembered = server_estimate(LR * g_S1, LR * c_N1[S], omega_S, LR * mean_c, beta=1.0)
        worst = max(worst, distance(corrected, remembered))
    return Finding(worst, f"{r}")


def rounds_with_samples() -> Iterator[tuple[Round, float]]:
    """In every draw somebody has samples."""
    yield from ((r, 1.0) for r in rounds() if all(sum(r.sizes[u] for u in S) for S in r.draws))


DRIFT = "docs, section 6"
STATEMENTS = (
    Statement("corrections cancel", "Σ_u p_u e_u = 0 for unequal α_u", DRIFT, unequal_one_step, corrections_cancel),
    Statement(
        "limit α = 0",
        "without correction the fixed point is FedAvg's, Σ_u p_u A_u (x − b_u) = 0",
        DRIFT,
        all_off,
        at_fedavgs_rest,
    ),
    Statement(
        "FedAvg drifts",
        "FedAvg's fixed point is the optimum for every K",
        DRIFT,
        all_off,
        fedavg_finds_the_optimum,
    ),
    Statement(
        "limit α = 1", "with α = 1 and raw memory the fixed point is the optimum for every K", DRIFT, all_on, at_optimum
    ),
    Statement(
        "corrected memory",
        "with α = 1 and c_u⁺ = Δ_u/(ηK), e_u not added back, the fixed point is the optimum",
        DRIFT,
        all_on,
        with_corrected_memory,
    ),
    Statement(
        "corrected memory is a smaller α",
        "c_u⁺ = Δ_u/(ηK) with α has the fixed point of raw memory with α/(1 + α)",
        DRIFT,
        all_on,
        corrected_memory_is_a_smaller_alpha,
    ),
    Statement(
        "recentred, one step",
        "with K = 1 and recentring, the fixed point is the optimum for any α_u",
        DRIFT,
        unequal_one_step,
        at_optimum,
    ),
    Statement(
        "not recentred, one step",
        "with K = 1 and no recentring, the fixed point is the optimum for any α_u",
        DRIFT,
        unequal_one_step,
        without_recentring,
    ),
    Statement(
        "recentred, any K",
        "with recentring the mean raw gradient c̄ is 0 at the fixed point",
        DRIFT,
        partly_on,
        mean_raw_gradient_vanishes,
    ),
    Statement(
        "α below one, many steps",
        "with 0 < α_u < 1 and recentring the fixed point is the optimum for every K",
        DRIFT,
        partly_on,
        at_optimum,
    ),
    Statement(
        "equal α, any K",
        "with equal α the fixed point is Σ_u p_u κ_u a_u (x − b_u) = 0, κ_u = k_u/(1 − α + α k_u)",
        DRIFT,
        equal_alphas,
        rests_between,
    ),
    Statement(
        "one step: one memory for both levels",
        "with K = 1, α = 1 and self-normalised weights the drift-corrected update is the server's estimate with β = 1 "
        "and h = η c, in every draw",
        DRIFT,
        rounds_with_samples,
        one_step_is_server_memory,
    ),
    Statement(
        "one step, Horvitz–Thompson",
        "the same with Horvitz–Thompson weights",
        DRIFT,
        rounds_with_samples,
        one_step_is_server_memory_ht,
    ),
    Statement(
        "server memory at rest",
        "with h = Δ and β = 1, no draw moves the model from FedAvg's fixed point",
        DRIFT,
        all_off,
        with_memory,
    ),
    Statement(
        "no server memory at rest",
        "with β = 0, no draw moves the model from FedAvg's fixed point",
        DRIFT,
        all_off,
        without_memory,
    ),
)
