"""Time a round of every method relative to FedAvg, on the CIFAR-10 study.

    python bench/methods.py --device cuda --seeds 5 --rounds 5 --ratio 1.25
    python bench/methods.py --device cuda --methods scaffold moon --profile

Each method's rounds are timed in turns with FedAvg's: a round of one, then the same round of the other, so that a slow
machine slows both. The rounds are run once before, to record the graphs. ``--ratio`` is between neighbouring bucket
sizes: 1.25 instead of the engine's 1.08 halves the number of recordings.
"""

import argparse
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from study import images, machine, problems
from throughput import profile, wait

from fedncv.engine.problem import DivergedError, Problem, start
from fedncv.engine.stacked import StackedEngine
from fedncv.engine.stage import RATIO
from fedncv.methods import METHODS, find_method


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ratio", type=float, default=RATIO)
    parser.add_argument("--methods", nargs="+", default=[name for name in METHODS if name != "d2"])
    parser.add_argument("--profile", action="store_true", help="where the time of one round goes, FedAvg's first")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    settings = {"device": arguments.device, "per_round": arguments.per_round, "rounds": arguments.rounds + 1}
    made = problems(arguments.seeds, data=images(), **settings)
    base, base_start_up = recorded(made, arguments.rounds, arguments.ratio)
    print(f"FedAvg recorded in {base_start_up:.1f} s; mean seconds; median and middle half of the rounds' ratios")
    print(f"{'method':30s} {'s/round':>10s} {'FedAvg':>8s} {'of FedAvg':>10s} {'middle half':>14s} {'start-up':>9s}")
    for name in [name for name in arguments.methods if name != "fedavg"]:
        try:
            engine, start_up = recorded(
                [of_method(problem, name) for problem in made], arguments.rounds, arguments.ratio
            )
            ours, theirs = in_turn([engine, base], arguments.rounds)
        except (RuntimeError, ValueError, DivergedError) as error:
            print(f"{name:30s} {str(error).splitlines()[0][:90]}", flush=True)
            continue
        low, middle, high = np.quantile(ours / theirs, (0.25, 0.5, 0.75))
        times = f"{ours.mean():10.4f} {theirs.mean():8.4f} {middle:10.3f} {low:7.3f}-{high:.3f} {start_up:8.1f}s"
        print(f"{name:30s} {times}", flush=True)
        if arguments.profile:
            for each in (base, engine):
                profile(each, advanced(each, [start(problem) for problem in each.problems]))
        del engine


def of_method(problem: Problem, name: str) -> Problem:
    """Return the same clients, model and samples with another method."""
    return problem._replace(config=replace(problem.config, method=name), method=find_method(name))


def recorded(made: list[Problem], rounds: int, ratio: float) -> tuple[StackedEngine, float]:
    """Return an engine that has run these rounds once, and the seconds it took."""
    began = time.perf_counter()
    engine, states = StackedEngine(made, ratio=ratio), [start(problem) for problem in made]
    for _ in range(rounds):
        states = advanced(engine, states)
    wait(engine.device)
    return engine, time.perf_counter() - began


def in_turn(engines: list[StackedEngine], rounds: int) -> NDArray[np.float64]:
    """Return the seconds of every round of each engine; the engines take turns to go first."""
    states = [[start(problem) for problem in engine.problems] for engine in engines]
    spent = np.zeros((len(engines), rounds))
    for t in range(rounds):
        for i in range(len(engines)) if t % 2 else reversed(range(len(engines))):
            began = time.perf_counter()
            states[i] = advanced(engines[i], states[i])
            wait(engines[i].device)
            spent[i, t] = time.perf_counter() - began
    return spent


def advanced(engine: StackedEngine, states: list[Any]) -> list[Any]:
    settled = engine.run_rounds(states)
    for each in settled:
        if isinstance(each, DivergedError):
            raise each
    return [each[0] for each in settled if not isinstance(each, DivergedError)]


if __name__ == "__main__":
    main()
