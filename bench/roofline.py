"""Compare one stacked step with the limits of the machine: floating-point operations and bytes.

    python bench/roofline.py --device cuda

Operations are those that the model needs (counted by torch on a plain module). Bytes are the fewest that a step can
move if kernels store one activation per layer: inputs, convolution outputs, pooled maps, weights and gradients.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from study import images, machine, problems
from torch.utils.flop_counter import FlopCounterMode

from fedncv.engine.problem import start
from fedncv.engine.stacked import StackedEngine
from fedncv.models import LeNet5

BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    print(machine())
    flops, moved = operations(), fewest_bytes()
    copy_rate, multiply_rate = ceilings(device)
    print(f"one sample: {flops / 1e6:.2f} MFLOP, at least {moved / 1e3:.0f} kB moved, {flops / moved:.1f} FLOP/byte")
    print(f"measured ceilings: {copy_rate / 1e12:.2f} TB/s copied, {multiply_rate / 1e12:.1f} TFLOP/s float32 products")
    floor = max(flops / multiply_rate, moved / copy_rate)
    print(f"upper bound: {1 / floor / 1e6:.1f} M samples/s")
    print(f"{'clients':>8s} {'us/step':>10s} {'samples/s':>12s} {'TFLOP/s':>8s} {'of the bound':>12s}")
    for clients in (1, 2, 5, 10, 20, 50, 100):
        seconds = step_time(device, clients)
        rate = clients * BATCH / seconds
        print(f"{clients:8d} {seconds * 1e6:10.0f} {rate:12,.0f} {rate * flops / 1e12:8.2f} {rate * floor:12.1%}")


def operations() -> float:
    """Return the operations of forward and backward pass, per sample."""
    module = LeNet5((3, 32, 32), 10)
    x, y = torch.randn(BATCH, 3, 32, 32), torch.zeros(BATCH, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(torch.nn.functional.cross_entropy(module(x), y))
    return float(counter.get_total_flops()) / BATCH


def fewest_bytes() -> float:
    """Input read twice; each convolution's output written, read forward, read twice and its gradient once more."""
    inputs, first, second = 3 * 32 * 32, 6 * 28 * 28, 16 * 10 * 10
    pooled = 6 * 14 * 14 + 16 * 5 * 5
    parameters = 62_050
    floats = 2 * inputs + 6 * (first + second) + 4 * pooled + 6 * parameters / BATCH
    return 4.0 * floats


def clocked(function: Callable[[], object], device: torch.device, repeat: int) -> float:
    """Return the median seconds of a call."""
    times = []
    for _ in range(repeat):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def ceilings(device: torch.device) -> tuple[float, float]:
    """Return bytes/s of a large copy (read and written) and operations/s of a large float32 product."""
    n, m = (1 << 28, 8192) if device.type == "cuda" else (1 << 24, 1024)
    source, target = torch.randn(n, device=device), torch.empty(n, device=device)
    a, b = torch.randn(m, m, device=device), torch.randn(m, m, device=device)
    copied = clocked(lambda: target.copy_(source), device, 7)
    multiplied = clocked(lambda: a @ b, device, 5)
    return 8 * n / copied, 2 * m**3 / multiplied


def step_time(device: torch.device, clients: int) -> float:
    """Return the seconds of one step of ``clients`` clients, from the difference of rounds with many and few steps."""
    times = []
    for size in (320, 1600):
        made = problems(
            1, data=images(size * clients), clients=clients, per_round=clients, epochs=4, partition="iid",
            test_share=0.0, rounds=10, device=str(device),
        )  # fmt: skip
        engine, states = StackedEngine(made), [start(made[0])]
        engine.run_rounds(states)
        times.append(clocked(lambda engine=engine, states=states: engine.run_rounds(states), device, 3))  # type: ignore[misc]
    return (times[1] - times[0]) / (4 * (1600 - 320) / BATCH)


if __name__ == "__main__":
    main()
