"""Measure the cost of probes at the model: training, evaluation and probes of the CIFAR-10 study in one run.

    python bench/probes.py --device cuda --seeds 5 --rounds 100 --every 10
    python bench/probes.py --device cuda --ways          # ways to the same variance, on one model, and their parts
    python bench/probes.py --intervals                   # how often the 95 % intervals contain the true value

Pixels are random unless ``--data`` names a dataset; time does not depend on them. ``--ways`` probes all
clients of one run, in chunks of several sizes: moments from layers (engine/layer_gradients.py), per-sample gradients,
and gradients of batches, whose spread is an unbiased estimate of the same variance: k batches of b samples each give
E sum ||g_B - g_u||^2 / (k - 1) = S_u^2 / b. Then it times the parts and kernels of the first way, and other ways to
compute a convolution's gradients. ``--samples 2000`` makes it quick on a CPU.
"""

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from study import images, machine, problems
from throughput import settled, wait
from torch import Tensor, nn

from fedncv.data import load
from fedncv.engine import layer_gradients
from fedncv.engine.choose import engine_for
from fedncv.engine.gradients import Inputs, Standing, chunk_bytes, chunks, of_layers, of_samples
from fedncv.engine.layer_gradients import Listening, Outer, Sums
from fedncv.engine.problem import Problem, State, start
from fedncv.engine.protocol import Engine
from fedncv.engine.resident import Resident
from fedncv.observatory import at_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--layers", default="auto", help="compiled: layers compiled for the CPU")
    parser.add_argument("--data", default="", help="a dataset, such as cifar10; empty: random pixels")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=60_000, help="number of random samples")
    parser.add_argument("--ways", action="store_true", help="time ways to compute the variance, and their parts")
    parser.add_argument("--profile", action="store_true", help="where the time of one probe goes")
    parser.add_argument("--intervals", action="store_true", help="measure the coverage of the intervals")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.intervals:
        intervals(problems(1)[0].clients.sizes.astype(float))
        return
    data = load(arguments.data) if arguments.data else images(arguments.samples)
    settings = {name: getattr(arguments, name) for name in ("method", "device", "engine", "layers", "clients")}
    made = problems(arguments.seeds, data=data, rounds=arguments.rounds, **settings)
    print(f"{machine()}; {arguments.data or 'random pixels'}, {arguments.method}", flush=True)
    if arguments.ways:
        ways(made[0])
    else:
        side_by_side(made, arguments.rounds, arguments.every, profiled=arguments.profile)


def side_by_side(made: list[Problem], rounds: int, every: int, *, profiled: bool = False) -> None:
    """Time rounds, scores of all clients and probes of all clients separately."""
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
    states = [start(problem, runs=len(made)) for problem in made]
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
        profile(lambda: probe(engine, made, states), device)
    engine.close()
    study = clock["rounds"] + clock["scores"]
    samples = sum(float(problem.clients.sizes.sum()) for problem in made) * num_probes
    a_round = clock["rounds"] / max(1, rounds - 1)
    a_score, a_probe = clock["scores"] / num_probes, clock["probes"] / num_probes
    steady = a_probe / (every * a_round + a_score) if rounds > 1 else math.nan
    print(f"{len(made)} seeds, {rounds} rounds and scores: {study:.2f} s; {num_probes} probes: {clock['probes']:.2f} s")
    print(f"a round {a_round:.3f} s, a score {a_score:.3f} s, a probe {a_probe:.3f} s of all seeds")
    print(f"overhead: {clock['probes'] / study:.1%}; of {every} rounds and a score: {steady:.1%}")
    print(f"{samples / clock['probes']:,.0f} samples/s in probes, {memory:.2f} GiB more at a time", flush=True)


def probe(engine: Engine, made: list[Problem], states: list[State]) -> list[at_model.Split]:
    return list(map(at_model.split, engine.gradients(states), made))


def profile(work: Callable[[], Any], device: torch.device) -> None:
    """Share of the time in which a kernel runs, and the kernels that take most of it."""
    on_gpu = device.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiler:
        began = time.perf_counter()
        work()
        wait(device)
        seconds = time.perf_counter() - began
    spent = [(e.self_device_time_total if on_gpu else e.self_cpu_time_total, e) for e in profiler.key_averages()]
    total = sum(time_us for time_us, _ in spent)
    kernels = sum(event.count for _, event in spent)
    print(f"one probe under the profiler: {seconds:.3f} s, {total / 1e6 / seconds:.0%} of it in {kernels:,d} kernels")
    for time_us, event in sorted(spent, key=lambda pair: -pair[0])[:16]:
        print(f"  {time_us / total:6.1%} {event.count:6d}x {time_us / max(1, event.count):9.1f} us  {event.key[:90]}")


