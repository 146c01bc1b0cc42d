"""Time GroupNorm, forward and backward, for ResNet-18's shapes: torch's on channels first, ours on channels last.

    python bench/group_norm.py                       # on a GPU; microseconds, the median of 50 recorded passes
    python bench/group_norm.py --streams 10          # as many passes at the same time, per pass
    python bench/group_norm.py --block 4096 8192 16384

GB/s counts the fewest bytes: x read and y written, x and g read and dx written.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from study import machine
from torch import Tensor, nn

from fedncv import group_norm, group_norm_kernel

SHAPES = ((64, 32), (128, 16), (256, 8), (512, 4))
BATCH, GROUPS = 32, 2
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--block", type=int, nargs="+", default=[group_norm_kernel.BLOCK])
    arguments = parser.parse_args()
    print(machine())
    print(f"{'':20s}{'torch':>10s}" + "".join(f"{f'{block:,}':>10s}" for block in arguments.block) + f"{'GB/s':>8s}")
    for name, dtype in DTYPES.items():
        for C, side in SHAPES:
            x = torch.randn(BATCH, C, side, side, device="cuda", dtype=dtype)
            last = x.to(memory_format=torch.channels_last)
            plain, ours = nn.GroupNorm(GROUPS, C).cuda(), nn.GroupNorm(GROUPS, C).cuda()
            group_norm.use_kernels(ours)
            times = [timed(plain, x.float(), arguments.streams)]  # also in bf16: so does autocast
            for group_norm_kernel.BLOCK in arguments.block:
                times.append(timed(ours, last, arguments.streams))
            rate = 5 * x.numel() * x.element_size() / min(times[1:]) / 1e3
            print(f"{name:9s}{C:4d} x {side:2d}²" + "".join(f"{each:10.1f}" for each in times) + f"{rate:8,.0f}")


def timed(layer: nn.Module, x: Tensor, streams: int) -> float:
    """Return microseconds of a pass, with as many recorded ones at the same time as there are streams."""
    x = x.requires_grad_()
    g = torch.randn_like(x)
    passes: Callable[[], object] = lambda: torch.autograd.grad(layer(x), [x, *layer.parameters()], g)  # noqa: E731
    recorded = []
    for _ in range(streams):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            passes()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(10):
                passes()
        recorded.append((stream, graph))
    times = []
    for _ in range(50):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for stream, graph in recorded:
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                graph.replay()
            torch.cuda.current_stream().wait_stream(stream)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / 10 / streams)
    return float(np.median(times))


if __name__ == "__main__":
    main()
