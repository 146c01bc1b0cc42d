"""Moments of samples' gradients from what every layer saw, without a gradient of every sample.

    linear         g_i = d_i a_i^T                     ||g_i||^2 = ||d_i||^2 ||a_i||^2
    convolution    g_i = sum over places of d_i a_i^T  made for every sample: it is small
    BatchNorm      g_i = sum over places of d_i a_i    a_i normalised: in mode "eval" an affine map of each channel
    bias           g_i = sum over places of d_i

    sum_u = sum_i g_i,     spread_u = sum_i ||g_i||^2 - ||sum_u||^2 / n_u,  the squares in float64

a_i is what a layer is given for sample i, d_i the gradient of i's loss with respect to what it gives back. One backward
pass of the summed loss makes all d_i, since in mode "eval" no sample sees another. After Goodfellow, "Efficient
per-example gradient computations", 2015, https://arxiv.org/abs/1510.01799.

A model with other layers, with one that is used twice, or with a weight that is used without its layer, is told by a
trial and left to gradients.sample_gradients.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedncv.flat import Model
from fedncv.tasks import Task

Norm = (nn.BatchNorm1d, nn.BatchNorm2d)


class Heard(NamedTuple):
    """One call of a layer."""

    layer: nn.Module
    given: Tensor
    gives: Tensor
    version: int  # of what it gives: a later change in place would be seen


class Sums(NamedTuple):
    """Of the gradients of some clients' samples, K of them, in the order of the layout."""

    total_KP: Tensor
    squares_KL: Tensor  # sum of squared norms, float64


Listening = tuple[Model, dict[str, list[Heard]]]


def listening(model: Model) -> Listening | None:
    """The model with its layers noting what they see; None where a weight belongs to another kind of layer."""
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
        if not gives.requires_grad:  # the first layer: neither inputs nor weights ask for a gradient
            gives.requires_grad_()
        given = args[0].detach()
        if isinstance(layer, Norm):
            given = F.batch_norm(given, layer.running_mean, layer.running_var, eps=layer.eps)
        heard.setdefault(name, []).append(Heard(layer, given, gives, gives._version))

    return note


def understood(to: Listening, task: Task, y_P: Tensor, buffers_R: Tensor, x: Tensor, target: Tensor) -> bool:
    """A trial with a few samples: every layer is heard once, and the sum is the gradient of the summed loss."""
    everyone = y_P.new_ones(1, len(x))
    try:
        found = sums(to, task, y_P, buffers_R, x, target, None, everyone)
    except (LookupError, RuntimeError):
        return False
    with torch.enable_grad():
        leaf_P = y_P.detach().requires_grad_()
        logits = to[0].forward(leaf_P, buffers_R, x, mode="eval")[0].logits_BC
        (whole_P,) = torch.autograd.grad(task.loss(logits, target).sum(), leaf_P)
    to[1].clear()
    return torch.allclose(found.total_KP[0], whole_P, rtol=1e-3, atol=1e-3 * float(whole_P.abs().max()))


def sums(
    to: Listening,
    task: Task,
    y_P: Tensor,
    buffers_R: Tensor,
    x: Tensor,
    target: Tensor,
    offset_BC: Tensor | None,
    member_KB: Tensor,
) -> Sums:
    """Of the samples' own gradients; ``member_KB`` is 1 where sample B belongs to client K."""
    model, heard = to
    heard.clear()
    with torch.enable_grad():
        logits_BC = model.forward(y_P.detach(), buffers_R, x, mode="eval")[0].logits_BC
        loss = task.loss(logits_BC if offset_BC is None else logits_BC + offset_BC, target).sum()
        calls = {name: notes[0] for name, notes in heard.items() if len(notes) == 1}
        if any(call.gives._version != call.version for call in calls.values()):
            raise LookupError("a layer's output was changed in place")
        back = torch.autograd.grad(loss, [call.gives for call in calls.values()])
    parts: dict[str, tuple[Tensor, Tensor]] = {}
    for (name, call), d in zip(calls.items(), back, strict=True):
        parts |= {f"{name}.{kind}": part for kind, part in _of_layer(call, d, member_KB).items()}
    heard.clear()
    found = [parts[name] for name in model.layout.names]  # a LookupError where a layer was not heard, or twice
    total_KP = torch.cat([total.flatten(1) for total, _ in found], dim=1)
    squares_KL = torch.stack([member_KB.double() @ square_B for _, square_B in found], dim=1)
    return Sums(total_KP, squares_KL)


def _of_layer(call: Heard, d: Tensor, member_KB: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Parameter -> (sum of its gradient over each client's samples, squared norm of every sample's)."""
    layer, a = call.layer, call.given
    if isinstance(layer, nn.Linear):
        if a.dim() != 2:
            raise LookupError("a linear layer that sees more than one row a sample")
        total = (member_KB[:, None, :] * d.T) @ a
        weight = total, _squares(d) * _squares(a)
        bias_Bo = d
    elif isinstance(layer, nn.Conv2d):
        windows = F.unfold(a, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # type: ignore[arg-type]
        g_Bow = d.flatten(2) @ windows.transpose(1, 2)
        weight = member_KB @ g_Bow.flatten(1), _squares(g_Bow)
        bias_Bo = d.flatten(2).sum(2)
    else:
        g_Bo = (d * a).flatten(2).sum(2) if a.dim() > 2 else d * a
        weight = member_KB @ g_Bo, _squares(g_Bo)
        bias_Bo = d.flatten(2).sum(2) if d.dim() > 2 else d
    return {"weight": weight, "bias": (member_KB @ bias_Bo, _squares(bias_Bo))}


def _squares(a_B: Tensor) -> Tensor:
    """Squared norm of every sample's part."""
    norm_B: Tensor = torch.linalg.vector_norm(a_B.flatten(1), dim=1)
    return norm_B.double().square()


def sample_bytes(to: Listening, y_P: Tensor, buffers_R: Tensor, x: Tensor) -> int:
    """What a sample takes while its layers are heard, in the largest arrays together."""
    model, heard = to
    heard.clear()
    model.forward(y_P, buffers_R, x, mode="eval")
    numbers = 0
    for call, *_ in heard.values():
        seen = call.given.numel()
        if isinstance(call.layer, nn.Conv2d):
            seen = call.layer.weight[0].numel() * call.gives[:, 0].numel()
        numbers += seen + 2 * call.gives.numel()
    heard.clear()
    return numbers * y_P.element_size() // len(x)
