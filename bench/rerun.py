"""Train the same seed with two kinds of layers, and compare how far the accuracies lie apart with what seeds differ.

    python bench/rerun.py --data cifar10 --data-dir DIR --out rows.jsonl
    python bench/rerun.py --table rows.jsonl

The two agree to rounding in every step; training amplifies rounding. One row for each method, seed and kind of layers.
The table shows, over the seeds, the mean and the largest |difference| between the two kinds, and the standard deviation
between seeds, in points.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

import fedncv

LAYERS = ("torch", "compiled")
SCORES = ("before", "after")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "scaffold", "fedncv"])
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--seeds", type=int, default=3, help="0 to N - 1")
    parser.add_argument("--out", default="")
    parser.add_argument("--table", default="", help="print the table of these rows instead")
    arguments = parser.parse_args()
    if arguments.table:
        return print(table([json.loads(line) for line in Path(arguments.table).read_text().splitlines()]))
    rows = []
    for method, seed, layers in itertools.product(arguments.methods, range(arguments.seeds), LAYERS):
        result = fedncv.simulate(
            method=method, data=arguments.data, data_dir=arguments.data_dir, rounds=arguments.rounds, seed=seed,
            epochs=arguments.epochs, lr=arguments.lr, engine="sequential", layers=layers, eval_every=0,
        )  # fmt: skip
        settings = {"method": method, "seed": seed, "layers": layers, "data": arguments.data}
        settings |= {"rounds": arguments.rounds, "epochs": arguments.epochs, "lr": arguments.lr}
        rows.append(settings | {score: 100 * result.last[score] for score in SCORES})
        print(rows[-1], flush=True)
        if arguments.out:
            with Path(arguments.out).open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table; needs two seeds or more of each method."""
    heads = [f"{score}: {what}" for score in SCORES for what in ("mean gap", "largest gap", "between seeds")]
    lines = [f"| method | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for score in SCORES:
            first, second = (
                np.array([row[score] for row in rows if row["method"] == method and row["layers"] == layers])
                for layers in LAYERS
            )
            gaps = np.abs(first - second)
            cells += [gaps.mean(), gaps.max(), first.std(ddof=1)]
        lines.append(f"| {method} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
