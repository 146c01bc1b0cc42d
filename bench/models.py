"""Measure training samples per second of many models beside a plain PyTorch loop.

    python bench/models.py --device cuda
    python bench/models.py --device cuda --precision tf32 bf16
    python bench/models.py --device cpu
    python bench/models.py --device cpu --clients 2 --batches 1 --turns 1        # does it run?

The engine is the one that engine=auto takes; it says which and why. On a GPU it is timed beside the loop in the same
process; on a CPU (processes on two workers) beside the loop in two processes that neither wait nor average. There the
ratio of CPU seconds per sample, of all processes together, is printed too: other programs change it less.

Ten clients, batches of 32, inputs drawn at random in the right shape. Each turn times a round of the plain loop
(ordinary modules, autograd, SGD, the same batches, one client after the other, eager, in the same precision) and a
round of the engine, so that load slows both alike; the result is the median ratio. With bf16 a second plain loop, in
TF32, is timed too.

``lora`` is a transformer with frozen weights and adapters of rank 8: BERT of the library transformers (width 256, 4
layers, 128 tokens) if it is installed, char_transformer otherwise.
"""

import argparse
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from study import machine
from throughput import settled, wait
from torch import Tensor, nn

from fedncv.adapters import lora
from fedncv.config import RunConfig
from fedncv.data import Clients, Dataset
from fedncv.engine.arithmetic import arithmetic
from fedncv.engine.choose import engine_for
from fedncv.engine.problem import Problem, build, start
from fedncv.engine.protocol import Engine
from fedncv.engine.round import draw
from fedncv.flat import Factory
from fedncv.models import MODELS, Logits


class Case(NamedTuple):
    factory: Factory
    inputs: Callable[[int, np.random.Generator], Tensor]
    outputs: int


