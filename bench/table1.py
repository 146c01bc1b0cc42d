"""Run the Table 1 methods on CIFAR-10, with the seeds of each as one stack, and print times and scores.

    FEDNCV_DATA=~/data python bench/table1.py --device cuda --seeds 5 --out table1.jsonl

These are whole runs, with all clients evaluated every five rounds, and after local training at the end. Unlike
`fedncv study table1` it needs only the package, and writes no run to disk.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from study import machine

import fedncv
from fedncv.config import RunConfig
from fedncv.studies import STUDIES, TABLE1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--methods", nargs="+", default=list(TABLE1))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print(machine())
    settings = replace(STUDIES["table1"]().settings, data=arguments.data, rounds=arguments.rounds)
    config, began = replace(RunConfig(**vars(settings)), device=arguments.device), time.perf_counter()
    print(f"{'method':20s} {'seconds':>8s} {'before %':>14s} {'after %':>14s}")
    for method in arguments.methods:
        at = time.perf_counter()
        results = fedncv.simulate_many(config, seeds=range(arguments.seeds), method=method)
        seconds = time.perf_counter() - at
        shown = [100 * np.array([result.last[name] for result in results]) for name in ("before", "after")]
        words = [f"{each.mean():.2f} ± {each.std(ddof=min(1, len(each) - 1)):.2f}" for each in shown]
        print(f"{method:20s} {seconds:8.1f} {words[0]:>14s} {words[1]:>14s}", flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for result in results for row in result.tidy())
    print(f"total: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
