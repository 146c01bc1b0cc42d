"""Run many variants of one study on one GPU with stacked seeds, and print a line for each.

    python bench/compare.py --data cifar10 --seeds 1000,1001,1002 fedavg "fedncv@lr=0.03" "fedncv:momentum=0@lr=0.03"

A variant is a method, with settings of the run after an @. Rows go to --out as JSON lines. Seeds from 1000 up are for
tuning and are never reported. With --device cpu one client trains after the other, in compiled layers: the same numbers
to rounding.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedncv.config import RunConfig, from_dict
from fedncv.data import load
from fedncv.engine.choose import engine_for
from fedncv.engine.problem import DivergedError, build, start
from fedncv.engine.stacked_scores import ScoringEngine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--seeds", default="1000,1001,1002")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--partition", default="dirichlet:alpha=0.1")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = load(arguments.data)
    data = data._replace(x=data.x.to(arguments.device), y=data.y.to(arguments.device))
    base = RunConfig(
        data=arguments.data, rounds=arguments.rounds, clients=arguments.clients, per_round=arguments.per_round,
        partition=arguments.partition, device=arguments.device,
    )  # fmt: skip
    if arguments.device == "cpu":
        base = replace(base, engine="sequential", layers="compiled")
    for variant in arguments.variants:
        began = time.perf_counter()
        method, _, rest = variant.partition("@")
        settings = {"method": method} | {k: _value(v) for k, v in (p.split("=", 1) for p in rest.split(",") if p)}
        config = from_dict(settings, where=variant, base=base)
        result = run(config, [int(seed) for seed in arguments.seeds.split(",")], data) | {
            "variant": variant,
            "data": arguments.data,
            "device": arguments.device,
        }
        result["seconds"] = time.perf_counter() - began
        words = [
            f"{name} {100 * np.mean(result[name]):6.2f} ± {100 * np.std(result[name]):.2f}"
            for name in ("before", "after")
            if name in result
        ]
        print(f"{variant:64s} {'   '.join(words) or result.get('failed')}   {result['seconds']:.0f} s", flush=True)
        if arguments.out:
            with Path(arguments.out).open("a") as file:
                file.write(json.dumps(result) + "\n")


def run(config: RunConfig, seeds: list[int], data: Any) -> dict[str, Any]:
    problems = [build(from_dict({"seed": seed}, where="seeds", base=config), data=data) for seed in seeds]
    problems = [problem._replace(dataset=problems[0].dataset) for problem in problems]
    engine = engine_for(problems) if config.device == "cpu" else ScoringEngine(problems)
    states = [start(problem) for problem in problems]
    for _ in range(config.rounds):
        settled = engine.run_rounds(states)
        for each in settled:
            if isinstance(each, DivergedError):
                return {"failed": str(each)}
        states = [each[0] for each in settled if not isinstance(each, DivergedError)]
    before, after = engine.before(states), engine.after(states)
    return {"before": [row["before"] for row in before], "after": [row["after"] for row in after]}


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


if __name__ == "__main__":
    main()
