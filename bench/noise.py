"""When does less variance mean a better model? Train with the noise of client sampling scaled, and score.

    PYTHONPATH=bench python bench/noise.py --data cifar10 --data-dir DIR --device cuda --out rows.jsonl
    PYTHONPATH=bench python bench/noise.py --data labels:pca --model labels:linear --data-dir DIR --out rows.jsonl
    PYTHONPATH=bench python bench/noise.py --table rows.jsonl --figure noise.png

The step is g_bar + s (g_hat - g_bar): g_hat of the clients drawn, g_bar of all clients at the same model
(src/fedncv/observatory/noise.py). s = 1 is the method itself, s = 0 has no sampling noise. One row for each method,
learning rate, number of clients per round, scale and seed, with the accuracy of the shared model on all test samples.
"""

import argparse
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedncv.config import RunConfig
from fedncv.data import load
from fedncv.engine import stacked_scores
from fedncv.engine.problem import DivergedError, build
from fedncv.engine.stacked import StackedEngine
from fedncv.observatory.noise import states_with_noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "scaffold", "fedncv"])
    parser.add_argument("--scales", nargs="+", type=float, default=[0, 0.25, 0.5, 1, 2])
    parser.add_argument("--lr", nargs="+", type=float, default=[0.01, 0.03, 0.1])
    parser.add_argument("--per-round", nargs="+", type=int, default=[5, 20])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3, help="0 to N - 1")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", default="")
    parser.add_argument("--table", nargs="+", default=[])
    parser.add_argument("--figure", default="")
    arguments = parser.parse_args()
    if arguments.table:
        rows = [json.loads(line) for path in arguments.table for line in Path(path).read_text().splitlines()]
        print(table(rows))
        return figure(rows, Path(arguments.figure)) if arguments.figure else None
    if arguments.data_dir:
        os.environ["FEDNCV_DATA"] = arguments.data_dir
    torch.set_num_threads(1)
    data = load(arguments.data)
    data = data._replace(x=data.x.to(arguments.device), y=data.y.to(arguments.device))
    for method, lr, per_round in itertools.product(arguments.methods, arguments.lr, arguments.per_round):
        began = time.perf_counter()
        pairs = list(itertools.product(arguments.scales, range(arguments.seeds)))
        configs = [
            RunConfig(
                method=method, data=arguments.data, model=arguments.model, clients=arguments.clients,
                per_round=per_round, rounds=arguments.rounds, epochs=arguments.epochs, lr=lr, seed=seed,
                device=arguments.device, data_dir=arguments.data_dir,
            )
            for _, seed in pairs
        ]  # fmt: skip
        found = last_scores(configs, [s for s, _ in pairs], data)
        for (s, seed), pooled in zip(pairs, found, strict=True):
            row = {"method": method, "lr": lr, "per_round": per_round, "scale": s, "seed": seed, "pooled": pooled}
            row |= {"data": arguments.data, "model": arguments.model, "clients": arguments.clients}
            row |= {"rounds": arguments.rounds, "epochs": arguments.epochs}
            if arguments.out:
                with Path(arguments.out).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        print(f"{method} lr {lr:g} per_round {per_round}: {time.perf_counter() - began:.0f} s", flush=True)


def last_scores(configs: list[RunConfig], scales: list[float], data: Any) -> list[float | None]:
    """Return the accuracy of every run's shared model at the end; None for all if one of them diverged."""
    problems = [build(config, data=data) for config in configs]
    engine = StackedEngine([problem.sharing(problems[0]) for problem in problems])
    try:
        *_, states = states_with_noise(engine, scales, configs[0].rounds)
    except DivergedError as error:
        print(error)
        return [None] * len(configs)
    return [row["pooled"] for row in stacked_scores.before(engine, states)]


def mean_of(rows: list[dict[str, Any]], **fixed: Any) -> tuple[float, float]:
    """Return mean and standard deviation in per cent of the rows with these values."""
    values = [r["pooled"] for r in rows if all(r[k] == v for k, v in fixed.items()) and r["pooled"] is not None]
    spread = 100 * float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")
    return (100 * float(np.mean(values)), spread) if values else (float("nan"), float("nan"))


def settings(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))


def table(rows: list[dict[str, Any]]) -> str:
    scales = settings(rows, "scale")
    lines = ["| method | lr | per round |" + "".join(f" s = {s:g} |" for s in scales), "|---" * (3 + len(scales)) + "|"]
    for method, lr, m in itertools.product(*(settings(rows, k) for k in ("method", "lr", "per_round"))):
        cells = [mean_of(rows, method=method, lr=lr, per_round=m, scale=s) for s in scales]
        lines.append(f"| {method} | {lr:g} | {m} |" + "".join(f" {a:.2f} ± {b:.2f} |" for a, b in cells))
    return "\n".join(lines)


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot accuracy against the scale: a panel for each number of clients per round, a line for each method and lr."""
    import matplotlib.pyplot as plt

    sizes, methods, rates = (settings(rows, k) for k in ("per_round", "method", "lr"))
    scales = settings(rows, "scale")
    fig, axes_M = plt.subplots(1, len(sizes), figsize=(5 * len(sizes), 4), sharey=True, squeeze=False)
    for axes, m in zip(axes_M[0], sizes, strict=True):
        for (i, method), (j, lr) in itertools.product(enumerate(methods), enumerate(rates)):
            found = [mean_of(rows, method=method, lr=lr, per_round=m, scale=s) for s in scales]
            axes.errorbar(
                scales, [a for a, _ in found], [b for _, b in found], color=f"C{i}", linestyle=("-", "--", ":")[j % 3],
                marker="os^"[j % 3], capsize=2, label=f"{method}, lr {lr:g}",
            )  # fmt: skip
        axes.set(title=f"{m} of {rows[0]['clients']} clients per round", xlabel="scale s of the sampling noise")
        axes.grid(alpha=0.3)
    axes_M[0][0].set_ylabel("accuracy of the shared model, %")
    axes_M[0][-1].legend(fontsize=7)
    fig.tight_layout()
    fig.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