# ---- ways ------------------------------------------------------------------------------------------------


def ways(problem: Problem) -> None:
    """Time a probe of one run, from the samples on the device to means and spreads of all clients."""
    model, device, resident = problem.model, problem.model.start_P.device, Resident([problem])
    parts = [torch.from_numpy(part) for part in problem.clients.train if len(part)]
    samples = sum(map(len, parts))
    at = Standing(model.start_P, model.start_R, None)

    def inputs(index: Tensor) -> tuple[Tensor, Tensor]:
        return resident.inputs(index), resident.targets(index)

    told = layer_gradients.layers_of(model, problem.task, lambda: inputs(torch.arange(2, device=device)))
    assert told is not None
    layers, bytes_each = told
    usual = chunk_bytes(at.y_P) // bytes_each
    kinds: dict[str, Callable[[int], Any]] = {
        "layers": lambda size: of_layers(layers, problem.task, inputs, at, parts, size),
        "every sample": lambda size: of_samples(model, problem.task, inputs, at, parts, size),
        "batches of 32": lambda size: of_batches(problem, inputs, at, torch.cat(parts).to(device), size),
    }
    print(f"{samples:,d} samples of {len(parts)} clients; a probe takes {usual} at a time")
    for size in (1024, 4096, 8192, 16384, 32768) if device.type == "cuda" else (64, 128, 256):
        known = []
        for name, work in kinds.items():
            known.append(work(size))
            seconds, memory = clock(lambda work=work, size=size: work(size), device)  # type: ignore[misc]
            off = ""
            if name == "every sample":
                apart = ((a - b).norm() / b.norm() for a, b in zip(*known, strict=True))
                off = "layers off by " + ", ".join(f"{float(each):.0e}" for each in apart) + " in means, spreads"
            rate = samples / seconds / 1e3
            print(
                f"chunk {size:5d}  {name:14s} {seconds:7.4f} s  {rate:8.1f} k/s  {memory:5.2f} GiB  {off}", flush=True
            )
    chunk = next(chunks(inputs, at, parts, usual))
    calls = taken_apart(layers, problem, at, chunk)
    profile(lambda: kinds["layers"](usual), device)
    for name, (call, d) in calls.items():
        if isinstance(call.layer, nn.Conv2d):
            convolution(name, call.layer, call.given, d)


def clock(work: Callable[[], Any], device: torch.device, seconds: float = 0.2) -> tuple[float, float]:
    """Seconds of one call, the median of as many as fit, and GiB that it takes on a GPU."""
    held = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    work()
    wait(device)
    peak = torch.cuda.max_memory_allocated(device) - held if device.type == "cuda" else 0
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        began = time.perf_counter()
        work()
        wait(device)
        times.append(time.perf_counter() - began)
    return float(np.median(times)), peak / 2**30


