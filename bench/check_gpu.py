"""Check on a GPU what the tests can check only on a CPU.

    python bench/check_gpu.py                          # exit status 1 if anything differs
    python bench/check_gpu.py --methods fedavg fedgen

It compares kernels with their definitions, and the stacked engine on the device with the sequential one on the CPU
(runs with different learning rates, partitions and seeds in one stack). It also tests too little memory, and clients'
state stored off the device. Needs only the package.
"""

import argparse
import gc
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from study import images, machine
from torch import Tensor, nn

from fedncv import group_norm, keys
from fedncv.config import RunConfig
from fedncv.engine import evaluate, fused
from fedncv.engine.arithmetic import arithmetic
from fedncv.engine.choose import engine_for
from fedncv.engine.keeping import Keeper, Place
from fedncv.engine.problem import DivergedError, Problem, State, build, start
from fedncv.engine.sequential import run_round
from fedncv.engine.stacked import NoMemoryError, StackedEngine, Way
from fedncv.engine.stacked_scores import ScoringEngine
from fedncv.methods import METHODS
from fedncv.models import Residual, ResNet18, resnet18_bn
from fedncv.tree import leaves

QUICK = {"fedgen": "fedgen:generator_steps=3,hidden=8"}  # longer training of the server would test nothing more
SMALL: dict[str, Any] = {
    "data": "custom", "clients": 6, "per_round": 4, "rounds": 9, "epochs": 2, "batch_size": 8, "momentum": 0.5,
    "stragglers": 0.3, "dropout": 0.1, "partition": "dirichlet:alpha=1",
}  # fmt: skip
OWN: list[dict[str, Any]] = [
    {"lr": 0.05},
    {"lr": 0.01},
    {"lr": 0.1, "schedule": "exponential:decay=0.5", "partition": "iid"},
    {"seed": 3},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--methods", nargs="*", default=[name for name in METHODS if name != "d2"])
    parser.add_argument("--ways", nargs="*", choices=("stacked", "streams"), default=["stacked", "streams"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    device = torch.device(arguments.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    checks: list[tuple[str, Callable[[], float], float]] = [
        ("philox in one kernel: words", lambda: philox(device), 0),
        ("draws under vmap", lambda: draws(device), 0),
        ("a stack with too little memory", lambda: little_memory(device), 1e-4),
        ("clients kept in host memory", lambda: kept(device, "host"), 0),
        ("clients kept in a file", lambda: kept(device, "file"), 0),
    ]
    if fused.HAVE_KERNELS and device.type == "cuda":
        channels = ((3, 6), (6, 16))
        checks += [(f"fused layer, {c} -> {d} channels", partial(layer, c, d, device), 1e-5) for c, d in channels]
        checks += [("linear layers in one kernel", lambda: linear(device), 1e-5)]
        checks += [
            ("group norm, channels last, float64", lambda: normal(torch.float64, device), 1e-12),
            ("group norm, channels last, float32", lambda: normal(torch.float32, device), 1e-5),
            ("group norm, channels last, bf16", lambda: normal(torch.bfloat16, device), 2.0**-8),
        ]
    for way in arguments.ways:
        for name in arguments.methods:
            checks += [(f"{name}: {len(OWN)} runs, {way}, float64", partial(together, name, device, way), 1e-10)]
        for model in MODELS:
            checks += [(f"{model.__name__}: {way}, float64", partial(layers, model, device, way), 1e-10)]
    checks += [
        ("streams: a batch that cannot be padded", lambda: layers(Mixing, device, "streams"), 1e-10),
        ("streams: the same bits twice, ResNet-18", lambda: twice(resnet18_bn, device), 0),
        ("streams: the same, with GroupNorm", lambda: twice(ResNet18, device), 0),
        ("a model that reads a number: falls back", lambda: falls_back(device), 1e-10),
        ("no memory for one client: one line", lambda: no_memory(device), 0),
    ]
    checks += [("fedavg: float32, share of the update", lambda: one_round(device), 1e-4)]
    failed = 0
    for name, check, bound in checks:
        began = time.perf_counter()
        try:
            worst = check()
            verdict = "ok" if worst <= bound else "DIFFERS"
        except (RuntimeError, ValueError, ArithmeticError, AssertionError) as error:
            worst, verdict = float("nan"), f"FAILED {type(error).__name__}: {str(error).splitlines()[0][:120]}"
        failed += verdict != "ok"
        print(f"{name:45s} {worst:9.1e} of {bound:7.0e}  {verdict}  {time.perf_counter() - began:.1f} s", flush=True)
    print(f"{len(checks)} checks, {failed} failed")
    sys.exit(failed > 0)


# ---- draws ---------------------------------------------------------------------------------------------


def philox(device: torch.device) -> float:
    """Compare with Random123's known answer, and random words of many shapes with the CPU."""
    counter = [torch.tensor(word, device=device) for word in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    words = keys.philox(torch.tensor([0xA4093822, 0x299F31D0], device=device), *counter)
    assert [int(word) for word in words] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1], "known answer"
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for shape in ((2,), (3, 1, 2), (3, 5, 1, 2), (2, 3, 5, 1, 2)):
        key, *c = (torch.randint(0, 1 << 32, s, generator=generator) for s in (shape, (700,), (1,), (), ()))
        ours = keys.philox(key.to(device), *(each.to(device) for each in c))
        worst = max(worst, *(float((a.cpu() != b).sum()) for a, b in zip(ours, keys.philox(key, *c), strict=True)))
    return worst


def draws(device: torch.device) -> float:
    """Compare folded keys and permutations of stacked keys with single ones on the CPU."""
    key_K2 = keys.key_for(1, "check", 2, torch.arange(5))

    def one(key: Tensor) -> tuple[Tensor, Tensor]:
        return keys.permutation(keys.fold(key, 3), 50), keys.uniform(key, 50)

    ours = torch.vmap(one)(key_K2.to(device))
    theirs = [torch.stack(part) for part in zip(*(one(key) for key in key_K2), strict=True)]
    return max(float((a.cpu() != b).sum()) for a, b in zip(ours, theirs, strict=True))


# ---- layers --------------------------------------------------------------------------------------------


def layer(C: int, D: int, device: torch.device) -> float:
    """Compare the kernels in float32 with the plain operations in float64, forward and backward."""
    from fedncv.engine import fused_kernels

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    weight = torch.ones(3, 9, device=device)
    weight[0, 5:] = 0
    x, w, bias, gamma, beta, mean = draw(3, 9, C, 14, 14), draw(3, D, C, 5, 5), *(draw(3, D) for _ in range(4))
    inputs = (x, w, bias, gamma, beta, mean, draw(3, D).abs(), weight)
    got = cast(Any, fused_kernels.forward)(*inputs, 1e-5, 0.1)
    worst = _relative(got, cast(Any, fused.forward)(*(a.double() for a in inputs), 1e-5, 0.1))
    parts = (draw(*got[0].shape) * weight[:, :, None, None, None], x, w, gamma, beta, weight, *got[1:4])
    ours = cast(Any, fused_kernels.backward)(*parts, True)
    theirs = cast(Any, fused.backward)(*(a.double() for a in parts), True)
    some = (0, 1, 3, 4)  # the gradient of a bias before BatchNorm is zero up to rounding
    return max(worst, _relative([ours[i] for i in some], [theirs[i] for i in some]))


def linear(device: torch.device) -> float:
    """Compare linear layers in float32, with ReLU and without, with torch's in float64, forward and backward."""
    from fedncv.engine import fused_kernels

    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for N, M, relu in ((400, 120, True), (84, 10, False)):
        shapes = ((3, 9, N), (3, M, N), (3, M), (3, 9, M))
        x, w, bias, g = (torch.randn(*shape, generator=generator).to(device) for shape in shapes)
        leaf = [a.double().requires_grad_() for a in (x, w, bias)]
        plain = torch.baddbmm(leaf[2].unsqueeze(1), leaf[0], leaf[1].mT)
        plain = plain.relu() if relu else plain
        theirs = (plain.detach(), *torch.autograd.grad(plain, leaf, g.double()))
        out = fused_kernels.linear(x, w, bias, relu)
        worst = max(worst, _relative((out, *fused_kernels.linear_backward(g, x, w, out, relu, True)), theirs))
    return worst


def normal(dtype: torch.dtype, device: torch.device) -> float:
    """Compare GroupNorm with torch's in float64 on the same numbers, forward and backward, for several shapes."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    worst = 0.0
    parameters = torch.promote_types(dtype, torch.float32)
    resnet = [(32, C, side, 2) for C, side in ((64, 32), (128, 16), (256, 8), (512, 4))]
    for N, C, side, groups in (*resnet, (3, 30, 13, 6), (1, 3, 201, 1)):
        x, g = (2 * draw(N, C, side, side) + 3).to(dtype), draw(N, C, side, side).to(dtype)
        leaf = [x.to(memory_format=torch.channels_last), draw(C).to(parameters), draw(C).to(parameters)]
        real = [a.double().requires_grad_() for a in leaf]
        out = cast(Any, group_norm.Normalised.apply)(*(a.requires_grad_() for a in leaf), groups, 1e-5)
        plain = nn.functional.group_norm(real[0], groups, real[1], real[2], 1e-5)
        ours = (out.detach(), *torch.autograd.grad(out, leaf, g))
        worst = max(worst, _relative(ours, (plain.detach(), *torch.autograd.grad(plain, real, g.double()))))
    return worst


def _relative(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    norm = torch.linalg.vector_norm
    return max(float(norm(a - b) / norm(b)) for a, b in zip(ours, theirs, strict=True))


# ---- rounds --------------------------------------------------------------------------------------------


def problems(
    device: torch.device | str, own: list[dict[str, Any]], *, model: Any = None, **settings: Any
) -> list[Problem]:
    data = images(240, shape=(1, 16, 16))
    settings = SMALL | settings | {"device": str(device)} | ({"model": "custom"} if model else {})
    made = [build(RunConfig(**settings | each), data=data, model=model) for each in own]
    return [each._replace(dataset=made[0].dataset) for each in made]


def rounds(engine: StackedEngine, num: int) -> tuple[State, ...]:
    states = [start(problem) for problem in engine.problems]
    for _ in range(num):
        states = [_going(settled)[0] for settled in engine.run_rounds(states)]
    return tuple(states)


def _going(settled: Any) -> Any:
    if isinstance(settled, DivergedError):
        raise settled
    return settled


def distance(ours: Any, theirs: Any) -> float:
    """Return the largest difference of two trees, relative for large numbers."""
    worst = 0.0
    for (path, a), (other, b) in zip(leaves(ours), leaves(theirs), strict=True):
        assert path == other, f"{path} is not {other}"
        if not isinstance(a, Tensor):
            assert a == b, f"{path}: {a} is not {b}"
        elif a.numel():
            a, b = a.cpu().double(), b.cpu().double()
            worst = max(worst, float(((a - b).abs() / b.abs().clamp(min=1)).max()))
    return worst


def together(name: str, device: torch.device, way: Way) -> float:
    """Compare runs in one stack on the device with each run alone, sequentially on the CPU; two rounds."""
    method = QUICK.get(name, name)
    ours = rounds(StackedEngine(problems(device, OWN, method=method, dtype="float64"), way=way), 2)
    worst = 0.0
    for problem, got in zip(problems("cpu", OWN, method=method, dtype="float64"), ours, strict=True):
        state = start(problem)
        for _ in range(2):
            state, _row = run_round(problem, state)
        worst = max(worst, distance(got, state))
    return worst


class Deep(nn.Module):
    """Twenty convolutions with BatchNorm."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(20):
            layers += [nn.Conv2d(shape[0] if i == 0 else 4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(4, outputs)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.head(self.body(x))


class Grouped(nn.Module):
    """A narrow ResNet with GroupNorm."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        norm, widths = partial(nn.GroupNorm, 2), (8, 8, 12, 16)
        blocks = [Residual(a, b, 1 + (a < b), norm) for a, b in itertools.pairwise(widths)]
        first = nn.Conv2d(shape[0], widths[0], 3, padding=1, bias=False)
        self.body = nn.Sequential(first, norm(8), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(widths[-1], outputs)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.head(self.body(x))


class Recurrent(nn.Module):
    """An LSTM of two layers with dropout between them, over the rows of a picture."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(shape[-1], 8, num_layers=2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(8, outputs)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.head(self.lstm(x[:, 0])[0][:, -1])


class Attentive(nn.Module):
    """A layer of a transformer with dropout, over the rows of a picture."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(shape[-1], 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(shape[-1], outputs)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.head(self.body(x[:, 0]).mean(1))


class Mixing(nn.Module):
    """Subtracts the mean of the batch, so a padded sample would change the others."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 8), nn.ReLU())
        self.head = nn.Linear(8, outputs)

    def forward(self, x):  # type: ignore[no-untyped-def]
        h = self.body(x)
        return self.head(h - h.mean(0))


class Reads(Mixing):
    """Branches on a number of the batch, so a step cannot be recorded."""

    def forward(self, x):  # type: ignore[no-untyped-def]
        h = self.body(x)
        return self.head(h if h.sum().item() > 0 else -h)


MODELS = (Deep, Grouped, Recurrent, Attentive)


def layers(model: Any, device: torch.device, way: Way) -> float:
    """Compare two rounds and the scores of a model of these layers with the sequential engine on the CPU."""
    # short steps: twenty BatchNorms over a few samples amplify rounding in every step
    settings: dict[str, Any] = {"dtype": "float64", "momentum": 0.0}
    (ours,), (plain,) = (problems(where, [{"lr": 1e-3}], model=model, **settings) for where in (device, "cpu"))
    engine = ScoringEngine([ours], way=way)
    if model is Grouped and way == "streams" and group_norm.usable(device):
        assert engine.layers == ["streams, channels last"], f"it ran with {engine.layers}"
    (got,), state = rounds(engine, 2), start(plain)
    for _ in range(2):
        state, _row = run_round(plain, state)
    assert engine.before([got])[0] == evaluate.before(plain, state), "scores before differ"
    assert engine.after([got])[0] == evaluate.after(plain, state), "scores after differ"
    return distance(got, state)


def twice(model: Any, device: torch.device) -> float:
    """Return the largest difference of two runs with the same settings, in float32."""
    found = []
    for _ in range(2):
        (problem,) = problems(device, OWN[:1], model=model)
        with arithmetic(problem.config):
            found.append(rounds(StackedEngine([problem], way="streams"), 2))
    return distance(*found)


def falls_back(device: torch.device) -> float:
    """Check that a model that cannot be recorded runs one client after the other, with the sequential engine's bits."""
    (ours,) = problems(device, OWN[:1], model=Reads, dtype="float64")
    engine = engine_for([ours])
    if device.type == "cuda":
        assert engine.name == "sequential", f"it ran with {engine.name}"
    state, (plain,) = start(ours), problems("cpu", OWN[:1], model=Reads, dtype="float64")
    theirs = start(plain)
    for _ in range(2):
        ((state, _),) = [_going(each) for each in engine.run_rounds([state])]
        theirs, _row = run_round(plain, theirs)
    return distance(state, theirs)


def no_memory(device: torch.device) -> float:
    """Check that too little memory for one client is refused in one line."""
    if device.type != "cuda":
        return 0.0
    (problem,) = problems(device, OWN[:1], model=resnet18_bn)
    gc.collect()
    torch.cuda.empty_cache()
    held, whole = torch.cuda.memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((held + (300 << 20)) / whole, device)
    try:
        rounds(StackedEngine([problem], way="streams"), 1)
    except NoMemoryError as error:
        print(f"  {error}")
        return float("\n" in str(error))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    raise AssertionError("there was memory, so nothing was checked")


def one_round(device: torch.device) -> float:
    """‖difference‖ / ‖update‖ of the shared model after a round, with fused layers if there are kernels."""
    (ours,), (plain,) = (problems(where, OWN[:1], momentum=0.0, stragglers=0.0) for where in (device, "cpu"))
    (got,), (state, _row) = rounds(StackedEngine([ours]), 1), run_round(plain, start(plain))
    update = state.server.x_P - plain.model.start_P
    norm = torch.linalg.vector_norm
    return float(norm(got.server.x_P.cpu() - state.server.x_P) / norm(update))


def little_memory(device: torch.device) -> float:
    """Compare a stack of 400 clients that is halved until it fits in memory with one that has enough."""
    settings: dict[str, Any] = {"clients": 400, "per_round": 400, "partition": "iid", "momentum": 0.0, "epochs": 1}
    settings |= {"stragglers": 0.0, "batch_size": 32}
    data = images(400 * 24, shape=(3, 32, 32))
    config = RunConfig(**SMALL | settings | {"device": str(device)})
    problem = build(config, data=data)
    expected = rounds(StackedEngine([problem]), 1)
    if device.type != "cuda":
        return distance(rounds(StackedEngine([problem], capacity=100), 1), expected)
    gc.collect()
    torch.cuda.empty_cache()
    held, whole = torch.cuda.memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((held + (1 << 30)) / whole, device)
    try:
        engine = StackedEngine([problem])
        got = rounds(engine, 1)
        assert engine.capacity < 400, "there was memory for all clients, so nothing was checked"
        return distance(got[0].server, expected[0].server)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def kept(device: torch.device, place: str) -> float:
    """Check that storing clients' state off the device changes no bit."""
    (problem,) = problems(device, OWN[:1], method="scaffold")
    engine = StackedEngine([problem])
    expected = rounds(engine, 3)
    engine._keeper = Keeper(6, device, place=cast(Place, place))
    got = rounds(engine, 3)
    if device.type == "cuda":
        assert all(leaf.device.type == "cpu" for _, leaf in leaves(got[0].kept) if leaf.numel()), "it is on the device"
    return distance(got, expected)


if __name__ == "__main__":
    main()
