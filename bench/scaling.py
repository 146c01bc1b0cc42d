"""How time and memory of a round grow with clients a round, seeds, clients of the federation and their sizes.

    python bench/scaling.py --device cuda

Clients have equal sizes here, so that one number changes at a time. The exponent of a law time ~ x^a is fitted
to the larger half of each sweep; the paper claims memory linear in the clients and time linear in |D_u|.
"""

import argparse
import time
from typing import Any

import numpy as np
import torch
from study import images, machine, problems

from fedncv.engine.problem import DivergedError, start
from fedncv.engine.stacked import StackedEngine

SWEEPS: dict[str, list[dict[str, int]]] = {
    "clients a round": [{"per_round": m} for m in (2, 5, 10, 20, 50, 100)],
    "seeds": [{"seeds": s} for s in (1, 2, 5, 10)],
    "clients of the federation": [{"clients": n, "samples": 400 * n} for n in (50, 100, 200)],
    "samples of a client": [{"samples": 100 * size} for size in (100, 200, 400, 800)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    for name, points in SWEEPS.items():
        measured = [point(arguments, **each) for each in points]
        print(f"\n{name:>28s}    s a round   samples/s   memory")
        for each, (seconds, rate, memory) in zip(points, measured, strict=True):
            print(
                f"{'  '.join(f'{k} {v}' for k, v in each.items()):>28s} {seconds:12.4f} {rate:11,.0f} {memory:6.2f} GiB"
            )
        x = np.log([next(iter(each.values())) for each in points])[len(points) // 2 - 1 :]
        for what, column in (("time", 0), ("memory", 2)):
            y = np.array([each[column] for each in measured])[len(points) // 2 - 1 :]
            if (y > 0).all():
                print(f"{what} ~ x^{np.polyfit(x, np.log(y), 1)[0]:.2f}")


def point(
    arguments: argparse.Namespace, *, seeds: int = 2, clients: int = 100, per_round: int = 10, samples: int = 40_000
) -> tuple[float, float, float]:
    """Seconds of a round, samples a second, and GiB that the stack takes."""
    settings: dict[str, Any] = {"device": arguments.device, "clients": clients, "per_round": per_round, "epochs": 2}
    made = problems(seeds, data=images(samples), partition="iid", rounds=arguments.rounds + 1, **settings)
    device = made[0].model.start_P.device
    engine, states = StackedEngine(made), [start(problem) for problem in made]
    states = [state_of(each) for each in engine.run_rounds(states)]
    engine.used = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(arguments.rounds):
        states = [state_of(each) for each in engine.run_rounds(states)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - began) / arguments.rounds
    memory = 0.0
    if device.type == "cuda":
        memory = torch.cuda.memory_reserved(device) / 2**30
        del engine, states, made
        torch.cuda.empty_cache()
        memory -= torch.cuda.memory_reserved(device) / 2**30
    return seconds, engine_rate(samples, clients, per_round, seeds) / seconds, memory


def engine_rate(samples: int, clients: int, per_round: int, seeds: int) -> float:
    """Training samples of a round: three quarters of a client's, twice."""
    return 2 * 0.75 * samples / clients * per_round * seeds


def state_of(result: Any) -> Any:
    if isinstance(result, DivergedError):
        raise result
    return result[0]


if __name__ == "__main__":
    main()
