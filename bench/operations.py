"""Count on a CPU the operations that a round of every method needs on a GPU: no clock, so no noise.

    python bench/operations.py
    python bench/operations.py --methods fedavg moon fedgen --where

    a step       operations of one training step of all clients, each at least one kernel, replayed from a graph
    a round      operations outside the steps: messages, begin, tables, finish, averages, the server's half
    waits        how often the host waits for the device there, to read a number or to finish sending one
    too early    waits between the first step and the plan for the next round: that plan could have been made while
                 the device trains, but now waits until it has finished
    on the host  operations on tensors that never leave main memory, outside the plan

One CPU plays both parts: tensors made from numbers and arrays are on the host until they are sent ``to`` the device,
all others are on the device. Layers and random words use torch's own operations instead of a GPU's fused ones, so
there are more of them; the operations that a method adds are the same.
"""

import argparse
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from methods import advanced, of_method
from study import images, problems
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedncv.engine.problem import start
from fedncv.engine.stacked import StackedEngine
from fedncv.engine.stage import Stage
from fedncv.estimators import control_variate, units

READS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__"}
HOST = torch.device("cpu", 1)  # the device of tensors on the simulated host
DEVICE = Tensor.device.__get__
NO_KERNEL = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "_local_scalar_dense", "_unsafe_view"}
NO_KERNEL |= {"scalar_tensor", "squeeze_"}


class Counts:
    """Counts of one round. ``part`` is the current part of the engine's work."""

    def __init__(self, host: list[Tensor]) -> None:
        self.part = "round"
        self.steps = 0
        self.training = False
        self.operations: Counter[str] = Counter()
        self.too_early = 0
        self.waits: Counter[str] = Counter()  # by the line that waits
        self.on_host = False
        self._host = {id(tensor): tensor for tensor in host}

    def is_host(self, tensors: list[Tensor]) -> bool:
        return all(id(tensor) in self._host for tensor in tensors)

    def on_the_host(self, made: Any) -> Any:
        self._host |= {id(leaf): leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)}
        return made

    def wait(self) -> None:
        if self.part == "round":
            self.too_early += self.training
            frames = [frame for frame in traceback.extract_stack() if "/fedncv/" in frame.filename]
            self.waits[f"{frames[-1].filename.rpartition('/fedncv/')[2]}:{frames[-1].lineno} {frames[-1].line}"] += 1

    def inside(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with its operations counted as ``part``."""

        def counted(*arguments: Any, **named: Any) -> Any:
            before, self.part = self.part, part
            self.steps += part == "step"
            self.training = part == "step"
            try:
                return function(*arguments, **named)
            finally:
                self.part = before

        return counted


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **kwargs or {})
        launches = not function.is_view and function.__name__.partition(".")[0] not in NO_KERNEL
        if launches and any(leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)):
            part = self._counts.part
            self._counts.operations["host" if self._counts.on_host and part == "round" else part] += 1
        return made


class Calls(TorchFunctionMode):
    """Records whether a call is on the host or on the device."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts, kwargs, name = self._counts, kwargs or {}, getattr(function, "__name__", "")
        leaves = tree_leaves((args, kwargs))
        host = counts.is_host([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        if function == DEVICE:
            return HOST if host else DEVICE(*args)
        sent = name == "new_tensor" or any(isinstance(leaf, torch.device) and leaf != HOST for leaf in leaves)
        before, counts.on_host = counts.on_host, host and not sent
        try:
            made = function(*args, **kwargs)
        finally:
            counts.on_host = before
        copied = host and sent and name in ("to", "tensor", "as_tensor") and not kwargs.get("non_blocking")
        if copied or name == "new_tensor" or (name in READS and not host):
            counts.wait()
        if name == "cpu" or (host and not sent):
            made = counts.on_the_host(made)
        return made.view_as(made) if name == "to" and sent else made  # a new tensor object


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=6, help="rounds before the counted one")
    methods = ["fedavg", "scaffold", "fedncv", "fedncv+memory:beta=learned"]
    parser.add_argument("--methods", nargs="+", default=methods)
    parser.add_argument("--where", action="store_true", help="name the lines that wait")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for module in (units, control_variate):  # values on a GPU are not read for checks
        vars(module)["readable"] = lambda _: False
    settings = {"per_round": arguments.per_round, "rounds": arguments.rounds + 2, "epochs": 1, "device": "cpu"}
    made = problems(arguments.seeds, data=images(6_000), **settings)
    print(f"{'method':30s} {'a step':>8s} {'a round':>8s} {'waits':>6s} {'too early':>10s} {'on the host':>12s}")
    for name in arguments.methods:
        counts = counted([of_method(problem, name) for problem in made], arguments.rounds)
        step, a_round = counts.operations["step"] / counts.steps, counts.operations["round"]
        waits, host = counts.waits.total(), counts.operations["host"]
        print(f"{name:30s} {step:8.0f} {a_round:8d} {waits:6d} {counts.too_early:10d} {host:12d}", flush=True)
        for line, number in counts.waits.most_common() if arguments.where else ():
            print(f"{number:8d}  {line}")


def counted(made: list[Any], rounds: int) -> Counts:
    """Count the round after ``rounds`` others."""
    engine, states = StackedEngine(made, fused=False), [start(problem) for problem in made]
    for _ in range(rounds):
        states = advanced(engine, states)
    counts = Counts([problem.federation.sizes_N for problem in made])
    from_numpy = torch.from_numpy
    with (
        patch.object(Stage, "_one_step", counts.inside("step", Stage._one_step)),
        patch.object(StackedEngine, "plan", counts.inside("ahead", StackedEngine.plan)),
        patch.object(StackedEngine, "_plan_ahead", counts.inside("ahead", StackedEngine._plan_ahead)),
        patch.object(torch, "from_numpy", lambda array: counts.on_the_host(from_numpy(array))),
        Calls(counts),
        Kernels(counts),
    ):
        advanced(engine, states)
    return counts


if __name__ == "__main__":
    main()
