"""Low-rank adapters: train a small part of each linear layer of a frozen module.

    y = W x + b + (alpha / rank) B A x        W, b frozen;  A (rank, inputs) drawn;  B (outputs, rank) zero at the start

Hu et al., "LoRA: Low-rank adaptation of large language models", ICLR 2022, https://arxiv.org/abs/2106.09685, eq. 3.
"""

import functools
from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

Targets = str | Sequence[str] | Callable[[str], bool]


def lora(
    module: nn.Module,
    rank: int,
    targets: Targets,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    train: str | Sequence[str] = (),
) -> nn.Module:
    """Freeze ``module`` and add low-rank adapters to its linear layers; return the same module.

    ``targets`` are names of layers or ends of them (``"q_proj"`` is every ``layers.3.q_proj``), or a function of the
    name. ``alpha`` is the rank unless given: B A x then counts once. ``dropout`` is on the adapters' inputs. ``train``
    names parts that train as they are, such as a new classifier. All names of the module stay; the adapters are
    ``lora_A`` and ``lora_B`` beside ``weight``. Raise ValueError if a name matches nothing.

    >>> import torch
    >>> base = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> adapted = lora(base, rank=1, targets="0", train="2")
    >>> [name for name, p in adapted.named_parameters() if p.requires_grad]
    ['0.lora_A', '0.lora_B', '2.weight', '2.bias']
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, not {rank}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, not {dropout}")
    linear = {name: part for name, part in module.named_modules() if _is_linear(part)}
    chosen = _chosen(list(linear), targets)
    for name in chosen:
        parent = module.get_submodule(name.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            raise ValueError(
                f"{name} belongs to nn.MultiheadAttention, which reads its weights without calling it, so an adapter "
                "would have no effect; choose other targets, or write the attention with nn.Linear"
            )
    module.requires_grad_(False)
    for part in {id(linear[name]): linear[name] for name in chosen}.values():  # a layer may have two names
        _adapt(part, rank, (rank if alpha is None else alpha) / rank, dropout)
    names = [name for name, _ in module.named_parameters()]
    for part in [train] if isinstance(train, str) else train:
        found = [name for name in names if f".{part}." in f".{name}."]
        if not found:
            raise ValueError(f"train names {part!r}, but no parameter is in it; parameters here: {_some(names)}")
        for name in found:
            module.get_parameter(name).requires_grad_()
    return module


def _is_linear(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"  # Hugging Face's linear layer of GPT-2


def _chosen(names: list[str], targets: Targets) -> list[str]:
    """Return the names of linear layers that the targets choose; raise ValueError for a target that chooses none."""
    if callable(targets):
        found = [name for name in names if targets(name)]
        if not found:
            raise ValueError(f"targets choose no linear layer; linear layers here: {_some(names)}")
        return found
    wanted = [targets] if isinstance(targets, str) else list(targets)
    for target in wanted or [""]:
        if not any(_ends(name, target) for name in names):
            raise ValueError(f"targets name {target!r}, but no linear layer has it; linear layers here: {_some(names)}")
    return [name for name in names if any(_ends(name, target) for target in wanted)]


def _ends(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"


def _adapt(layer: Any, rank: int, scale: float, dropout: float) -> None:
    weight = layer.get_parameter("weight")
    inputs, outputs = reversed(weight.shape) if isinstance(layer, nn.Linear) else weight.shape
    layer.__class__ = _adapted(layer.__class__)
    layer.lora_A, layer.lora_B = (
        nn.Parameter(weight.new_zeros(rank, inputs)),
        nn.Parameter(weight.new_zeros(outputs, rank)),
    )
    nn.init.kaiming_uniform_(layer.lora_A, a=sqrt(5))
    layer.lora_scale = scale
    layer.lora_dropout = nn.Dropout(dropout) if dropout else nn.Identity()


@functools.cache
def _adapted(kind: Any) -> Any:
    """Return the layer's class with adapters in its forward pass. Its instances keep all their names."""

    class Adapted(kind):  # type: ignore[misc]
        lora_A: Tensor
        lora_B: Tensor
        lora_scale: float
        lora_dropout: nn.Module

        def forward(self, x: Tensor) -> Any:
            return (
                super().forward(x)
                + F.linear(F.linear(self.lora_dropout(x), self.lora_A), self.lora_B) * self.lora_scale
            )

    Adapted.__name__ = f"LoRA{kind.__name__}"
    return Adapted
