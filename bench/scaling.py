"""Measure how time and memory of a round grow with clients per round, seeds, clients and their sizes.

    python bench/scaling.py --device cuda
    python bench/scaling.py --population 10000 1000000    # on a CPU: see populations.py

Clients have equal sizes here, so that one number changes at a time. The exponent of a law time ~ x^a is fitted
to the larger half of each sweep, where the GPU is full. The paper claims memory linear in the clients and time linear
in |D_u|. Memory is what the stack reserves on the GPU without the samples, with the clients' personal state.
"""

import argparse
import gc
import time
from typing import Any

import numpy as np
import torch
from populations import compare
from study import images, machine, problems

from fedncv.engine.problem import DivergedError, start
from fedncv.engine.stacked import StackedEngine

SWEEPS: dict[str, list[dict[str, Any]]] = {
    "clients per round": [{"per_round": m, "clients": 400, "samples": 80_000} for m in (5, 10, 50, 100, 200, 400)],
    "seeds": [{"seeds": s} for s in (1, 2, 10, 20, 40)],
    "clients of the federation, 10 per round": [{"clients": n, "samples": 200 * n} for n in (50, 100, 400)],
    "clients of the federation, all in every round, with state": [
        {"clients": n, "per_round": n, "samples": 100 * n, "method": "scaffold"} for n in (50, 100, 200, 400)
    ],
    "samples per client": [{"samples": 100 * size, "per_round": 50} for size in (100, 200, 400, 800)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--points", type=int, default=None, help="only the first POINTS of each sweep")
    parser.add_argument("--population", type=int, nargs="+", help="compare federations of so many clients instead")
    parser.add_argument("--methods", nargs="+", default=["fedavg", "scaffold", "fedncv"], help="with --population")
    parser.add_argument("--tens", type=int, default=5, help="with --population: tens of rounds to time")
    parser.add_argument("--per-round", type=int, default=100, help="with --population")
    parser.add_argument("--samples", type=int, default=5, help="with --population: samples of each client")
    arguments = parser.parse_args()
    if arguments.population:
        print(machine())
        sizes = {"per_round": arguments.per_round, "samples": arguments.samples}
        return compare(arguments.population, arguments.methods, tens=arguments.tens, **sizes)
    torch.set_num_threads(1)
    print(machine())
    for name, sweep in SWEEPS.items():
        points = sweep[: arguments.points]
        print(f"\n{name:>60s}      s/round   samples/s   memory", flush=True)
        measured = []
        for each in points:
            seconds, rate, memory = point(arguments, **each)
            measured.append((seconds, rate, memory))
            words = "  ".join(f"{k} {v}" for k, v in each.items())
            print(f"{words:>60s} {seconds:12.4f} {rate:11,.0f} {memory:6.2f} GiB", flush=True)
        x = np.log([next(iter(each.values())) for each in points])[len(points) // 2 - 1 :]
        for what, column in (("time", 0), ("memory", 2)):
            y = np.array([each[column] for each in measured])[len(points) // 2 - 1 :]
            if (y > 0).all():
                print(f"{what} ~ x^{np.polyfit(x, np.log(y), 1)[0]:.2f}", flush=True)


def point(
    arguments: argparse.Namespace,
    *,
    seeds: int = 2,
    clients: int = 100,
    per_round: int = 10,
    samples: int = 20_000,
    method: str = "fedavg",
) -> tuple[float, float, float]:
    """Return seconds per round, samples per second, and GiB of the stack."""
    settings: dict[str, Any] = {"device": arguments.device, "clients": clients, "per_round": per_round, "epochs": 2}
    settings["method"] = method
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
    memory, _samples = 0.0, engine.resident  # which stay on the device and are not counted
    if device.type == "cuda":
        memory = torch.cuda.memory_reserved(device) / 2**30
        del engine, states
        gc.collect()
        torch.cuda.empty_cache()
        memory -= torch.cuda.memory_reserved(device) / 2**30
    return seconds, engine_rate(samples, clients, per_round, seeds) / seconds, memory


def engine_rate(samples: int, clients: int, per_round: int, seeds: int) -> float:
    """Return the training samples of a round: three quarters of a client's, twice."""
    return 2 * 0.75 * samples / clients * per_round * seeds


def state_of(result: Any) -> Any:
    if isinstance(result, DivergedError):
        raise result
    return result[0]


if __name__ == "__main__":
    main()
