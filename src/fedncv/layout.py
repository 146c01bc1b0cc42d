"""Where each tensor of a model is in the flat vectors, and how it gets out of them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Position of each named tensor in the flat vectors."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    body: slice
    num_parameters: int
    buffer_names: tuple[str, ...]
    buffer_shapes: tuple[torch.Size, ...]
    features: torch.Size  # shape of the head's input for one sample
    channels_last: bool = False
    """Whether filters of convolutions have their channels last in the vector: cuDNN then needs no copy of them."""

    @property
    def order(self) -> str:
        """The order of the vector, for checkpoints; empty if it is that of torch's tensors."""
        return "channels last" if self.channels_last else ""

    @property
    def head(self) -> slice:
        """The parameters of the head, for methods that treat it apart. Raise ValueError if all of them are frozen."""
        if self.body.stop == self.num_parameters:
            raise ValueError(
                "the head of this model has no trainable parameters, and the method treats head and body apart; "
                "let the head train, or use a method that shares the whole model, such as fedavg"
            )
        return slice(self.body.stop, self.num_parameters)

    def slice(self, name: str) -> slice:
        return {"body": self.body, "head": self.head}[name]

    def unflatten(self, x_P: Tensor, b_R: Tensor) -> dict[str, Tensor]:
        """Return name -> tensor, as in the module's state_dict (without BatchNorm's batch counters)."""
        parameters = zip(self.names, self.parts(x_P), strict=True)
        buffers = zip(self.buffer_names, split(b_R, self.buffer_shapes), strict=True)
        return dict([*parameters, *buffers])

    def parts(self, x_P: Tensor) -> list[Tensor]:
        """Return the named tensors of a flat vector, as views."""
        if not self.channels_last:
            return split(x_P, self.shapes)
        pieces = torch.split(x_P, [shape.numel() for shape in self.shapes])
        return [
            piece.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2) if len(shape) == 4 else piece.view(shape)
            for piece, shape in zip(pieces, self.shapes, strict=True)
        ]


class Form(NamedTuple):
    """What a parameter is converted to before a pass on a GPU."""

    dtype: torch.dtype
    channels_last: bool


class Unpacked(torch.autograd.Function):
    """Split a flat vector into tensors, and convert some of them: for a GPU, outside of ``torch.vmap``.

    The gradient is collected by one kernel for many tensors: the backward pass of torch.split is one concatenation, and
    slow for a model of many layers.
    """

    @staticmethod
    def forward(ctx: Any, x_P: Tensor, layout: Layout, forms: list[Form]) -> tuple[Tensor, ...]:
        ctx.like, ctx.layout = x_P, layout
        parts = layout.parts(x_P)
        made = [_wanted(part, form) for part, form in zip(parts, forms, strict=True)]
        _copy_all([(new, part) for new, part in zip(made, parts, strict=True) if new is not part])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        g_P = torch.empty_like(ctx.like)
        _copy_all(list(zip(ctx.layout.parts(g_P), gradients, strict=True)))
        return g_P, None, None


def _wanted(part: Tensor, form: Form) -> Tensor:
    """Return the tensor if it has this form, or memory for it in this form."""
    if form.channels_last and not part.is_contiguous(memory_format=torch.channels_last):
        return torch.empty_like(part, dtype=form.dtype, memory_format=torch.channels_last)
    return part if part.dtype == form.dtype else torch.empty_like(part, dtype=form.dtype)


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first: with one kernel for all pairs of one order in memory and one dtype."""
    alike: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for target, source in pairs:
        if target.stride() == source.stride():
            alike.setdefault(source.dtype, []).append((target, source))
        else:
            target.copy_(source)
    for some in alike.values():
        torch._foreach_copy_([target for target, _ in some], [source for _, source in some])


def split(vector: Tensor, shapes: tuple[torch.Size, ...]) -> list[Tensor]:
    """Return consecutive parts of the vector in these shapes."""
    # one split, not many slices: its backward pass is one concatenation
    parts = torch.split(vector, [s.numel() for s in shapes])
    return [t.view(s) for t, s in zip(parts, shapes, strict=True)]
