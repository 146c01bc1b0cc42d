"""What a round of every method takes, relative to FedAvg, on the CIFAR-10 study.

    python bench/methods.py --device cuda --seeds 5 --rounds 5 --ratio 1.25
    python bench/methods.py --device cuda --methods fedavg scaffold moon

The rounds are run twice, and timed the second time: the first time records the graphs. ``--ratio`` is between
neighbouring bucket sizes: 1.25 in place of the engine's 1.08 halves the number of recordings.
"""

import argparse
import time
from dataclasses import replace
from typing import Any

import torch
from study import images, machine, problems

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
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    settings = {"device": arguments.device, "per_round": arguments.per_round, "rounds": arguments.rounds + 1}
    made, base = problems(arguments.seeds, data=images(), **settings), 0.0
    names = ["fedavg", *[name for name in arguments.methods if name != "fedavg"]]
    print(f"{'method':20s} {'s a round':>10s} {'of FedAvg':>10s} {'start-up':>9s}")
    for name in names:
        began = time.perf_counter()
        try:
            seconds = round_time([of_method(problem, name) for problem in made], arguments)
        except (RuntimeError, ValueError, DivergedError) as error:
            print(f"{name:20s} {str(error).splitlines()[0][:90]}", flush=True)
            continue
        base = base or seconds
        whole = time.perf_counter() - began - arguments.rounds * seconds
        print(f"{name:20s} {seconds:10.4f} {seconds / base:10.2f} {whole:8.1f}s", flush=True)


def of_method(problem: Problem, name: str) -> Problem:
    """The same clients, model and samples under another method."""
    return problem._replace(config=replace(problem.config, method=name), method=find_method(name))


def round_time(made: list[Problem], arguments: argparse.Namespace) -> float:
    device = made[0].model.start_P.device
    engine, rounds, began = StackedEngine(made, ratio=arguments.ratio), int(arguments.rounds), 0.0
    for _ in range(2):
        states = [start(problem) for problem in made]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(rounds):
            states = advanced(engine, states)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / rounds


def advanced(engine: StackedEngine, states: list[Any]) -> list[Any]:
    settled = engine.run_rounds(states)
    for each in settled:
        if isinstance(each, DivergedError):
            raise each
    return [each[0] for each in settled if not isinstance(each, DivergedError)]


if __name__ == "__main__":
    main()
