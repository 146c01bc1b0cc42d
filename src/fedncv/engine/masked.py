"""Make models accept padded batches: samples of weight 0 have no effect.

In a stacked step all clients' batches have one shape, so a smaller last batch is padded with samples of weight 0.
Most layers treat each sample separately and need no change. BatchNorm uses all samples of a batch; here it counts
only those of weight 1, and gives the result of torch's own for the smaller batch:

    mean = sum_b w_b x_b / n,   var = sum_b w_b (x_b - mean)^2 / n,   n = sum_b w_b * positions
    running <- (1 - momentum) running + momentum * (mean, var n / (n - 1))
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedncv.flat import Model, Weighted
from fedncv.keys import key_for

REPLACED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class MaskedBatchNorm(Weighted):
    """BatchNorm over the samples of weight 1, with the parameter and buffer names of torch's own."""

    running_mean: Tensor | None
    running_var: Tensor | None
    replaces_buffers = True

    def __init__(self, plain: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        assert plain.momentum is not None
        self.eps, self.momentum = plain.eps, plain.momentum
        self.weight, self.bias = plain.weight, plain.bias
        self.register_buffer("running_mean", plain.running_mean)
        self.register_buffer("running_var", plain.running_var)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is not None and x.dtype != self.weight.dtype:  # autocast's input: torch's own computes so too
            return self.forward(x.to(self.weight.dtype)).to(x.dtype)
        shape = (1, -1, *[1] * (x.dim() - 2))
        if self.running_mean is not None and self.running_var is not None and not self.training:
            mean_C, var_C = self.running_mean, self.running_var
        else:
            mean_C, var_C = self._batch_statistics(x, shape)
        scale_C = torch.rsqrt(var_C + self.eps)
        if self.weight is None:
            return (x - mean_C.view(shape)) * scale_C.view(shape)
        scale_C = scale_C * self.weight
        return (x - mean_C.view(shape)) * scale_C.view(shape) + self.bias.view(shape)

    def _batch_statistics(self, x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        positions = x[0, 0].numel()
        over = [0, *range(2, x.dim())]
        if self.weight_B is None:
            w_B, n = x.new_ones(()), x.new_full((), x.shape[0] * positions)
        else:
            w_B = self.weight_B.view(-1, *[1] * (x.dim() - 1))
            n = self.weight_B.sum() * positions
        mean_C = (w_B * x).sum(over) / n
        var_C = (w_B * (x - mean_C.view(shape)).square()).sum(over) / n
        if self.training and self.running_mean is not None and self.running_var is not None:
            old, share = 1 - self.momentum, self.momentum
            self.running_mean = old * self.running_mean + share * mean_C.detach()
            self.running_var = old * self.running_var + share * (n / (n - 1)) * var_C.detach()
        return mean_C, var_C


def masked(model: Model, *, first: Callable[[nn.Module], None] | None = None) -> Model:
    """Return the model with a BatchNorm that ignores padding; all other names and numbers stay.

    ``first`` may replace parts of the module first.
    """

    def change(module: nn.Module) -> None:
        if first is not None:
            first(module)
        for name, part in list(module.named_modules()):
            if type(part) in REPLACED:
                parent, _, child = name.rpartition(".")
                setattr(module.get_submodule(parent), child, MaskedBatchNorm(part))

    return model.changed(change)


def padding_changes(plain: Model, model: Model, example: Tensor) -> bool:
    """Return whether a sample of weight 0 changes the others' logits, the running statistics or the gradient.

    It is decided in float64 on the CPU: on a GPU another batch size means other kernels, whose rounding a deep model
    amplifies. A module that runs only where it is or in its own precision is compared there.
    """
    if len(example) < plain.smallest_batch:
        return False
    try:
        x = example.detach().to("cpu", torch.float64 if example.is_floating_point() else example.dtype)
        pairs = _with_and_without(plain.in_double_on_cpu(), model.in_double_on_cpu(), x)
        rtol, atol = 1e-5, 1e-6
    except (RuntimeError, NotImplementedError, TypeError):
        pairs = _with_and_without(plain, model, example)
        rtol, atol = 1e-3, 1e-4
    return not all(torch.allclose(a, b, rtol=rtol, atol=atol) for a, b in pairs)


def mixes_in_scoring(model: Model, example: Tensor) -> bool:
    """Return whether other samples of a batch change a sample's logits in scoring; decided in float64 on the CPU."""
    try:
        double = model.in_double_on_cpu()
        x = example.detach().to("cpu", torch.float64 if example.is_floating_point() else example.dtype)
        with torch.no_grad():
            alone, more = (
                double.forward(double.start_P, double.start_R, inputs, mode="eval")[0].logits_BC
                for inputs in (x[:1], x)
            )
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return True  # not known, so every client is scored alone
    return not torch.allclose(alone, more[:1], rtol=1e-5, atol=1e-6)


def mixing_layer(plain: Model, model: Model, example: Tensor) -> str:
    """Return a sentence with the first layer whose output for the other samples changes with a sample of weight 0."""
    reason = "mixes the samples of a batch, so the padding of a smaller batch would change the others"
    try:
        plain, model = plain.in_double_on_cpu(), model.in_double_on_cpu()
        example = example.detach().to("cpu", torch.float64 if example.is_floating_point() else example.dtype)
        with plain.listening() as without, model.listening() as with_padding:
            _with_and_without(plain, model, example)
    except (RuntimeError, NotImplementedError, TypeError):
        return f"a layer {reason}"
    for (name, *alone), (_, *padded) in zip(without, with_padding, strict=False):
        if _differ(alone[0], padded[0]):
            return f"the model's own forward, before its layer {name}, {reason}"
        if _differ(alone[1], padded[1]):
            return f"layer {name} {reason}"
    return f"the model's own forward {reason}"


def _differ(alone: object, padded: object) -> bool:
    if not isinstance(alone, Tensor) or not isinstance(padded, Tensor) or alone.shape[1:] != padded.shape[1:]:
        return False
    return not torch.allclose(alone, padded[: len(alone)], rtol=1e-5, atol=1e-6)


def _with_and_without(plain: Model, model: Model, example: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return logits, running statistics and gradient of the example with a padding sample, and without it."""
    size = len(example)
    weight_B = torch.ones(size + 1, dtype=plain.start_P.dtype, device=example.device)
    weight_B[-1] = 0
    return [
        (a[:size] if i == 0 else a, b)
        for i, (a, b) in enumerate(
            zip(
                _pass(model, plain.start_P, torch.cat([example, example[:1]]), weight_B),
                _pass(plain, plain.start_P, example, weight_B[:-1]),
                strict=True,
            )
        )
    ]


def _pass(model: Model, x_P: Tensor, inputs: Tensor, weight_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    key = key_for(0, "trial").to(inputs.device)
    with torch.enable_grad():
        leaf_P = x_P.detach().requires_grad_()
        output, moved_R = model.forward(leaf_P, model.start_R, inputs, mode="train", key=key, weight_B=weight_B)
        losses_B = output.logits_BC.sin().flatten(1).sum(1)
        (g_P,) = torch.autograd.grad((weight_B * losses_B).sum(), leaf_P)
    return output.logits_BC.detach(), moved_R.detach(), g_P