def of_batches(problem: Problem, inputs: Inputs, at: Standing, index: Tensor, size: int, batch: int = 32) -> None:
    """Compute the gradients of every ``batch`` consecutive samples, without using them further."""

    def loss(y_P: Tensor, x: Tensor, target: Tensor) -> Tensor:
        logits_BC = problem.model.forward(y_P, at.buffers_R, x, mode="eval")[0].logits_BC
        return problem.task.loss(logits_BC, target).mean()

    gradient = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    for some in torch.split(index[: len(index) // batch * batch], size):
        x, target = inputs(some.view(-1, batch))
        gradient(at.y_P, x, target)


def taken_apart(layers: Listening, problem: Problem, at: Standing, chunk: Any) -> Any:
    """Time each part of moments from layers; return the recorded inputs of the layers."""
    task, layout, device = problem.task, problem.model.layout, at.y_P.device
    _, sizes, x, target, offset_BC = chunk
    into = Sums(
        at.y_P.new_zeros(len(sizes), layout.num_parameters),
        at.y_P.new_zeros(len(sizes), len(layout.names), dtype=torch.float64),
    )
    given = (layers, task, at.y_P, at.buffers_R, x, target, offset_BC)
    calls = layer_gradients.listen(*given)
    convolutions = [(call.layer, call.given, d) for call, d in calls.values() if isinstance(call.layer, nn.Conv2d)]
    others = [(call, d) for call, d in calls.values() if not isinstance(call.layer, nn.Conv2d)]
    each = [each for call, d in calls.values() for each in layer_gradients.of_layer(call, d).values()]
    made = [one for one in each if isinstance(one, Tensor)]
    outer = [
        (at.y_P.new_zeros(len(sizes), one.d_Bo.shape[1], one.a_Bi.shape[1]), one)
        for one in each
        if isinstance(one, Outer)
    ]
    pieces: dict[str, Callable[[], Any]] = {
        "all of it": lambda: layer_gradients.add(into, layout, layer_gradients.listen(*given), sizes),
        "forward and backward": lambda: layer_gradients.listen(*given),
        "pieces of rows": lambda: [layer_gradients.row_pieces(layer, a).flatten(1, 2) for layer, a, _ in convolutions],
        "the same, and products": lambda: [layer_gradients.kernel_gradients(*each) for each in convolutions],
        "BatchNorm and biases": lambda: [
            *(d.flatten(2).sum(2) for *_, d in convolutions),
            *(layer_gradients.of_layer(call, d) for call, d in others),
        ],
        "linear layers": lambda: list(starmap(partial(layer_gradients.add_products, sizes=sizes), outer)),
        "sums": lambda: layer_gradients.sum_by_client(torch.cat(made, dim=1), sizes),
        "squares": lambda: layer_gradients.sum_by_client(
            torch.stack(list(map(layer_gradients.squares, each)), 1), sizes
        ),
    }
    print(f"parts of moments from layers, {len(x)} samples of {len(sizes)} clients at a time:")
    for name, work in pieces.items():
        print(taken(name, clock(work, device), len(x)), flush=True)
    return calls


def convolution(name: str, layer: nn.Conv2d, a: Tensor, d: Tensor) -> None:
    """Time other ways to compute the samples' gradients of a convolution without stride, padding and dilation."""
    (B, C, H, _), (_, D, high_out, wide_out), (high, wide) = a.shape, d.shape, layer.kernel_size
    assert (layer.stride, layer.padding, layer.dilation) == ((1, 1), (0, 0), (1, 1))

    def columns() -> Tensor:  # windows of one row high, [B, C wide, H, wide_out]
        return a.unfold(3, wide, 1).permute(0, 1, 4, 2, 3).reshape(B, C * wide, H, wide_out)

    def windows() -> Tensor:
        """Copy all windows of the kernel at once, and make one product."""
        seen = a.unfold(2, high, 1).unfold(3, wide, 1).permute(0, 1, 4, 5, 2, 3).flatten(4).flatten(1, 3)
        return (d.flatten(2) @ seen.transpose(1, 2)).flatten(1)

    def both() -> Tensor:
        """Shift d along the rows of the kernel and a along its columns: a product of D high with C wide."""
        moved = F.pad(d, (0, 0, high - 1, high - 1)).unfold(2, H, 1).transpose(3, 4).reshape(B, D * high, -1)
        g = (moved @ columns().flatten(2).transpose(1, 2)).view(B, D, high, C, wide)
        return g.flip(2).transpose(2, 3).reshape(B, -1)

    def groups() -> Tensor:
        """Convolve a with d, with every sample as a group."""
        g = F.conv2d(a.transpose(0, 1), d.reshape(B * D, 1, high_out, wide_out), groups=B)
        return g.view(C, B, D, high * wide).permute(1, 2, 0, 3).reshape(B, -1)

    kinds: dict[str, Callable[[], Tensor]] = {
        "rows": lambda: layer_gradients.kernel_gradients(layer, a, d),
        "windows": windows,
        "F.unfold": lambda: (d.flatten(2) @ F.unfold(a, (high, wide)).transpose(1, 2)).flatten(1),
        "rows and columns": both,
        "groups": groups,
    }
    print(f"gradients of {name}, {C} x {high} x {wide} to {D} at {high_out} x {wide_out} places:")
    first = kinds["rows"]()
    for way, work in kinds.items():
        try:
            off = float((work() - first).norm() / first.norm())
            print(taken(way, clock(work, a.device), B), f" off by {off:.0e}", flush=True)
        except RuntimeError as error:
            print(f"  {way:22s} not available: {str(error).splitlines()[0]}", flush=True)


def taken(name: str, spent: tuple[float, float], samples: int) -> str:
    seconds, memory = spent
    return f"  {name:22s} {seconds * 1e3:8.2f} ms  {seconds / samples * 1e6:8.3f} us/sample  {memory:5.2f} GiB"


# ---- intervals -------------------------------------------------------------------------------------------


def intervals(sizes: NDArray[np.float64], repeats: int = 2000) -> None:
    """Simulate many federations, and count how often an interval contains the mean over all of them.

    A client's gradient leans towards one of ten directions, like that of a client with a majority class; sizes are
    drawn from those of the study, or all equal.
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
