"""Accuracy against the privacy budget: 100, 1,000 and 10,000 clients, client-level differential privacy.

    PYTHONPATH=bench python bench/privacy.py --data-dir DIR --out docs/results/privacy.jsonl
    PYTHONPATH=bench python bench/privacy.py --drift --out docs/results/privacy_drift.jsonl
    PYTHONPATH=bench python bench/privacy.py --figure docs/results/privacy.jsonl docs/figures/privacy.png

Softmax regression (510 numbers) on the first 50 principal components of Fashion-MNIST, which count as public.
Dirichlet(1) partition, a tenth of each client's samples tests. Poisson sampling; delta 1e-5; the noise is found for the
planned rounds. Clip and learning rate were chosen by three runs without noise, which no budget pays for. A row has the
accuracy of the shared model on all test samples after the last round. --drift measures the noise in SCAFFOLD's c
instead: its distance from the mean of what clients keep, on the digits.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from labels import linear, pca
from torch import Tensor, nn

from fedncv.config import RunConfig
from fedncv.engine import budget
from fedncv.engine.problem import State, build, start
from fedncv.engine.sequential import SequentialEngine, one_thread
from fedncv.engine.stacked_scores import ScoringEngine

COHORTS = {100: 50, 1000: 200, 10_000: 500}  # clients -> expected clients of a round
BUDGETS = (0.5, 1.0, 2.0, 4.0, 8.0, math.inf)
OTHERS = ("scaffold", "fedncv-sums")  # at 1,000 clients
CONTROL = 2.0  # c_u' - c_u is about Delta / (lr * 2 steps): it takes little of the clip
ROUNDS, LR, CLIP, SEEDS = 20, 8.0, 2.0, (0, 1, 2)
DECAYS, DRIFT_ROUNDS = (0.0, 0.3, 1.0), 40


def method(base: str, epsilon: float) -> str:
    if epsilon == math.inf:
        return f"{base}+dp:clip={CLIP},noise=0" + (f",control={CONTROL}" if base in OTHERS else "")
    return f"{base}+dp:clip={CLIP},epsilon={epsilon:g}" + (f",control={CONTROL}" if base in OTHERS else "")


def rows(bases: tuple[str, ...], clients: int, budgets: tuple[float, ...]) -> Iterator[dict[str, Any]]:
    """Yield a row for each method, budget and seed; the seeds train together."""
    data = pca()
    for base in bases:
        for epsilon in budgets:
            config = RunConfig(
                method=method(base, epsilon), clients=clients, per_round=COHORTS[clients], rounds=ROUNDS, epochs=1,
                batch_size=32, lr=LR, sampling="poisson", partition="dirichlet:alpha=1,min_samples=1", test_share=0.1,
                model="mlp",
            )  # fmt: skip
            began = time.perf_counter()
            problems = [build(_seeded(config, seed), data=data, model=linear) for seed in SEEDS]
            engine = ScoringEngine(problems)
            states = [start(problem) for problem in problems]
            with one_thread():
                for _ in range(ROUNDS):
                    settled = engine.run_rounds(states)
                    states = [_state(each) for each in settled]
                scores = engine.before(states)
            for seed, problem, state, score in zip(SEEDS, problems, states, scores, strict=True):
                spent = budget.row(problem, state)["epsilon"]
                yield {
                    "method": base, "clients": clients, "drawn": COHORTS[clients], "rounds": ROUNDS, "clip": CLIP,
                    "noise": budget.release(problem, state).noise, "budget": None if epsilon == math.inf else epsilon,
                    "epsilon": spent, "delta": 1e-5, "seed": seed, "accuracy": score["before"],
                    "seconds": round(time.perf_counter() - began, 1),
                }  # fmt: skip


def _seeded(config: RunConfig, seed: int) -> RunConfig:
    return RunConfig(**vars(config) | {"seed": seed})


def _state(settled: Any) -> State:
    if isinstance(settled, ArithmeticError):
        raise settled
    state: State = settled[0]
    return state


def drift() -> Iterator[dict[str, Any]]:
    """Yield |c - mean c_u| / |mean c_u|, with and without decay, over the rounds of SCAFFOLD on the digits."""
    for decay in DECAYS:
        config = RunConfig(
            method=f"scaffold+dp:clip=1,noise=1,control=0.2,decay={decay}", clients=100, per_round=20,
            rounds=DRIFT_ROUNDS, epochs=1, lr=0.1, sampling="poisson", partition="dirichlet:alpha=1", model="mlp",
        )  # fmt: skip
        problem = build(config, model=flat)
        engine, state = SequentialEngine([problem]), start(problem)
        for t in range(1, DRIFT_ROUNDS + 1):
            with one_thread():
                state = _state(engine.run_rounds([state])[0])
            if t in (1, 2, 5) or t % 10 == 0:
                mean_P = _mean([kept.own for kept in state.kept.values()], config.clients)
                c_P = state.server.server.c_P
                yield {
                    "decay": decay, "round": t, "error": float((c_P - mean_P).norm()), "mean": float(mean_P.norm()),
                }  # fmt: skip


def flat(_shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), linear((784,), outputs))


def _mean(rows: list[Tensor], clients: int) -> Tensor:
    return torch.stack(rows).sum(dim=0) / clients


def figure(path: Path, out: Path) -> None:
    """Draw accuracy against epsilon, one line for each number of clients, seeds as dots."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = [json.loads(line) for line in path.read_text().splitlines()]
    lines = dict.fromkeys((row["method"], row["clients"]) for row in found)
    axes = plt.subplots(figsize=(7, 4.2), layout="constrained")[1]
    finite = [b for b in BUDGETS if b < math.inf]
    places = {b: float(i) for i, b in enumerate(finite)} | {None: len(finite) + 0.5}
    for i, (base, clients) in enumerate(lines):
        mine = [row for row in found if (row["method"], row["clients"]) == (base, clients)]
        budgets = list(dict.fromkeys(row["budget"] for row in mine))
        means = [_average([row["accuracy"] for row in mine if row["budget"] == b]) for b in budgets]
        style = "-" if base == "fedavg" else "--"
        axes.plot([places[b] for b in budgets], means, style, color=f"C{i}", label=f"{base}, {clients:,} clients")
        axes.plot([places[row["budget"]] for row in mine], [100 * row["accuracy"] for row in mine], ".", color=f"C{i}")
    axes.set_xticks([*places.values()], [*(f"{b:g}" for b in finite), "no noise"])
    axes.set_xlabel("ε spent by 20 rounds, δ = 1e-5, one client more or fewer")
    axes.set_ylabel("accuracy before local training, %")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    out.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(out, dpi=130)


def _average(values: list[float]) -> float:
    return 100 * sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--drift", action="store_true")
    parser.add_argument("--figure", nargs=2, type=Path, metavar=("ROWS", "PNG"))
    parser.add_argument("--clients", type=int, nargs="+", default=list(COHORTS))
    arguments = parser.parse_args()
    if arguments.figure:
        figure(*arguments.figure)
        return
    if arguments.data_dir:
        os.environ["FEDNCV_DATA"] = arguments.data_dir
    found = drift() if arguments.drift else _all(arguments.clients)
    with arguments.out.open("a") as file:
        for row in found:
            print(json.dumps(row), file=file, flush=True)
            print(row, flush=True)


def _all(clients: list[int]) -> Iterator[dict[str, Any]]:
    for number in clients:
        yield from rows(("fedavg",), number, BUDGETS)
        if number == 1000:
            yield from rows(OTHERS, number, (1.0, 4.0, math.inf))


if __name__ == "__main__":
    main()
