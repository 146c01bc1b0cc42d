"""Compare engine=ray with the engine of one process: rounds/s, samples/s, overhead and bytes moved.

    python bench/cluster.py --workers 1 2 --per-round 10 100 --clients 1000
    python bench/cluster.py --device cuda --workers 1 2 4 8 --per-round 100 1000 --clients 10000 --model lenet5

Ray runs on this machine. With ``--device cuda`` the workers share its GPUs. For each number of workers both engines
take turns, one round each, so that a busy machine slows both; the ratio is the median over the rounds, with its range.
"""

import argparse
import time
from statistics import median
from typing import Literal

import torch
from study import machine

from fedncv.config import RunConfig
from fedncv.engine.choose import engine_for
from fedncv.engine.problem import Problem, State, build, start
from fedncv.engine.protocol import Engine
from fedncv.engine.ray_engine import RayEngine
from fedncv.engine.sequential import one_thread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--per-round", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--clients", type=int, nargs="+", default=[1_000])
    parser.add_argument("--samples", type=int, default=50, help="samples of a client")
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--model", default="mlp")
    arguments = parser.parse_args()
    print(machine())
    print(
        f"{arguments.method}, {arguments.model}, {arguments.samples} samples a client, {arguments.epochs} epochs, "
        f"blocks of {arguments.block}"
    )
    print(
        f"{'clients':>9s} {'cohort':>7s} {'workers':>7s} {'one process':>12s} {'ray':>8s} {'rounds/s':>9s} "
        f"{'samples/s':>10s} {'speed-up':>22s} {'MB sent':>8s} {'received':>9s} {'start':>7s}"
    )
    for clients in arguments.clients:
        for per_round in [each for each in arguments.per_round if each <= clients]:
            for workers in arguments.workers:
                with one_thread():
                    compare(arguments, clients, per_round, workers)


def problem_of(
    arguments: argparse.Namespace,
    clients: int,
    per_round: int,
    engine: Literal["auto", "sequential", "ray"],
    workers: int,
) -> Problem:
    return build(
        RunConfig(
            data=f"synthetic:clients={clients},samples={arguments.samples}",
            partition="natural",
            clients=clients,
            per_round=per_round,
            rounds=10**6,
            epochs=arguments.epochs,
            eval_clients=100,
            method=arguments.method,
            model=arguments.model,
            device=arguments.device,
            engine=engine,
            workers=workers,
            block=arguments.block,
        )
    )


def compare(arguments: argparse.Namespace, clients: int, per_round: int, workers: int) -> None:
    """Time rounds of both engines in turns, and print a line."""
    alone: Literal["auto", "sequential"] = "sequential" if arguments.device == "cpu" else "auto"
    here = engine_for([problem_of(arguments, clients, per_round, alone, 0)])
    began = time.perf_counter()
    there = engine_for([problem_of(arguments, clients, per_round, "ray", workers)])
    assert isinstance(there, RayEngine)
    started = time.perf_counter() - began
    try:
        states = [start(engine.problems[0]) for engine in (here, there)]
        seconds: list[tuple[float, float]] = []
        before, samples = (0, 0), 0
        for t in range(arguments.rounds + 2):  # the first rounds also start the other workers and fill caches
            if t == 2:
                before, samples = (there.traffic.sent, there.traffic.received), states[1].totals.samples
            pairs = [timed(engine, state) for engine, state in zip((here, there), states, strict=True)]
            states = [state for state, _ in pairs]
            seconds.append((pairs[0][1], pairs[1][1]))
    finally:
        there.close()
        here.close()
    seconds = seconds[2:]
    sent, received = (
        (now - then) / arguments.rounds / 1e6
        for now, then in zip((there.traffic.sent, there.traffic.received), before, strict=True)
    )
    ratios = [a / b for a, b in seconds]
    ray = median(b for _, b in seconds)
    rate = (states[1].totals.samples - samples) / sum(b for _, b in seconds)
    print(
        f"{clients:9,d} {per_round:7,d} {workers:7d} {median(a for a, _ in seconds):10.3f} s {ray:6.3f} s "
        f"{1 / ray:9.2f} "
        f"{rate:10,.0f} {median(ratios):8.2f} ({min(ratios):.2f} to {max(ratios):.2f}) {sent:8.2f} {received:9.2f} "
        f"{started:5.1f} s"
    )


def timed(engine: Engine, state: State) -> tuple[State, float]:
    began = time.perf_counter()
    (settled,) = engine.run_rounds([state])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert isinstance(settled, tuple), settled
    return settled[0], time.perf_counter() - began


if __name__ == "__main__":
    main()
