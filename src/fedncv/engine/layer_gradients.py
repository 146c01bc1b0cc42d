"""Compute moments of samples' gradients from each layer's input and output gradient, without sample gradients.

    linear         g_i = d_i a_i^T                     ||g_i||^2 = ||d_i||^2 ||a_i||^2
    convolution    g_i = sum over places of d_i a_i^T  computed for every sample: it is small
    BatchNorm      g_i = sum over places of d_i a_i    a_i normalised: in mode "eval" an affine map of each channel
    bias           g_i = sum over places of d_i

    sum_u = sum_i g_i,     spread_u = sum_i ||g_i||^2 - ||sum_u||^2 / n_u,  the squares in float64

a_i is a layer's input for sample i, d_i the gradient of i's loss with respect to its output. One backward pass of the
summed loss gives all d_i, because in mode "eval" samples do not affect each other. After Goodfellow, "Efficient
per-example gradient computations", 2015, https://arxiv.org/abs/1510.01799.

A trial step detects models with other layers, with a layer used twice, or with a weight used without its layer. They
use gradients.sample_gradients.

Shapes: B samples, K clients, P parameters, L layers (the layout's names), Q numbers of one, o outputs, i inputs.
"""

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedncv.flat import Model
from fedncv.layout import Layout
from fedncv.tasks import Task

Norm = (nn.BatchNorm1d, nn.BatchNorm2d)


class Heard(NamedTuple):
    """One call of a layer."""

    layer: nn.Module
    given: Tensor
    gives: Tensor
    version: int  # of its output, to detect a later change in place


class Outer(NamedTuple):
    """Gradients d_i a_i^T of every sample, which are never computed."""

    d_Bo: Tensor
    a_Bi: Tensor


Each = Tensor | Outer  # the samples' gradients of one parameter, BQ


class Sums(NamedTuple):
    """Sums over the gradients of some clients' samples, in the order of the layout."""

    total_KP: Tensor
    squares_KL: Tensor  # sum of squared norms, float64


Listening = tuple[Model, dict[str, list[Heard]]]
Calls = dict[str, tuple[Heard, Tensor]]

_TRIED: WeakKeyDictionary[Model, tuple[Listening, int] | None] = WeakKeyDictionary()


def layers_of(model: Model, task: Task, example: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Listening, int] | None:
    """Return the model with recording layers and its ``sample_bytes``; None if the layers do not suffice.

    The trial is at a random point: at the start, with zero weights and trivial statistics, a mistake may not show.
    """
    if model not in _TRIED:
        to, random = listening(model), torch.Generator().manual_seed(0)
        factor_P, more_P = torch.randn(2, len(model.start_P), generator=random).to(model.start_P)
        y_P = model.start_P * (1 + 0.1 * factor_P) + 0.01 * more_P
        buffers_R = model.start_R + torch.rand(model.start_R.shape, generator=random).to(model.start_R)
        x, target = example()
        if to is None or not understood(to, task, y_P, buffers_R, x, target):
            _TRIED[model] = None
        else:
            _TRIED[model] = to, sample_bytes(to, y_P, buffers_R, x)
    return _TRIED[model]


def listening(model: Model) -> Listening | None:
    """Return the model with layers that record their calls; None if a weight belongs to another kind of layer."""
    if model.layout.channels_last:
        return None  # the products below have channels first
    heard: dict[str, list[Heard]] = {}
    owners = {name.rpartition(".")[0] for name in model.layout.names}
    known = True

    def change(module: nn.Module) -> None:
        nonlocal known
        for part in module.modules():
            if getattr(part, "inplace", False):
                part.inplace = False  # type: ignore[assignment]
        for name in owners:
            layer = module.get_submodule(name)
            known = known and _fits(layer)
            layer.register_forward_hook(_note(heard, name))

    changed = model.changed(change)
    return (changed, heard) if known else None


