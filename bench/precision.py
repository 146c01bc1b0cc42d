"""Compare the accuracy under each precision: the same methods, seeds and draws, ResNet-18 on CIFAR-10.

    python bench/precision.py --data-dir DIR --device cuda --out precision.jsonl
    python bench/precision.py --data digits --model mlp --device cpu --precision torch float32 --rounds 3
    python bench/precision.py --table precision.jsonl                        # the table of a finished comparison

A line of the file is one run: method, precision, seed, scores in per cent, and seconds of its group of seeds (training,
scoring and start-up). The table has the mean and standard deviation over seeds, and the mean difference to float32 of
the same seeds with its standard error.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from study import machine

import fedncv

METHODS = ("fedavg", "scaffold", "fedncv")
PRECISIONS = ("float32", "tf32", "bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="resnet18_bn")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--precision", nargs="+", default=list(PRECISIONS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--eval-clients", type=int, default=0, help="0: all")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--out", type=Path, help="append the runs to this file")
    parser.add_argument("--table", type=Path, help="only print the table of this file")
    arguments = parser.parse_args()
    if arguments.table:
        lines = arguments.table.read_text(encoding="utf-8").splitlines()
        print(table([json.loads(line) for line in lines]))
        return
    print(machine())
    runs: list[dict[str, Any]] = []
    for precision in arguments.precision:
        for method in arguments.methods:
            found = run(method, precision, arguments)
            runs += found
            scores = ", ".join(f"{each['before']:.2f}/{each['after']:.2f}" for each in found)
            print(f"{precision:8s} {method:10s} before/after {scores}   {found[0]['seconds']:.0f} s", flush=True)
            if arguments.out:
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(each) + "\n" for each in found)
    print(table(runs))


def run(method: str, precision: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    began = time.perf_counter()
    results = fedncv.simulate_many(
        seeds=range(arguments.seeds), method=method, precision=precision, data=arguments.data,
        data_dir=arguments.data_dir, device=arguments.device, model=arguments.model, rounds=arguments.rounds,
        epochs=arguments.epochs, lr=arguments.lr, eval_every=0, progress=False, clients=arguments.clients,
        eval_clients=arguments.eval_clients, engine=arguments.engine,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    words = {"method": method, "precision": precision, "model": arguments.model, "data": arguments.data}
    words |= {"rounds": arguments.rounds, "epochs": arguments.epochs, "lr": arguments.lr, "clients": arguments.clients}
    words |= {"eval_clients": arguments.eval_clients}
    return [
        words
        | {"seed": seed, "before": 100 * last["before"], "after": 100 * last["after"]}
        | {"samples": last["samples"], "seconds": seconds}
        for seed, last in enumerate(result.rows[-1] for result in results)
    ]


def table(runs: list[dict[str, Any]]) -> str:
    """Return a Markdown table, a row for each method and precision."""
    lines = [
        "| method | precision | before | minus float32 | after | minus float32 |",
        "|---|---|---|---|---|---|",
    ]
    for method in dict.fromkeys(each["method"] for each in runs):
        of_method = [each for each in runs if each["method"] == method]
        for precision in dict.fromkeys(each["precision"] for each in of_method):
            cells = [method, precision]
            for score in ("before", "after"):
                mine, exact = (
                    {each["seed"]: each[score] for each in of_method if each["precision"] == name}
                    for name in (precision, "float32")
                )
                values = np.array(list(mine.values()))
                cells.append(
                    f"{values.mean():.2f} ± {values.std(ddof=1):.2f}" if len(values) > 1 else f"{values[0]:.2f}"
                )
                paired = np.array([value - exact[seed] for seed, value in mine.items() if seed in exact])
                alone = precision == "float32" or len(paired) < 2
                cells.append("" if alone else f"{paired.mean():+.2f} ± {paired.std(ddof=1) / len(paired) ** 0.5:.2f}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