def pictures(num: int, rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(rng.normal(size=(num, 3, 32, 32)).astype(np.float32))


def tokens(length: int, kinds: int) -> Callable[[int, np.random.Generator], Tensor]:
    return lambda num, rng: torch.from_numpy(rng.integers(kinds, size=(num, length)))


def adapted() -> Case:
    """Return the LoRA transformer: a Hugging Face one if the library is here."""
    try:
        from transformers import BertConfig, BertForSequenceClassification
    except ImportError:

        def small(shape: tuple[int, ...], outputs: int) -> nn.Module:
            return lora(MODELS["char_transformer"](shape, outputs), 8, ("linear1", "linear2"), train="head")

        return Case(small, tokens(80, 80), 80)

    def bert(shape: tuple[int, ...], outputs: int) -> nn.Module:
        config = BertConfig(
            vocab_size=1000, max_position_embeddings=shape[0],
            hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
        )  # fmt: skip
        config.num_labels = outputs
        return lora(Logits(BertForSequenceClassification(config)), 8, ("query", "value"), train="classifier")

    return Case(bert, tokens(128, 1000), 10)


CASES: dict[str, Callable[[], Case]] = {
    "lenet5": lambda: Case(MODELS["lenet5"], pictures, 10),
    "mlp": lambda: Case(MODELS["mlp"], pictures, 10),
    "resnet18": lambda: Case(MODELS["resnet18"], pictures, 10),
    "resnet18_bn": lambda: Case(MODELS["resnet18_bn"], pictures, 10),
    "char_lstm": lambda: Case(MODELS["char_lstm"], tokens(80, 80), 80),
    "char_transformer": lambda: Case(MODELS["char_transformer"], tokens(80, 80), 80),
    "lora": adapted,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--precision", nargs="+", choices=("torch", "float32", "tf32", "bf16"), default=["torch"])
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--batches", type=int, default=8, help="of each client in a round")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no further turn of a model after so long")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    for precision in arguments.precision:
        for name in arguments.models:
            measure(name, CASES[name](), precision, arguments)


def problem_of(case: Case, precision: Any, arguments: argparse.Namespace) -> Problem:
    rng = np.random.default_rng(0)
    each = 32 * arguments.batches
    x = case.inputs(arguments.clients * each, rng)
    y = torch.from_numpy(rng.integers(case.outputs, size=len(x)))
    parts = np.array_split(np.arange(len(x)), arguments.clients)
    config = RunConfig(
        clients=arguments.clients, per_round=arguments.clients, rounds=1000, epochs=1, lr=0.001,
        device=arguments.device, precision=precision, engine=arguments.engine,
    )  # fmt: skip
    clients = Clients(parts, [part[:32] for part in parts])
    return build(config, data=Dataset("drawn", x, y, case.outputs), clients=clients, model=case.factory)


def measure(name: str, case: Case, precision: str, arguments: argparse.Namespace) -> None:
    problem = problem_of(case, precision, arguments)
    device, began = problem.model.start_P.device, time.perf_counter()
    on_cpu = device.type == "cpu"
    with arithmetic(problem.config):
        engine = engine_for([problem])
        states = [start(problem)]
        for _ in range(2):  # graphs are recorded here
            states = [settled(each) for each in engine.run_rounds(states)]
    loops = [PlainLoop(problem, case, each) for each in ([precision, "tf32"] if precision == "bf16" else [precision])]
    for loop in [] if on_cpu else loops:
        loop.round()
    wait(device)
    size = problem.model.layout.num_parameters
    print(f"{name}, precision={precision}: {engine.name}, {engine.layers[0]} layers; ", end="")
    print(f"{size:,} of {problem.model.num_weights:,} parameters train; start-up {time.perf_counter() - began:.1f} s")
    rates: list[list[float]] = []
    costs: list[float] = []
    began = time.perf_counter()
    while len(rates) < arguments.turns and (not rates or time.perf_counter() - began < arguments.seconds):
        timed = [in_two_processes(loop) if on_cpu else (rate_of(loop), math.nan) for loop in loops]
        at, before, spent = time.perf_counter(), states[0].totals.samples, cpu_seconds(engine)
        with arithmetic(problem.config):
            states = [settled(each) for each in engine.run_rounds(states)]
            wait(device)
        samples = states[0].totals.samples - before
        rates.append([*(rate for rate, _ in timed), samples / (time.perf_counter() - at)])
        costs.append(timed[0][1] * samples / (cpu_seconds(engine) - spent))
    ours = np.array(rates)[:, -1]
    memory = f", {torch.cuda.memory_reserved(device) / 2**30:.1f} GiB reserved" if device.type == "cuda" else ""
    by_cpu = f", by CPU time {np.median(costs):.2f} ({min(costs):.2f} to {max(costs):.2f})" if on_cpu else ""
    for i, loop in enumerate(loops):
        theirs = np.array(rates)[:, i]
        ratios = ours / theirs
        print(
            f"  plain loop in {loop.precision} {np.median(theirs):9,.0f} samples/s   fedncv {np.median(ours):9,.0f} "
            f"samples/s   {np.median(ratios):.2f} times (of {len(rates)} turns: {ratios.min():.2f} to "
            f"{ratios.max():.2f}){memory}{by_cpu}",
            flush=True,
        )
    engine.close()
    if device.type == "cuda":
        del engine, loops
        torch.cuda.empty_cache()


def rate_of(plain: "PlainLoop") -> float:
    """Return samples/s of a round."""
    began = time.perf_counter()
    samples = plain.round()
    wait(plain.device)
    return samples / (time.perf_counter() - began)


def cpu_seconds(engine: Engine) -> float:
    """Return the CPU time so far of this process and of the engine's workers."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in getattr(engine, "pids", [])]
    ticks = sum(int(each[11]) + int(each[12]) for each in fields)  # in user and in kernel mode
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def in_two_processes(plain: "PlainLoop") -> tuple[float, float]:
    """Return samples/s and CPU seconds per sample of two loops at once, each with its half of the clients.

    Each trains a client before the clock starts.
    """
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def run(half: int) -> None:
        torch.set_num_threads(1)
        plain.ids = plain.ids[half::2]
        plain.round(at_most=1)
        at, spent = time.perf_counter(), time.process_time()
        samples = plain.round()
        queue.put((samples / (time.perf_counter() - at), (time.process_time() - spent) / samples))

    workers = [context.Process(target=run, args=(half,)) for half in range(2)]
    for worker in workers:
        worker.start()
    rates, costs = zip(*(queue.get() for _ in workers), strict=True)
    for worker in workers:
        worker.join()
    return float(sum(rates)), float(np.mean(costs))


class PlainLoop:
    """A module and an optimizer; one client after the other, each from the same weights."""

    def __init__(self, problem: Problem, case: Case, precision: str) -> None:
        self._problem, self.precision = problem, precision
        self.device = problem.model.start_P.device
        dataset = problem.dataset
        self._module = case.factory(tuple(dataset.x.shape[1:]), dataset.num_classes).to(self.device).train()
        self._trained = [p for p in self._module.parameters() if p.requires_grad]
        self._start = [p.detach().clone() for p in self._trained]
        self.ids = draw(problem, 0).ids

    def round(self, at_most: int | None = None) -> int:
        """Train the clients of a round; return the number of samples."""
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before = matmul.allow_tf32, cudnn.allow_tf32
        if self.precision in ("float32", "tf32"):
            matmul.allow_tf32 = cudnn.allow_tf32 = self.precision == "tf32"
        try:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
                return self._round(at_most)
        finally:
            matmul.allow_tf32, cudnn.allow_tf32 = before

    def _round(self, at_most: int | None) -> int:
        problem, samples = self._problem, 0
        for u in self.ids[:at_most]:
            with torch.no_grad():
                for parameter, value in zip(self._trained, self._start, strict=True):
                    parameter.copy_(value)
            optimizer = torch.optim.SGD(self._trained, lr=problem.config.lr)
            index = torch.from_numpy(problem.clients.train[u]).to(self.device)
            x, y = problem.dataset.inputs(index, torch.float32), problem.dataset.y[index]
            for rows in torch.split(torch.randperm(len(index), device=self.device), problem.config.batch_size):
                optimizer.zero_grad()
                torch.autograd.backward(nn.functional.cross_entropy(self._module(x[rows]), y[rows]))
                optimizer.step()
                samples += len(rows)
        return samples


if __name__ == "__main__":
    main()