def _fits(layer: nn.Module) -> bool:
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) is nn.Linear or (type(layer) in Norm and getattr(layer, "running_mean", None) is not None)


def _note(heard: dict[str, list[Heard]], name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def note(layer: nn.Module, args: tuple[Tensor, ...], gives: Tensor) -> None:
        if not gives.requires_grad:  # the first layer: neither inputs nor weights need a gradient
            gives.requires_grad_()
        given = args[0].detach()
        if isinstance(layer, Norm):
            given = F.batch_norm(given, layer.running_mean, layer.running_var, eps=layer.eps)
        heard.setdefault(name, []).append(Heard(layer, given, gives, gives._version))

    return note


def understood(to: Listening, task: Task, y_P: Tensor, buffers_R: Tensor, x: Tensor, target: Tensor) -> bool:
    """Test with a few samples that every layer is called once, and that the sum is the gradient of the summed loss."""
    layout = to[0].layout
    found = Sums(y_P.new_zeros(1, len(y_P)), y_P.new_zeros(1, len(layout.names), dtype=torch.float64))
    try:
        add(found, layout, listen(to, task, y_P, buffers_R, x, target, None), [len(x)])
    except (LookupError, RuntimeError):
        return False
    with torch.enable_grad():
        leaf_P = y_P.detach().requires_grad_()
        logits = to[0].forward(leaf_P, buffers_R, x, mode="eval")[0].logits_BC
        (whole_P,) = torch.autograd.grad(task.loss(logits, target).sum(), leaf_P)
    to[1].clear()
    return torch.allclose(found.total_KP[0], whole_P, rtol=1e-3, atol=1e-3 * float(whole_P.abs().max()))


def add(into: Sums, layout: Layout, calls: Calls, sizes: list[int]) -> None:
    """Add the sums of the samples' gradients, which are ordered by client; ``sizes`` are the samples of each.

    Products and sums are over each client's own samples, so no work grows with clients times samples, and nothing
    waits for the device.
    """
    named = {f"{name}.{kind}": each for name, call in calls.items() for kind, each in of_layer(*call).items()}
    each_L = [named[name] for name in layout.names]  # a LookupError if a layer was not called once
    columns_L = torch.split(into.total_KP, [shape.numel() for shape in layout.shapes], dim=1)
    made = [(columns, each) for columns, each in zip(columns_L, each_L, strict=True) if isinstance(each, Tensor)]
    if made:
        widths = [columns.shape[1] for columns, _ in made]
        sums_KQ = sum_by_client(torch.cat([each for _, each in made], dim=1), sizes)
        for (columns, _), part_KQ in zip(made, torch.split(sums_KQ, widths, dim=1), strict=True):
            columns += part_KQ
    for columns, each, shape in zip(columns_L, each_L, layout.shapes, strict=True):
        if isinstance(each, Outer):
            add_products(columns.view(-1, *shape), each, sizes)
    into.squares_KL.add_(sum_by_client(torch.stack([squares(each) for each in each_L], dim=1), sizes))


def listen(
    to: Listening,
    task: Task,
    y_P: Tensor,
    buffers_R: Tensor,
    x: Tensor,
    target: Tensor,
    offset_BC: Tensor | None,
) -> Calls:
    """Return every layer that was called once, and d of all samples."""
    model, heard = to
    heard.clear()
    try:
        with torch.enable_grad():
            logits_BC = model.forward(y_P.detach(), buffers_R, x, mode="eval")[0].logits_BC
            loss = task.loss(logits_BC if offset_BC is None else logits_BC + offset_BC, target).sum()
            calls = {name: notes[0] for name, notes in heard.items() if len(notes) == 1}
            if any(call.gives._version != call.version for call in calls.values()):
                raise LookupError("a layer's output was changed in place")
            back = torch.autograd.grad(loss, [call.gives for call in calls.values()])
    finally:
        heard.clear()  # also after an error, the model must not keep a chunk
    return {name: (call, d) for (name, call), d in zip(calls.items(), back, strict=True)}


def of_layer(call: Heard, d: Tensor) -> dict[str, Each]:
    """Return the samples' gradients of a layer's parameters."""
    layer, a = call.layer, call.given
    weight: Each
    if isinstance(layer, nn.Linear):
        if a.dim() != 2:
            raise LookupError("a linear layer with more than one row per sample")
        weight, bias_Bo = Outer(d, a), d
    elif isinstance(layer, nn.Conv2d):
        weight = kernel_gradients(layer, a, d)
        bias_Bo = d.flatten(2).sum(2)
    else:
        weight = (d * a).flatten(2).sum(2) if a.dim() > 2 else d * a
        bias_Bo = d.flatten(2).sum(2) if d.dim() > 2 else d
    return {"weight": weight, "bias": bias_Bo}


def kernel_gradients(layer: nn.Conv2d, a: Tensor, d: Tensor) -> Tensor:
    """Return the samples' gradients of a convolution's kernel: one product per row of the kernel.

    The inputs of one row are copied once, and all rows use parts of the copy. Whole windows, as `F.unfold` makes them,
    need ``high`` times as much copying; `bench/probes.py --ways` times these and other ways.
    """
    pieces = row_pieces(layer, a).flatten(1, 2)
    (high, wide), down, stride = layer.kernel_size, layer.dilation[0], layer.stride[0]
    last = stride * (d.shape[2] - 1) + 1
    each = [
        d.flatten(2) @ pieces[:, :, i : i + last : stride].flatten(2).transpose(1, 2)
        for i in range(0, down * high, down)
    ]
    g = torch.stack(each, dim=2)
    return g.view(*g.shape[:3], -1, wide).transpose(2, 3).flatten(1)


def row_pieces(layer: nn.Conv2d, a: Tensor) -> Tensor:
    """Return a view of the inputs of one kernel row at each place: [B, channels, wide, rows of a, places in a row]."""
    wide, right, padding = layer.kernel_size[1], layer.dilation[1], layer.padding
    assert not isinstance(padding, str)
    if any(padding):
        a = F.pad(a, (padding[1], padding[1], padding[0], padding[0]))
    return a.unfold(3, right * (wide - 1) + 1, layer.stride[1])[..., ::right].permute(0, 1, 4, 2, 3)


def add_products(into_Koi: Tensor, each: Outer, sizes: list[int]) -> None:
    """Add d^T a of every client's samples."""
    for into_oi, d, a in zip(into_Koi, torch.split(each.d_Bo, sizes), torch.split(each.a_Bi, sizes), strict=True):
        into_oi.addmm_(d.T, a)


def sum_by_client(a_BQ: Tensor, sizes: list[int]) -> Tensor:
    return torch.stack([a.sum(0) for a in torch.split(a_BQ, sizes)])


def squares(each: Each) -> Tensor:
    """Return the squared norm of every sample's gradient, float64."""
    if isinstance(each, Outer):
        return squares(each.d_Bo) * squares(each.a_Bi)
    norm_B: Tensor = torch.linalg.vector_norm(each, dim=1)
    return norm_B.double().square()


def sample_bytes(to: Listening, y_P: Tensor, buffers_R: Tensor, x: Tensor) -> int:
    """Return a sample's bytes in the largest array while layers record, or a quarter of all arrays if that is more."""
    model, heard = to
    model.forward(y_P, buffers_R, x, mode="eval")
    kept, largest = 0, 0
    for call, *_ in heard.values():
        seen = row_pieces(call.layer, call.given) if isinstance(call.layer, nn.Conv2d) else call.given
        kept += call.given.numel() + 2 * call.gives.numel()
        largest = max(largest, seen.numel(), call.gives.numel())
    heard.clear()
    return max(largest, (kept + largest) // 4) * y_P.element_size() // len(x)
