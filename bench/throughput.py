"""Measure training samples per second of the CIFAR-10 study (LeNet5 with BatchNorm, 5 local epochs, batch 32).

    python bench/throughput.py --device cuda --seeds 5 --per-round 10 --rounds 20 --plain --profile

It times whole rounds: client sampling, batch orders, training, aggregation. ``--plain`` runs the same clients in a
plain PyTorch loop in the same process first; ``--evaluate`` adds the before-evaluation of all clients.
"""

import argparse
import multiprocessing
import time
from typing import Any

import numpy as np
import torch
from study import images, machine, problems
from torch import nn

from fedncv.engine import stacked_scores
from fedncv.engine.cpu_fused import fused
from fedncv.engine.problem import DivergedError, Problem, start
from fedncv.engine.processes import ProcessesEngine
from fedncv.engine.round import draw
from fedncv.engine.stacked import StackedEngine
from fedncv.models import LeNet5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--plain", action="store_true", help="also time a plain PyTorch loop")
    parser.add_argument("--stacked", action="store_true", help="also time the stacked engine on a CPU")
    parser.add_argument("--profile", action="store_true", help="where the time of two rounds goes")
    parser.add_argument("--evaluate", action="store_true", help="score all clients every ten rounds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    settings = {"method": arguments.method, "device": arguments.device, "per_round": arguments.per_round}
    made = problems(arguments.seeds, data=images(), rounds=arguments.rounds + 3, **settings)
    on_gpu = made[0].model.start_P.is_cuda
    if arguments.plain and on_gpu:
        report("plain PyTorch loop", *plain(made[0], seconds=10.0))
    if on_gpu or arguments.stacked:
        stacked(made, arguments)
    else:
        on_cores(made, arguments)


def report(name: str, samples: int, seconds: float, more: str = "") -> None:
    print(f"{name:28s} {samples / seconds:12,.0f} samples/s   {samples:10,d} samples in {seconds:6.2f} s   {more}")


def on_cores(made: list[Problem], arguments: argparse.Namespace) -> None:
    """Time a plain loop, processes, and processes with compiled layers in turns, so that load slows all alike.

    The load changes over time, so each turn gives ratios to its own plain loop; the median ratio is the result.
    """
    began = time.perf_counter()
    compiled = ProcessesEngine([fused(problem) for problem in made])
    states = [start(problem) for problem in made]
    compiled.run_rounds(states, [draw(problem, 0)._replace(shares=[1e-9] * arguments.per_round) for problem in made])
    print(f"start-up, with compilation unless cached: {time.perf_counter() - began:.1f} s")
    engines = {"compiled": compiled, "processes": ProcessesEngine(made)}
    rates: dict[str, list[float]] = {name: [] for name in ("plain loop", *engines)}
    for turn in range(arguments.rounds):
        if arguments.plain:
            rates["plain loop"].append(plain_processes(made[0], seconds=4.0))
        for name, engine in engines.items():
            began = time.perf_counter()
            after = [settled(each) for each in engine.run_rounds(states)]
            samples = sum(state.totals.samples for state in after) - sum(state.totals.samples for state in states)
            rates[name].append(samples / (time.perf_counter() - began))
        states = after  # the next round, the same for both
        print(f"turn {turn + 1}: " + ", ".join(f"{name} {each[-1]:,.0f}" for name, each in rates.items() if each))
    for engine in engines.values():
        engine.close()
    for name, each in rates.items():
        if each:
            ratios = np.divide(each, rates["plain loop"] or np.nan)
            low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
            print(
                f"{name:12s} median {np.median(each):8,.0f} samples/s, {middle:.2f} times the plain loop of the same "
                f"turn (middle half of {len(each)} turns: {low:.2f} to {high:.2f})"
            )


def plain_processes(problem: Problem, *, seconds: float) -> float:
    """Return samples/s of the plain loop in two processes, without waiting and without averaging."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def run() -> None:
        torch.set_num_threads(1)
        queue.put(plain(problem, seconds=seconds))

    workers = [context.Process(target=run) for _ in range(2)]
    for worker in workers:
        worker.start()
    results = [queue.get() for _ in workers]
    for worker in workers:
        worker.join()
    return float(sum(samples / spent for samples, spent in results))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def stacked(made: list[Problem], arguments: argparse.Namespace) -> None:
    device = made[0].model.start_P.device
    began = time.perf_counter()
    engine = StackedEngine(made)
    states = [start(problem) for problem in made]
    for _ in range(2):  # graphs are recorded here
        states = [settled(each) for each in engine.run_rounds(states)]
    stacked_scores.before(engine, states)
    wait(device)
    print(f"start-up and two rounds: {time.perf_counter() - began:.1f} s")
    engine.used = engine.computed = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    evaluating = 0.0
    began = time.perf_counter()
    for i in range(arguments.rounds):
        states = [settled(each) for each in engine.run_rounds(states)]
        if arguments.evaluate and i % 10 == 9:
            wait(device)
            at = time.perf_counter()
            stacked_scores.before(engine, states)
            evaluating += time.perf_counter() - at
    wait(device)
    seconds = time.perf_counter() - began - evaluating
    memory = torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else 0.0
    name = f"stacked, {arguments.seeds} x {arguments.per_round}"
    report(name, engine.used, seconds, f"waste {engine.waste:.1%}, {memory:.1f} GiB")
    if arguments.evaluate:
        print(f"before-evaluation every ten rounds: {evaluating / seconds:.1%} more time")
    if arguments.profile:
        profile(engine, states)


def settled(result: Any) -> Any:
    if isinstance(result, DivergedError):
        raise result
    return result[0]


def profile(engine: StackedEngine, states: list[Any]) -> None:
    """Share of the time in which a kernel runs, and the kernels that take most of it."""
    device = engine.device
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    wait(device)
    with torch.profiler.profile(activities=activities) as profiler:
        began = time.perf_counter()
        engine.run_rounds(states)
        wait(device)
        seconds = time.perf_counter() - began
    events = profiler.key_averages()
    spent = [(e.self_device_time_total if device.type == "cuda" else e.self_cpu_time_total, e) for e in events]
    total = sum(time for time, _ in spent)
    print(f"share of time in kernels: {total / 1e6 / seconds:.0%} (one round, {seconds:.3f} s under the profiler)")
    print(f"kernels in the round: {sum(event.count for _, event in spent):,d}")
    for time_us, event in sorted(spent, key=lambda pair: -pair[0])[:12]:
        print(f"  {time_us / total:6.1%} {event.count:7d}x {time_us / max(1, event.count):8.1f} us  {event.key[:100]}")


def plain(problem: Problem, *, seconds: float) -> tuple[int, float]:
    """Run the study as a plain loop: a module, an optimizer, one client after the other."""
    device, dataset = problem.model.start_P.device, problem.dataset
    module = LeNet5(dataset.input_shape, dataset.num_classes).to(device)
    samples, began, warm = 0, time.perf_counter(), False
    for t in range(1000):
        for u in draw(problem, t).ids:
            index = torch.from_numpy(problem.clients.train[u]).to(device)
            x, y = dataset.inputs(index, torch.float32), dataset.y[index]
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
            for _ in range(problem.config.epochs):
                for rows in torch.split(torch.randperm(len(index), device=device), problem.config.batch_size):
                    if len(rows) < 2:
                        continue
                    optimizer.zero_grad()
                    torch.autograd.backward(nn.functional.cross_entropy(module(x[rows]), y[rows]))
                    optimizer.step()
                    samples += len(rows)
            wait(device)
            if not warm:
                samples, began, warm = 0, time.perf_counter(), True
            elif time.perf_counter() - began > seconds:
                return samples, time.perf_counter() - began
    return samples, time.perf_counter() - began


if __name__ == "__main__":
    main()
