"""Label shares as control variates: +labels and +calibrated beside FedAvg, memory and drift correction.

    PYTHONPATH=bench python bench/labels.py --data-dir DIR --clients 1000 --out rows.jsonl
    PYTHONPATH=bench python bench/labels.py --table rows.jsonl

Softmax regression on the first 50 principal components of Fashion-MNIST (Dirichlet 0.1), or LeNet5 on the pictures with
--model lenet5. Each method's learning rate is the best of the grid by accuracy on the tuning seed; the reported seeds
are others. A row holds the accuracy of the shared model on all test samples, and the table the round in which it first
reaches what FedAvg has at the end. --errors measures instead, at the models of one FedAvg run, E|error|^2 of FedAvg's
update over the draw of clients, divided by each method's.
"""

import argparse
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedncv
from fedncv.config import RunConfig
from fedncv.data import Dataset, from_arrays, load
from fedncv.observatory.compare import rows_of

METHODS = (
    "fedavg",
    "fedavg+labels",
    "fedavg+labels:at=client",
    "fedavg+calibrated",
    "fedavg+memory",
    "fedavg+drift",
    "scaffold",
    "fedavg+prior",
    "fedavg+labels+prior",
    "fedavg+labels:at=client+prior",
    "fedavg+calibrated+prior",
)  # fmt: skip
TUNING_SEED = 1000


@functools.cache
def pca() -> Dataset:
    """Return Fashion-MNIST (from $FEDNCV_DATA) as its first 50 principal components, in units of the first one."""
    data = load("fashion_mnist", os.environ.get("FEDNCV_DATA") or None)
    x = data.x.reshape(len(data.x), -1).double() / 255
    x = x - x.mean(dim=0)
    values, vectors = torch.linalg.eigh(x.T @ x / len(x))
    features = x @ vectors.flip(1)[:, :50] / values[-1].sqrt()
    return from_arrays(features.float(), data.y, name="fashion_mnist_pca50", num_classes=data.num_classes)


def linear(shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Linear(shape[0], num_outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--model", choices=("linear", "lenet5"), default="linear")
    parser.add_argument("--data", default="fashion_mnist", help="with --model lenet5")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=5, help="0 to N - 1")
    parser.add_argument("--lr", type=float, nargs="+", default=[0.03, 0.1, 0.3])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--at", type=int, nargs="+", default=[20, 60, 100])
    parser.add_argument("--out", default="")
    parser.add_argument("--table", nargs="+", default=[])
    arguments = parser.parse_args()
    if arguments.table:
        return print(
            table([json.loads(line) for path in arguments.table for line in Path(path).read_text().splitlines()])
        )
    if arguments.data_dir:
        os.environ["FEDNCV_DATA"] = arguments.data_dir
    torch.set_num_threads(1)
    on_pictures = arguments.model == "lenet5"
    config: dict[str, Any] = {
        "data": arguments.data if on_pictures else "labels:pca",
        "model": "lenet5" if on_pictures else "labels:linear",
        "clients": arguments.clients,
        "per_round": arguments.per_round,
        "rounds": arguments.rounds,
        "epochs": arguments.epochs,
        "device": arguments.device,
        "engine": "stacked",
    }
    if arguments.errors:
        config = config | {"lr": arguments.lr[0], "rounds": max(arguments.at)}
        shown = RunConfig(**{k: v for k, v in config.items() if k != "engine"})
        for row in rows_of([shown], arguments.methods, at=arguments.at, num_draws=500, within=False):
            kept = {
                k: row[k] for k in ("method", "round", "clients", "per_round", "lr", "data", "mse", "full2", "times")
            }
            write(arguments.out, kept)
        return
    config |= {"eval_every": 5, "after_every": 0}
    for method in arguments.methods:
        began = time.perf_counter()
        tried = {lr: accuracy(config | {"method": method, "lr": lr}, [TUNING_SEED])[0][-1] for lr in arguments.lr}
        lr = max(tried, key=lambda each: tried[each])
        curves = accuracy(config | {"method": method, "lr": lr}, list(range(arguments.seeds)))
        write(
            arguments.out,
            config
            | {"method": method, "lr": lr, "tried": tried, "curves": curves}
            | {"seconds": round(time.perf_counter() - began, 1)},
        )


def accuracy(config: dict[str, Any], seeds: list[int]) -> list[list[float]]:
    """Return for each seed the accuracy of the shared model on all test samples, every five rounds."""
    results = fedncv.simulate_many(seeds=seeds, **config)
    return [[row["pooled"] for row in result.rows if "pooled" in row] for result in results]


def table(rows: list[dict[str, Any]]) -> str:
    if "times" in rows[0]:
        lines = ["| method | round | E\\|error\\|² of FedAvg / of the method |", "|---|---|---|"]
        return "\n".join(lines + [f"| {r['method']} | {r['round']} | {r['times']:.2f} |" for r in rows])
    lines = [
        "| method | lr | accuracy, % | minus FedAvg | first round at FedAvg's last accuracy |",
        "|---|---|---|---|---|",
    ]
    reference = {r["clients"]: np.array(r["curves"]) for r in rows if r["method"] == "fedavg"}
    for r in rows:
        ours, base = 100 * np.array(r["curves"]), 100 * reference[r["clients"]]
        gain = ours[:, -1] - base[:, -1]
        half = 2.776 * gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) == 5 else float("nan")
        at = [5 * int(np.argmax(a >= b[-1])) if (a >= b[-1]).any() else None for a, b in zip(ours, base, strict=True)]
        reached = [t for t in at if t is not None]
        when = f"{np.median(reached):.0f}" + (f" ({len(reached)} of {len(at)} seeds)" if len(reached) < len(at) else "")
        words = f"{gain.mean():+.2f} [{gain.mean() - half:+.2f}, {gain.mean() + half:+.2f}]"
        lines.append(
            f"| {r['method']} | {r['lr']:g} | {ours[:, -1].mean():.2f} ± {ours[:, -1].std(ddof=1):.2f} | "
            f"{'' if r['method'] == 'fedavg' else words} | {when if reached else 'never'} |"
        )
    return "\n".join(lines)


def write(out: str, row: dict[str, Any]) -> None:
    line = json.dumps(row)
    short = {k: v for k, v in row.items() if k != "curves"} | (
        {"last": [round(c[-1], 4) for c in row["curves"]]} if "curves" in row else {}
    )
    print(json.dumps(short), flush=True)
    if out:
        with Path(out).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
