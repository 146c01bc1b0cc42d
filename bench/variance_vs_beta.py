"""Plot sampling variance against β for a real round: docs/figures/variance_vs_beta.png, and its numbers.

    python bench/variance_vs_beta.py

FedAvg runs on the built-in digits while the server stores every client's last update. Then the model is
frozen, all clients train once, and the variance of the server's estimate over the draw is computed in closed
form and by enumerating all draws. The β from earlier rounds' scalars is marked as well.
"""

from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedncv.config import RunConfig
from fedncv.engine.local import train
from fedncv.engine.problem import Problem, State, arrivals, build, start
from fedncv.engine.round import Reply, aggregate, draw
from fedncv.engine.sequential import one_thread
from fedncv.estimators import (
    Moments,
    horvitz_thompson_weights,
    no_moments,
    observe,
    optimal_beta,
    running_beta,
    self_normalised_weights,
    squared_correlation,
    uniform_covariance,
)

CONFIG = RunConfig(clients=20, per_round=5, rounds=20, lr=0.05, epochs=5)
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "variance_vs_beta.png"
FORGET = 0.9


class Frozen(NamedTuple):
    """A round at a frozen model: all clients' new updates, and the server's memory of them."""

    p_N: Tensor
    delta_NP: Tensor
    h_NP: Tensor
    seen_N: Tensor
    moments: Moments


def updates(problem: Problem, state: State, ids: np.ndarray) -> list[Reply]:
    """Train these clients from the state's model; return their replies."""
    replies = []
    for arrival in arrivals(problem, state, ids):
        trained = train(problem, state.round, arrival)
        assert trained is not None
        replies.append(Reply(arrival.client, trained))
    return replies


def frozen_round() -> Frozen:
    problem = build(CONFIG)
    state = start(problem)
    num_clients = CONFIG.clients
    p_N = problem.federation.sizes_N / problem.federation.sizes_N.sum()
    h_NP = torch.zeros(num_clients, len(problem.model.start_P), dtype=torch.float64)
    seen_N = torch.zeros(num_clients, dtype=torch.bool)
    moments = no_moments()
    for _ in range(CONFIG.rounds):
        replies = updates(problem, state, draw(problem, state.round).ids)
        S = [reply.client for reply in replies]
        delta_SP = torch.stack([reply.trained.up.delta_P for reply in replies]).double()
        p_S1 = p_N[S, None]
        moments = observe(moments, p_S1 * delta_SP, p_S1 * h_NP[S], forget=FORGET)
        h_NP[S], seen_N[S] = delta_SP, True
        state, _ = aggregate(problem, state, replies)
    replies = updates(problem, state, np.arange(num_clients))
    delta_NP = torch.stack([reply.trained.up.delta_P for reply in replies]).double()
    return Frozen(p_N, delta_NP, h_NP, seen_N, moments)


def closed_form(r: Frozen, beta: float) -> float:
    """Return the variance of the Horvitz–Thompson estimate over uniform draws, relative to ‖Σ p Δ‖²."""
    units_NP = len(r.p_N) * r.p_N[:, None] * (r.delta_NP - beta * r.h_NP)
    return (uniform_covariance(units_NP, units_NP, num_drawn=CONFIG.per_round) / full_square(r)).item()


def full_square(r: Frozen) -> Tensor:
    return (r.p_N @ r.delta_NP).square().sum()


def enumerated(r: Frozen, beta: float, weights_DN: Tensor) -> tuple[float, float]:
    """Return variance and squared bias over all draws, relative to ‖Σ p Δ‖², computed from inner products.

    An estimate's error is Σ_u (ω_u − p_u)(Δ_u − β h_u), with ω_u = 0 for clients not drawn.
    """
    rest_NP = r.delta_NP - beta * r.h_NP
    gram_NN = rest_NP @ rest_NP.T / full_square(r)
    error_DN = weights_DN - r.p_N
    bias_N = error_DN.mean(dim=0)
    bias2 = (bias_N @ gram_NN @ bias_N).item()
    return ((error_DN @ gram_NN) * error_DN).sum(dim=1).mean().item() - bias2, bias2


def all_weights(r: Frozen) -> tuple[Tensor, Tensor]:
    """Return Horvitz–Thompson and self-normalised ω of every draw, zero for clients not drawn."""
    num_clients, m = len(r.p_N), CONFIG.per_round
    draws_DS = torch.tensor(list(combinations(range(num_clients), m)))
    inclusion_S = torch.full((m,), m / num_clients, dtype=torch.float64)
    zero_DN = torch.zeros(len(draws_DS), num_clients, dtype=torch.float64)
    ht_DS = torch.func.vmap(lambda p_S: horvitz_thompson_weights(p_S, inclusion_S))(r.p_N[draws_DS])
    own_DS = torch.func.vmap(self_normalised_weights)(r.p_N[draws_DS])
    return zero_DN.scatter(1, draws_DS, ht_DS), zero_DN.scatter(1, draws_DS, own_DS)


