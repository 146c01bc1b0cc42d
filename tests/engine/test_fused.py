"""Fused layers give what the four plain layers give, and so do their kernels where Triton can run them."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from fedncv.config import RunConfig
from fedncv.data import Dataset
from fedncv.engine import fused
from fedncv.engine.problem import build, start
from fedncv.engine.sequential import run_round
from fedncv.engine.stacked import StackedEngine
from fedncv.models import MLP, LeNet5
from fedncv.tree import leaves

runs_kernels = pytest.mark.skipif(
    not (fused.HAVE_KERNELS and torch.cuda.is_available()), reason="Triton kernels need a GPU"
)


def images(num_samples=120, side=20):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 256, size=(num_samples, 2, side, side), dtype=np.uint8))
    return Dataset("images", x, torch.arange(num_samples) % 4, 4, mean=(0.5, 0.5), std=(0.2, 0.3))


def stacked_inputs(K, B, C, side, D, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    weight = torch.ones(K, B, dtype=dtype, device=device)
    weight[0, B // 2 :] = 0
    x = draw(B, K, C, side, side).movedim(1, 0)
    return x, draw(K, D, C, 3, 3), draw(K, D), draw(K, D), draw(K, D), draw(K, D), draw(K, D).abs(), weight


@pytest.mark.parametrize("padding", [False, True])
def test_forward_and_gradients_are_those_of_the_plain_layers(padding):
    """Autograd through torch's own layers, on the samples of weight 1 alone."""
    x, w, bias, gamma, beta, run_mean, run_var, weight = stacked_inputs(2, 6, 2, 8, 3)
    if not padding:
        weight = torch.ones_like(weight)
    leaf = [a.clone().requires_grad_() for a in (x, w, bias, gamma, beta)]
    out, z, mean, rstd, new_mean, new_var = fused.forward(x, w, bias, gamma, beta, run_mean, run_var, weight, 1e-5, 0.1)
    g = (
        torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        * weight[:, :, None, None, None]
    )
    for k in range(2):
        real = weight[k] > 0
        norm = nn.BatchNorm2d(3).double()
        norm.running_mean.copy_(run_mean[k])
        norm.running_var.copy_(run_var[k])
        conv = nn.functional.conv2d(leaf[0][k][real], leaf[1][k], leaf[2][k])
        normal = nn.functional.batch_norm(
            conv, norm.running_mean, norm.running_var, leaf[3][k], leaf[4][k], training=True, momentum=0.1
        )
        plain = nn.functional.max_pool2d(nn.functional.relu(normal), 2)
        assert_close(out[k][real], plain, rtol=1e-12, atol=1e-12)
        assert_close(new_mean[k], norm.running_mean, rtol=1e-12, atol=1e-12)
        assert_close(new_var[k], norm.running_var, rtol=1e-12, atol=1e-12)
        (plain * g[k][real]).sum().backward()
    got = fused.backward(g, x, w, gamma, beta, weight, z, mean, rstd, True)
    for name, ours, theirs in zip(("x", "w", "bias", "gamma", "beta"), got, leaf, strict=True):
        assert_close(ours, theirs.grad, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("side", [20, 18])  # even sizes all through; then 14 -> 7 -> 3: one layer is left unfused
def test_a_round_with_fused_layers_equals_the_sequential_engine(side):
    config = RunConfig(
        data="custom", clients=3, per_round=3, rounds=2, epochs=1, batch_size=8, dtype="float64", partition="iid"
    )
    problem = build(config, data=images(side=side))
    state, row = run_round(problem, start(problem))
    engine = StackedEngine([problem], fused=True)
    assert any(isinstance(part, fused.FusedConv) for part in engine.model._module.modules())
    ((stacked, stacked_row),) = engine.run_rounds([start(problem)])
    for (path, a), (_, b) in zip(leaves(stacked), leaves(state), strict=True):
        if isinstance(a, torch.Tensor):
            assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, path=path: f"{path}: {m}")
    assert stacked_row["loss"] == pytest.approx(row["loss"], abs=1e-10)


def test_fusing_keeps_names_and_shapes():
    plain, other = LeNet5((3, 32, 32), 10), LeNet5((3, 32, 32), 10)
    fused.fuse(other)
    assert [(n, p.shape) for n, p in other.named_parameters()] == [(n, p.shape) for n, p in plain.named_parameters()]
    kept = [name for name, _ in plain.named_buffers() if "num_batches" not in name]
    assert [name for name, _ in other.named_buffers()] == kept


