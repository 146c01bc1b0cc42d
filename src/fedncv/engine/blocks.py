"""Find layers of a module that can be one operation: convolution, BatchNorm, ReLU and 2x2 maximum in sequence."""

from collections.abc import Iterator

from torch import nn

Block = tuple[nn.Sequential, int, nn.Conv2d, nn.BatchNorm2d]


def blocks(module: nn.Module) -> Iterator[Block]:
    """Yield (sequence, place of the convolution, the convolution, its norm), if not used or hooked elsewhere."""
    names = [id(part) for _, part in module.named_modules(remove_duplicate=False)]
    for sequence in [part for part in module.modules() if type(part) is nn.Sequential]:
        for i in range(len(sequence) - 3):
            parts = [sequence[i + j] for j in range(4)]
            if any(names.count(id(part)) > 1 or _watched(part) for part in parts):
                continue
            conv, norm, relu, pool = parts
            if not (type(conv) is nn.Conv2d and type(norm) is nn.BatchNorm2d and type(pool) is nn.MaxPool2d):
                continue
            if _plain(conv) and norm.affine and norm.track_running_stats and type(relu) is nn.ReLU and _halves(pool):
                yield sequence, i, conv, norm


def pairs(module: nn.Module) -> Iterator[tuple[nn.Sequential, int]]:
    """Yield (sequence, place of a linear layer) with a ReLU after it, if neither is used or hooked elsewhere."""
    names = [id(part) for _, part in module.named_modules(remove_duplicate=False)]
    for sequence in [part for part in module.modules() if type(part) is nn.Sequential]:
        for i in range(len(sequence) - 1):
            linear, relu = sequence[i], sequence[i + 1]
            if any(names.count(id(part)) > 1 or _watched(part) for part in (linear, relu)):
                continue
            if type(linear) is nn.Linear and type(relu) is nn.ReLU:
                yield sequence, i


def replace_block(block: Block, conv: nn.Module, norm: nn.Module) -> None:
    """Replace the block's first two layers by these; the layers after them do nothing and keep their names."""
    sequence, i, *_ = block
    sequence[i], sequence[i + 1] = conv, norm
    sequence[i + 2], sequence[i + 3] = nn.Identity(), nn.Identity()


def _watched(part: nn.Module) -> bool:
    return bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)


def _plain(conv: nn.Conv2d) -> bool:
    ones = (conv.stride, conv.dilation, (conv.groups, conv.groups))
    return all(pair == (1, 1) for pair in ones) and conv.padding == (0, 0)


def _halves(pool: nn.MaxPool2d) -> bool:
    return (
        pool.kernel_size in (2, (2, 2))
        and pool.stride in (2, (2, 2))
        and pool.padding in (0, (0, 0))
        and pool.dilation in (1, (1, 1))
        and not pool.ceil_mode
        and not pool.return_indices
    )