class Curves(NamedTuple):
    """All plotted and printed numbers, relative to the full update's squared norm."""

    beta_G: np.ndarray
    closed_G: np.ndarray  # Horvitz–Thompson variance, closed form
    listed_G: np.ndarray  # the same over all draws
    error_G: np.ndarray  # self-normalised mean squared error over all draws
    best: float
    rho2: float
    running: float
    measured: float  # the minimum of the enumerated variance, on a fine grid
    num_remembered: int
    num_draws: int

    def at(self, beta: float) -> float:
        """Return the variance at β, a parabola through three points of the enumeration."""
        return float(np.polyval(np.polyfit(self.beta_G, self.listed_G, 2), beta))


def compute() -> Curves:
    r = frozen_round()
    ht_DN, own_DN = all_weights(r)
    p_N1 = r.p_N[:, None]
    best, rho2 = (f(p_N1 * r.delta_NP, p_N1 * r.h_NP).item() for f in (optimal_beta, squared_correlation))
    beta_G, fine_G = np.linspace(-0.25, 1.5, 36), np.linspace(-0.25, 1.5, 1751)
    return Curves(
        beta_G=beta_G,
        closed_G=np.array([closed_form(r, beta) for beta in beta_G]),
        listed_G=np.array([enumerated(r, beta, ht_DN)[0] for beta in beta_G]),
        error_G=np.array([sum(enumerated(r, beta, own_DN)) for beta in beta_G]),
        best=best,
        rho2=rho2,
        running=running_beta(r.moments).item(),
        measured=float(fine_G[np.argmin([enumerated(r, beta, ht_DN)[0] for beta in fine_G])]),
        num_remembered=int(r.seen_N.sum()),
        num_draws=len(ht_DN),
    )


def report(c: Curves) -> None:
    print(f"digits, {CONFIG.clients} clients, {CONFIG.per_round} per round, frozen after {CONFIG.rounds} rounds,")
    print(f"{c.num_remembered} clients in memory, {c.num_draws} draws; relative to the full update's squared norm:")
    print(f"Horvitz-Thompson variance {c.at(0):.3f} at beta 0, {c.at(1):.3f} at 1, {c.at(c.best):.3f} at {c.best:.3f}")
    print(
        f"beta* = {c.best:.3f}, measured minimum at {c.measured:.3f}, (1 - rho^2) Var(0) = {(1 - c.rho2) * c.at(0):.3f}"
    )
    print(f"largest difference of closed form and enumeration {np.abs(c.closed_G - c.listed_G).max():.1e}")
    print(f"beta from earlier rounds {c.running:.3f}: variance {c.at(c.running):.3f}")
    least = int(np.argmin(c.error_G))
    zero = int(np.argmin(np.abs(c.beta_G)))
    print(f"self-normalised mean squared error {c.error_G[zero]:.3f} at beta {c.beta_G[zero]:.2f}, ", end="")
    print(f"least {c.error_G[least]:.3f} near {c.beta_G[least]:.2f}")


def draw_figure(c: Curves) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    blue, low, high = "#0072B2", c.at(c.best), c.at(0)
    axes.plot(c.beta_G, c.closed_G, color=blue, label="Horvitz–Thompson, variance: closed form")
    axes.plot(
        c.beta_G[::2], c.listed_G[::2], "o", color=blue, markersize=4, label=f"the same over all {c.num_draws:,} draws"
    )
    axes.plot(c.beta_G, c.error_G, "--", color="#D55E00", label="self-normalised, mean squared error over all draws")
    lowest = f"measured minimum, β = {c.measured:.3f}"
    axes.vlines(c.measured, 0, high, color="black", linewidth=1, linestyle=":", label=lowest)
    axes.plot(c.best, low, "*", color="black", markersize=15, zorder=3, label=f"β* = Cov/Var = {c.best:.3f}")
    running = f"β from earlier rounds' scalars, {c.running:.3f}"
    axes.plot(c.running, c.at(c.running), "^", color="#009E73", markersize=9, zorder=3, label=running)
    axes.axhline(high, color="grey", linewidth=0.8)
    arrow = {"arrowstyle": "<->", "color": "grey"}
    axes.hlines(low, c.best, 1.3, color="grey", linewidth=0.8)
    axes.annotate("", xy=(1.25, low), xytext=(1.25, high), arrowprops=arrow)
    removed = f"removed: ρ² = {c.rho2:.2f} "
    axes.text(1.25, (high + low) / 2, removed, color="dimgrey", ha="right", va="center")
    axes.text(c.beta_G[-1], high, "Var(0), no memory ", color="dimgrey", ha="right", va="bottom")
    axes.set_ylim(0, 1.25 * c.closed_G.max())
    axes.set_xlim(c.beta_G[0], c.beta_G[-1])
    axes.set_xlabel("β   (0: no memory; 1: all of it, as in FedVARP)")
    axes.set_ylabel("spread over the draw / ‖full update‖²")
    where = f"{CONFIG.per_round} of {CONFIG.clients} clients, Dirichlet(0.1)"
    axes.set_title(
        f"One round on the digits, {where}, frozen after {CONFIG.rounds} rounds of FedAvg", loc="left", fontsize=11
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper center", fontsize=9)
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    with one_thread():
        curves = compute()
    report(curves)
    draw_figure(curves)
