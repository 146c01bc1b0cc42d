"""What probes at the model cost: the CIFAR-10 study, training, scoring and probing timed side by side in one run.

    python bench/probes.py --device cuda --seeds 5 --rounds 100 --every 10
    python bench/probes.py --device cuda --ways          # three ways to the same variance, on one model
    python bench/probes.py --intervals                   # how often the 95 % intervals hold the truth

Pixels are drawn unless ``--data`` names a dataset; time does not depend on what they show. ``--ways`` compares
moments from layers (engine/layer_gradients.py) with per-sample gradients and with gradients of batches, whose spread is
an unbiased estimate of the same variance: k batches of b samples each give E sum ||g_B - g_u||^2 / (k - 1) = S_u^2 / b.
"""

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from study import images, machine, problems
from throughput import settled, wait
from torch import Tensor

from fedncv.data import load
from fedncv.engine.choose import Engine, engine_for
from fedncv.engine.gradients import sample_gradients
from fedncv.engine.layer_gradients import listening, sums
from fedncv.engine.problem import Problem, State, start
from fedncv.flat import Model
from fedncv.observatory import at_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", default="", help="a dataset, such as cifar10; empty: pixels are drawn")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=60_000, help="of the drawn pixels")
    parser.add_argument("--ways", action="store_true", help="three ways to the variance instead")
    parser.add_argument("--profile", action="store_true", help="where the time of one probe goes")
    parser.add_argument("--intervals", action="store_true", help="coverage of the intervals instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.intervals:
        intervals(problems(1)[0].clients.sizes.astype(float))
        return
    data = load(arguments.data) if arguments.data else images(arguments.samples)
    settings = {"method": arguments.method, "device": arguments.device, "clients": arguments.clients}
    made = problems(arguments.seeds, data=data, rounds=arguments.rounds, **settings)
    print(f"{machine()}; {arguments.data or 'drawn pixels'}, {arguments.method}", flush=True)
    if arguments.ways:
        ways(made[0])
    else:
        side_by_side(made, arguments.rounds, arguments.every, profiled=arguments.profile)


def side_by_side(made: list[Problem], rounds: int, every: int, *, profiled: bool = False) -> None:
    """Rounds, scores of all clients and probes of all clients, each on its own clock."""
    device = made[0].model.start_P.device
    clock = {"start-up and round 1": 0.0, "rounds": 0.0, "scores": 0.0, "probes": 0.0}

    def timed(name: str, work: Callable[..., Any], *given: Any) -> Any:
        wait(device)
        began = time.perf_counter()
        result = work(*given)
        wait(device)
        clock[name] += time.perf_counter() - began
        return result

    engine = timed("start-up and round 1", engine_for, made)
    states = [start(problem) for problem in made]
    num_probes, memory = 0, 0.0
    for t in range(rounds + 1):
        if t:
            name = "rounds" if t > 1 else "start-up and round 1"
            states = [settled(each) for each in timed(name, engine.run_rounds, states)]
        if t % every == 0 or t == rounds:
            timed("scores", engine.before, states)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                held = torch.cuda.memory_allocated(device)
            splits = timed("probes", probe, engine, made, states)
            num_probes += 1
            if device.type == "cuda":
                memory = max(memory, (torch.cuda.max_memory_allocated(device) - held) / 2**30)
            numbers = {name: f"{number.value:.4g}" for name, number in splits[0]._asdict().items() if number}
            print(f"round {t}: {numbers}; " + ", ".join(f"{k} {v:.2f} s" for k, v in clock.items()), flush=True)
    if profiled:
        profile(engine, made, states)
    engine.close()
    study = clock["rounds"] + clock["scores"]
    samples = sum(float(problem.clients.sizes.sum()) for problem in made) * num_probes
    a_round = clock["rounds"] / max(1, rounds - 1)
    a_score, a_probe = clock["scores"] / num_probes, clock["probes"] / num_probes
    steady = a_probe / (every * a_round + a_score) if rounds > 1 else math.nan
    print(f"{len(made)} seeds, {rounds} rounds and scores: {study:.2f} s; {num_probes} probes: {clock['probes']:.2f} s")
    print(f"a round {a_round:.3f} s, a score {a_score:.3f} s, a probe {a_probe:.3f} s of all seeds")
    print(f"on top: {clock['probes'] / study:.1%}; of {every} rounds and a score: {steady:.1%}")
    print(f"{samples / clock['probes']:,.0f} samples/s in probes, {memory:.2f} GiB more at a time", flush=True)


def probe(engine: Engine, made: list[Problem], states: list[State]) -> list[at_model.Split]:
    return list(map(at_model.split, engine.gradients(states), made))


def profile(engine: Engine, made: list[Problem], states: list[State]) -> None:
    """Share of the time in which a kernel runs, and the kernels that take most of it."""
    device = made[0].model.start_P.device
    on_gpu = device.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiler:
        began = time.perf_counter()
        probe(engine, made, states)
        wait(device)
        seconds = time.perf_counter() - began
    spent = [(e.self_device_time_total if on_gpu else e.self_cpu_time_total, e) for e in profiler.key_averages()]
    total = sum(time_us for time_us, _ in spent)
    print(f"one probe under the profiler: {seconds:.3f} s, {total / 1e6 / seconds:.0%} of it in kernels")
    for time_us, event in sorted(spent, key=lambda pair: -pair[0])[:16]:
        print(f"  {time_us / total:6.1%} {event.count:6d}x {time_us / max(1, event.count):9.1f} us  {event.key[:90]}")


# ---- three ways ------------------------------------------------------------------------------------------


def batch_gradients(model: Model, problem: Problem, batch: int) -> Callable[..., Tensor]:
    """(y_P, buffers_R, inputs, targets) -> the gradient of every ``batch`` samples in a row."""

    def loss(y_P: Tensor, buffers_R: Tensor, x: Tensor, target: Tensor) -> Tensor:
        return problem.task.loss(model.forward(y_P, buffers_R, x, mode="eval")[0].logits_BC, target).mean()

    gradient = torch.vmap(torch.func.grad(loss), in_dims=(None, None, 0, 0))

    def each(y_P: Tensor, buffers_R: Tensor, x: Tensor, target: Tensor) -> Tensor:
        g_BP: Tensor = gradient(y_P, buffers_R, x.view(-1, batch, *x.shape[1:]), target.view(-1, batch))
        return g_BP

    return each


def ways(problem: Problem, seconds: float = 2.0) -> None:
    model, device = problem.model, problem.model.start_P.device
    gradient, layers = sample_gradients(model, problem.task), listening(model)
    assert layers is not None

    def from_layers(y_P: Tensor, b_R: Tensor, x: Tensor, target: Tensor) -> Tensor:
        member_KB = y_P.new_zeros(max(1, len(x) // 450), len(x))  # clients of the study's mean size
        member_KB[torch.arange(len(x)) % len(member_KB), torch.arange(len(x))] = 1
        return sums(layers, problem.task, y_P, b_R, x, target, None, member_KB).total_KP.sum(0)[None] / len(x)

    kinds: dict[str, Callable[..., Tensor]] = {
        "samples": lambda y, b, x, t: gradient(y, b, x, t, None),
        "layers": from_layers,
        "batches of 32": batch_gradients(model, problem, 32),
    }
    for chunk in (1024, 4096, 8192, 16384) if device.type == "cuda" else (32, 128):
        index = torch.arange(chunk, device=device)
        x, target = problem.dataset.inputs(index, problem.dtype), problem.dataset.y[index]
        means = []
        for name, work in kinds.items():
            means.append(work(model.start_P, model.start_R, x, target).mean(0))
            wait(device)
            began, done = time.perf_counter(), 0
            while time.perf_counter() - began < seconds / 4:
                for _ in range(4):
                    work(model.start_P, model.start_R, x, target)
                wait(device)
                done += 4 * chunk
            rate = done / (time.perf_counter() - began)
            off = float((means[-1] - means[0]).norm() / means[0].norm())
            print(f"chunk {chunk:5d}  {name:14s} {rate:12,.0f} samples/s   mean off by {off:.1e}", flush=True)


# ---- intervals -------------------------------------------------------------------------------------------


def intervals(sizes: NDArray[np.float64], repeats: int = 2000) -> None:
    """Federations of made-up clients again and again: how often an interval holds the mean over all of them.

    A client leans towards one of ten directions, as one with a majority class does, by more or less; sizes are those
    of the study, drawn anew, or all equal.
    """
    rng = np.random.default_rng(0)
    direction_CP, common_P = rng.normal(size=(10, 50)), 0.3 * rng.normal(size=50)
    for name, of_clients in (("sizes of the study", sizes), ("equal sizes", sizes * 0 + sizes.mean())):
        for num_clients, per_round in ((20, 5), (100, 10)):
            draw = at_model.Draw(batch=32, per_round=per_round)
            rows = []
            for _ in range(repeats):
                n_N = rng.choice(of_clients, num_clients)
                lean_N1 = rng.gamma(4, 1 / 4, (num_clients, 1))
                g_NP = lean_N1 * direction_CP[rng.integers(10, size=num_clients)] + common_P
                g_NP = g_NP + 0.3 * rng.normal(size=g_NP.shape)
                g_P = n_N / n_N.sum() @ g_NP
                spread_N = rng.lognormal(0, 0.6, num_clients) * (n_N - 1)
                away_NP = g_NP - g_P
                found = at_model.Scalars(n_N, spread_N, (away_NP**2).sum(1), away_NP @ g_P, float(g_P @ g_P))
                rows.append([tuple(number) for number in at_model.split_of(found, draw) if number])
            value, low, high = np.moveaxis(np.array(rows, dtype=float), 2, 0)
            held = ((low <= value.mean(0)) & (value.mean(0) <= high)).mean(0)
            words = ", ".join(f"{k} {v:.1%}" for k, v in zip(at_model.Split._fields, held, strict=True))
            print(f"{name}, {per_round} of {num_clients} clients, {repeats} federations: {words}", flush=True)


if __name__ == "__main__":
    main()