def test_a_relu_after_a_linear_layer_is_part_of_it_if_convolutions_are_fused():
    plain, other, mlp = LeNet5((3, 20, 20), 10), LeNet5((3, 20, 20), 10), MLP((1, 4, 4), 3)
    other.load_state_dict(plain.state_dict())
    fused.fuse(other)
    assert [part.relu for part in other.modules() if isinstance(part, fused.Linear)] == [True, True, False]
    assert not any(isinstance(part, nn.ReLU) for part in other.modules())
    x = torch.randn(4, 3, 20, 20)
    assert_close(other.eval()(x), plain.eval()(x))
    fused.fuse(mlp)  # no convolution: everything keeps its second derivatives
    assert isinstance(mlp.body[2], nn.ReLU)
    assert not any(part.in_one for part in mlp.modules() if isinstance(part, fused.Linear))


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2)],
        [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, affine=False), nn.ReLU(), nn.MaxPool2d(2)],
        [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(3)],
        [nn.Conv2d(1, 2, 3), nn.ReLU(), nn.BatchNorm2d(2), nn.MaxPool2d(2)],
        [nn.Conv2d(1, 128, 3), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool2d(2)],
    ],
)
def test_other_layers_are_left_alone(layers):
    module = nn.Sequential(*layers)
    fused.fuse(module)
    assert not any(isinstance(part, fused.FusedConv) for part in module)


def test_cross_entropy_and_its_gradient_under_vmap():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 4, dtype=torch.float64, generator=generator)
    target = torch.randint(0, 4, (5, 3), generator=generator)

    def mean_loss(loss):
        return lambda out, label: (loss(out, label) * torch.arange(5.0)).sum()

    plain = mean_loss(lambda out, label: nn.functional.cross_entropy(out, label, reduction="none"))
    ours = torch.vmap(torch.func.grad_and_value(mean_loss(fused.cross_entropy)), in_dims=(0, 1))(logits, target)
    for k in range(3):
        value = plain(logits[k], target[:, k])
        gradient = torch.func.grad(plain)(logits[k], target[:, k])
        assert_close(ours[1][k], value, rtol=1e-12, atol=1e-12)
        assert_close(ours[0][k], gradient, rtol=1e-12, atol=1e-12)


@runs_kernels
@pytest.mark.parametrize(("C", "side", "D"), [(3, 32, 6), (6, 14, 16), (1, 10, 40)])
def test_kernels_give_what_the_reference_gives(C, side, D):
    from fedncv.engine import fused_kernels

    ours = stacked_inputs(3, 9, C, side, D, torch.float32, "cuda")
    theirs = [a.double() for a in ours]
    got, expected = fused_kernels.forward(*ours, 1e-5, 0.1), fused.forward(*theirs, 1e-5, 0.1)
    for a, b in zip(got, expected, strict=True):
        assert torch.linalg.vector_norm(a - b) <= 1e-5 * torch.linalg.vector_norm(b)
    g = torch.randn_like(got[0]) * ours[7][:, :, None, None, None]
    parts = (ours[0], ours[1], ours[3], ours[4], ours[7], *got[1:4], True)
    wide = [a.double() if isinstance(a, torch.Tensor) else a for a in parts]
    got, expected = fused_kernels.backward(g, *parts), fused.backward(g.double(), *wide)
    for i in (0, 1, 3, 4):  # the gradient of a bias before BatchNorm is zero: rounding only
        assert torch.linalg.vector_norm(got[i] - expected[i]) <= 1e-5 * torch.linalg.vector_norm(expected[i])


@runs_kernels
@pytest.mark.parametrize(("N", "M", "relu"), [(400, 120, True), (84, 10, False)])
def test_the_kernels_of_linear_layers_give_what_torch_gives(N, M, relu):
    from fedncv.engine import fused_kernels

    x, w, bias, g = (torch.randn(*shape, device="cuda") for shape in ((3, 9, N), (3, M, N), (3, M), (3, 9, M)))
    leaf = [a.double().requires_grad_() for a in (x, w, bias)]
    plain = torch.baddbmm(leaf[2].unsqueeze(1), leaf[0], leaf[1].mT)
    plain = plain.relu() if relu else plain
    out = fused_kernels.linear(x, w, bias, relu)
    got = (out, *fused_kernels.linear_backward(g, x, w, out, relu, True))
    for a, b in zip(got, (plain, *torch.autograd.grad(plain, leaf, g.double())), strict=True):
        assert torch.linalg.vector_norm(a - b) <= 1e-5 * torch.linalg.vector_norm(b)


@runs_kernels
def test_the_kernel_of_a_batch_copies_what_indexing_gives():
    from fedncv.engine import fused_kernels

    index, weight = torch.randint(0, 50, (3, 4, 6), device="cuda"), torch.rand(3, 4, 6, device="cuda")
    number, key = torch.randint(0, 9, (3, 6), device="cuda"), torch.randint(0, 9, (3, 6, 2), device="cuda")
    x, y = torch.randn(50, 3, 5, 5, device="cuda"), torch.randint(0, 10, (50,), device="cuda")
    got = fused_kernels.batch((index, weight, number, key), torch.tensor([2], device="cuda"), x, y, 5)
    rows = index[2, :, :5]
    for a, b in zip(got, (x[rows], y[rows], weight[2, :, :5], number[2, :5], key[2, :5]), strict=True):
        assert torch.equal(a, b)
