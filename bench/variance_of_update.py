"""Probe the update without the fedncv command: rows as JSON lines, and the cost of the probes.

    python bench/variance_of_update.py fedavg scaffold fedvarp fedncv --device cuda --out rows.jsonl
    python bench/variance_of_update.py fedavg fedncv --cost --device cuda

`fedncv variance --show rows.jsonl` prints the table and plots the figures; --gallery does so for docs/gallery.md.
--cost prints for every method, at the state after two rounds, the seconds of both local trainings of all clients that
the probe needs, and of the rest of the probe.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedncv.config import RunConfig
from fedncv.engine.problem import build
from fedncv.engine.sequential import one_thread
from fedncv.observatory.compare import rows_of
from fedncv.observatory.everyone import engine_for, everyone
from fedncv.observatory.shadow import states_along
from fedncv.observatory.update import probe

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--partition", nargs="+", default=["dirichlet:alpha=0.1"])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--reference", default="fedavg")
    parser.add_argument("--at", default="20,40,60,80,100")
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", default="")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--gallery", action="store_true")
    arguments = parser.parse_args()
    if arguments.gallery:
        return gallery()
    if not arguments.methods:
        parser.error("name one or more methods")
    at = [int(t) for t in arguments.at.split(",")]
    config = RunConfig(
        data=arguments.data, model=arguments.model, partition=arguments.partition[0], clients=arguments.clients,
        per_round=arguments.per_round, rounds=max(at), lr=arguments.lr, epochs=arguments.epochs,
        device=arguments.device,
    )  # fmt: skip
    if arguments.cost:
        for method in arguments.methods:
            write(arguments.out, cost(config, method, arguments.draws))
        return
    began = time.perf_counter()
    configs = [
        replace(config, partition=partition, seed=int(seed))
        for partition in arguments.partition
        for seed in arguments.seeds.split(",")
    ]
    for row in rows_of(configs, arguments.methods, reference=arguments.reference, at=at, num_draws=arguments.draws):
        write(arguments.out, row)
        words = [f"{row['method']:28s} {row['partition']} seed {row['seed']} round {row['round']:3d}"]
        words += [f"{name} {row[name] / row['full2']:8.4f}" for name in ("mse", "bias2", "plain")]
        words += [f"times {row['times']:.2f}", f"{time.perf_counter() - began:.0f} s"]
        print("  ".join(words), flush=True)


def cost(config: RunConfig, method: str, num_draws: int) -> dict[str, Any]:
    """Return the seconds of both local trainings, of the rest of the probe, and the ratio of the sum to training."""
    problem = build(replace(config, method=method))
    with one_thread():
        engine = engine_for([problem])
        *_, states = states_along(engine, 2)
        probe(problem, states[0], *everyone(engine, states), num_draws=num_draws)  # graphs are captured once
        training, answers = timed(lambda: [*everyone(engine, states), *everyone(engine, states, replicate=1)])
        beside, _ = timed(lambda: probe(problem, states[0], *answers, num_draws=num_draws))
    row = {"method": method, "data": config.data, "device": config.device, "clients": config.clients}
    row |= {"training": training, "beside": beside, "factor": (training + beside) / training}
    print(f"{method:28s} training {training:.2f} s, the rest {beside:.2f} s: {row['factor']:.2f} times", flush=True)
    return row


def gallery() -> None:
    """Make the tables and figures of docs/gallery.md from the rows in docs/results."""
    from fedncv.observatory.figures import draw_all
    from fedncv.observatory.table import print_tables, read_rows

    along_fedavg, along_fedncv = (
        read_rows(DOCS / "results" / f"{name}.jsonl") for name in ("variance_cifar10", "variance_cifar10_own")
    )
    print_tables(along_fedavg)
    draw_all(along_fedavg, DOCS / "figures", prefix="gallery_")
    print_tables(along_fedncv)
    print_factors(along_fedncv)


def print_factors(rows: list[dict[str, Any]]) -> None:
    """Print by round how much the label prior, the rest of FedNCV, and both divide the error; ± over seeds."""
    from fedncv.observatory.table import mean_of, relative

    steps = {
        "the prior": ("fedavg", "fedavg+prior"),
        "the rest of FedNCV": ("fedavg+prior", "fedncv"),
        "both": ("fedavg", "fedncv"),
    }
    errors: dict[str, Callable[[dict[str, Any]], float]] = {
        "E|error|²": lambda row: row["mse"],
        "error / |own full update|²": lambda row: relative(row, "mse"),
    }
    rounds = sorted({row["round"] for row in rows})
    for error, of in errors.items():
        print(f"\n{error}, divided by")
        found = {(row["method"], row["seed"], row["round"]): of(row) for row in rows}
        for step, (before, after) in steps.items():
            ratios = [
                {"seed": seed, "round": t, "ratio": value / found[after, seed, t]}
                for (method, seed, t), value in found.items()
                if method == before
            ]
            means = [mean_of([r for r in ratios if r["round"] == t], "ratio") for t in rounds]
            cells = [f"{mean.value:.2f} ± {mean.half:.2f}" for mean in means if mean]
            print(_line(step, cells, ratios))
    print("\nspread of the clients' raw gradients, without the correction / with it")
    spread = [row | {"ratio": row["drift_without"] / row["drift_with"]} for row in rows if row["method"] == "fedncv"]
    means = [mean_of([row for row in spread if row["round"] == t], "ratio") for t in rounds]
    print(_line("the drift correction", [f"{mean.value:.2f} ± {mean.half:.2f}" for mean in means if mean], spread))


def _line(name: str, cells: list[str], rows: list[dict[str, Any]]) -> str:
    """Return a line of a table: a cell for each round, then the least and the greatest ratio."""
    ends = [f"{end(row['ratio'] for row in rows):.2f}" for end in (min, max)]
    return " | ".join([f"{name:20s}", *cells, *ends])


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    began = now()
    result = function()
    return now() - began, result


def write(path: str, row: dict[str, Any]) -> None:
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
