"""The kernels for GroupNorm give what torch's own layer gives, and are used where they can run.

Without a GPU the kernels run in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/test_group_norm.py
"""

import importlib.util
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from agreement import close, runs
from federations import tiny
from torch import nn
from torch.testing import assert_close

from fedncv import group_norm
from fedncv.engine.problem import start
from fedncv.engine.sequential import run_round
from fedncv.engine.stacked import StackedEngine
from fedncv.flat import Model
from fedncv.layout import Form
from fedncv.models import Residual

HAVE_TRITON = importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs_kernels = pytest.mark.skipif(
    not HAVE_TRITON or (DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="Triton kernels need a GPU, or TRITON_INTERPRET=1",
)

SHAPES = [  # N, C, H, W, groups
    (2, 64, 32, 32, 2),  # ResNet-18's: several pieces, two, and one
    (2, 128, 16, 16, 2),
    (2, 256, 8, 8, 2),
    (2, 512, 4, 4, 2),
    (1, 6, 1, 1, 2),
    (3, 6, 3, 1, 6),  # one channel in a group
    (2, 5, 9, 7, 1),
    (2, 30, 13, 11, 6),  # no powers of two
    (1, 3, 61, 67, 1),
    (1, 2, 301, 300, 1),  # pieces of several blocks, the last one shorter
    (1, 600, 7, 5, 3),
]


def values(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def last(x):
    return x.to(memory_format=torch.channels_last)


def both(shape, dtype, parameters=torch.float64, affine=True, shift=3.0):
    """Return output and gradients of the kernels, and of torch's own layer in float64 on the same numbers."""
    *sizes, groups = shape
    x, g = last((values(*sizes) * 2 + shift).to(dtype)), values(*sizes, seed=1).to(dtype)
    given = [x, *((values(sizes[1], seed=i, dtype=parameters) for i in (2, 3)) if affine else ())]
    mine, theirs = (
        [change(a.detach()).requires_grad_() for a in given] for change in (torch.clone, torch.Tensor.double)
    )
    y = group_norm.Normalised.apply(*mine, *(() if affine else (None, None)), groups, 1e-5)
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    plain = F.group_norm(theirs[0], groups, *theirs[1:], eps=1e-5)
    ours = [y.detach(), *torch.autograd.grad(y, mine, g)]
    assert [a.dtype for a in ours[1:]] == [a.dtype for a in given]
    return ours, [plain.detach(), *torch.autograd.grad(plain, theirs, g.double())]


def away(ours, theirs):
    norm = torch.linalg.vector_norm
    return [float(norm(a.double() - b) / norm(b).clamp(min=1e-300)) for a, b in zip(ours, theirs, strict=True)]


# ---- the kernels -----------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_all_gradients_are_those_of_torch(shape):
    assert max(away(*both(shape, torch.float64))) < 1e-13
    assert max(away(*both(shape, torch.float32, torch.float32))) < 1e-5


@runs_kernels
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[7]])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_in_lower_precision_only_the_output_and_dx_are_rounded(shape, dtype, bound):
    """Half a unit of the last place of each number, and the parameters' gradients with the error of float32."""
    y, dx, *parameters = away(*both(shape, dtype, torch.float32))
    assert max(y, dx) < bound
    assert max(parameters) < 1e-5
    assert max(away(*both(shape, dtype, dtype))[2:]) < bound


@runs_kernels
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], SHAPES[6]])
def test_without_scale_and_shift_it_only_standardises(shape):
    assert max(away(*both(shape, torch.float64, affine=False))) < 1e-13


@runs_kernels
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2]])
def test_a_mean_far_from_zero_costs_no_digits(shape):
    """With E[x^2] - E[x]^2 in float32, nothing would be left of the variance beside 1000^2."""
    (y, *_), (plain, *_) = both(shape, torch.float32, torch.float32, shift=1000.0)
    assert away([y], [plain])[0] < 1e-4


@runs_kernels
@pytest.mark.parametrize("shape", [(2, 4, 2, 1, 2), (1, 3, 2, 2, 1)])
def test_gradients_are_the_slopes_of_the_output(shape):
    *sizes, groups = shape
    given = [last(values(*sizes)), values(sizes[1], seed=1), values(sizes[1], seed=2)]
    assert torch.autograd.gradcheck(
        lambda *a: group_norm.Normalised.apply(*a, groups, 1e-5), [a.requires_grad_() for a in given]
    )


@runs_kernels
def test_pieces_of_every_size_give_the_same_numbers(monkeypatch):
    """Blocks of all sizes, with more blocks in a piece than one, and rows that no block needs."""
    from fedncv import group_norm_kernel

    for block, most in ((8, 4), (64, 1), (64, 3), (512, 4)):
        monkeypatch.setattr(group_norm_kernel, "BLOCK", block)
        monkeypatch.setattr(group_norm_kernel, "MOST_PIECES", most)
        assert max(away(*both((1, 12, 7, 5, 2), torch.float64))) < 1e-13


@runs_kernels
def test_the_same_call_gives_the_same_bits():
    for shape in (SHAPES[1], SHAPES[3]):
        first, again = (both(shape, torch.float32, torch.float32)[0] for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@runs_kernels
def test_gradients_and_parameters_may_lie_anyhow_in_memory():
    x, g, pair = last(values(2, 6, 5, 4)), values(1, 6, 1, 1).expand(2, 6, 5, 4), values(6, 2)
    found = []
    for function in (group_norm.Normalised.apply, lambda x, gamma, beta, n, eps: F.group_norm(x, n, gamma, beta, eps)):
        given = [a.clone().requires_grad_() for a in (x, pair)]
        y = function(given[0], given[1][:, 0], given[1][:, 1], 3, 1e-5)
        found.append((y, *torch.autograd.grad(y, given, g)))
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


class Grouped(nn.Module):
    """Residual blocks of odd widths."""

    def __init__(self, shape, outputs):
        super().__init__()
        norm = partial(nn.GroupNorm, 2)
        self.body = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1), norm(6), nn.ReLU(), Residual(6, 10, 2, norm), nn.AdaptiveAvgPool2d(1)
        )
        self.head = nn.Linear(10, outputs)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


@runs_kernels
def test_training_with_the_kernels_equals_the_sequential_engine(monkeypatch):
    """Channels last in all layers, and last batches that are padded. On a CPU the condition is_cuda is left out."""
    called = []

    def fits(layer, x):
        called.append(x.is_contiguous(memory_format=torch.channels_last))
        return called[-1] and not torch._C._are_functorch_transforms_active()

    monkeypatch.setattr(group_norm, "usable", lambda _device: True)
    monkeypatch.setattr(group_norm, "fits", fits)
    inputs = torch.randn(21, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    problem = tiny("scaffold", model=Grouped, sizes=(9, 5, 7), epochs=1, inputs=inputs, device=DEVICE)
    engine = StackedEngine([problem], way="streams")
    assert engine.layers == ["streams, channels last"]
    (got,), _ = runs(engine, 1)
    assert called
    assert all(called)
    state, _ = run_round(problem, start(problem))
    close(got, state)


# ---- where they are used ---------------------------------------------------------------------------------


def model(factory, **options):
    x = torch.randn(3, 2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return Model(factory, x, 3, seed=0, **options), x


class Pictures(nn.Module):
    def __init__(self, shape, outputs, norm=partial(nn.GroupNorm, 2)):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(shape[0], 4, 3), norm(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(48, outputs)

    def forward(self, x):
        return self.head(self.body(x))


def test_layers_keep_names_values_and_hooks_and_give_the_same_bits_on_a_cpu():
    torch.manual_seed(0)
    module, x = Pictures((2, 5, 6), 3), torch.randn(3, 2, 5, 6)
    expected, names = module(x), list(module.state_dict())
    parameters, heard = list(module.parameters()), []
    module.body[1].register_forward_hook(lambda *_: heard.append(1))
    group_norm.use_kernels(module)
    assert type(module.body[1]) is group_norm.GroupNorm
    assert torch.equal(module(x), expected)
    assert list(module.state_dict()) == names
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert heard


def test_a_layer_under_two_names_is_one_layer_and_a_subclass_keeps_its_own_forward():
    class Own(nn.GroupNorm):
        pass

    shared = nn.GroupNorm(2, 4)
    module = nn.ModuleDict({"a": shared, "b": shared, "c": Own(2, 4)})
    group_norm.use_kernels(module)
    assert module["a"] is module["b"] is shared
    assert type(shared) is group_norm.GroupNorm
    assert type(module["c"]) is Own


def test_only_channels_last_pictures_on_a_gpu_outside_of_vmap_fit(monkeypatch):
    class OnGPU:
        """What a layer asks of its input."""

        def __init__(self, x, is_cuda=True):
            self.x, self.is_cuda = x, is_cuda

        def __getattr__(self, name):
            return getattr(self.x, name)

        def __len__(self):
            return len(self.x)

    monkeypatch.setattr(group_norm, "_kernels", lambda: type("Kernels", (), {"MOST_CHANNELS": 4}))
    layer = nn.GroupNorm(2, 8, affine=False)
    x = torch.randn(3, 8, 4, 5)
    assert group_norm.fits(layer, OnGPU(last(x)))
    assert not group_norm.fits(layer, OnGPU(last(x), is_cuda=False))
    assert not group_norm.fits(layer, OnGPU(x))
    assert not group_norm.fits(layer, OnGPU(x[0]))
    assert not group_norm.fits(layer, OnGPU(last(x)[:, :, ::2]))
    assert not group_norm.fits(layer, OnGPU(last(x)[:0]))
    assert not group_norm.fits(layer, OnGPU(last(x).long()))
    assert not group_norm.fits(nn.GroupNorm(2, 4, affine=False), OnGPU(last(x)))  # torch raises its error
    assert not group_norm.fits(nn.GroupNorm(8, 8, affine=False), OnGPU(last(x)[:, :, :1, :1]))  # one value in a group
    assert not group_norm.fits(nn.GroupNorm(1, 8, affine=False), OnGPU(last(x)))  # too many channels in a group
    assert not group_norm.fits(nn.GroupNorm(2, 8), OnGPU(last(x)))  # its parameters are on a CPU
    seen = []
    torch.vmap(lambda each: seen.append(group_norm.fits(layer, OnGPU(last(x)))) or each)(x)
    assert seen == [False]


def test_without_triton_or_a_gpu_nothing_is_replaced(monkeypatch):
    def missing():
        raise ImportError

    assert not group_norm.usable(torch.device("cpu"))
    assert model(Pictures)[0].for_streams().words == ""
    monkeypatch.setattr(group_norm, "_kernels", missing)
    assert not group_norm.usable(torch.device("cuda"))


def test_with_them_steps_on_streams_have_channels_last(monkeypatch):
    monkeypatch.setattr(group_norm, "usable", lambda _device: True)
    plain, x = model(Pictures)
    fast = plain.for_streams()
    assert fast.words == ", channels last"
    assert plain.words == ""
    assert fast.layout == plain.layout
    assert fast._find_forms(torch.float64)[0] == Form(torch.float64, True)
    kinds = [[type(part) for part in each._module.modules()] for each in (fast, plain)]
    assert [group_norm.GroupNorm in some for some in kinds] == [True, False]
    ours, theirs = (each.forward(plain.start_P, plain.start_R, x, mode="train")[0] for each in (fast, plain))
    assert_close(ours.logits_BC, theirs.logits_BC, rtol=1e-12, atol=1e-12)


def test_a_norm_that_needs_channels_first_keeps_them_first(monkeypatch):
    """A GroupNorm that stays torch's own, such as one with a parametrization, would change the order back."""
    monkeypatch.setattr(group_norm, "usable", lambda _device: True)

    class NoConvolution(nn.Module):
        def __init__(self, shape, outputs):
            super().__init__()
            self.norm, self.head = nn.GroupNorm(1, 2), nn.Linear(60, outputs)

        def forward(self, x):
            return self.head(self.norm(x).flatten(1))

    assert model(NoConvolution)[0].for_streams().words == ""
    monkeypatch.setattr(group_norm, "use_kernels", lambda _module: None)
    assert model(Pictures)[0].for_streams().words == ""


@pytest.mark.parametrize("usable", [False, True])
def test_the_order_of_the_vector_does_not_depend_on_triton(monkeypatch, usable):
    """In bf16 filters have their channels last, on every machine; otherwise first."""
    monkeypatch.setattr(group_norm, "usable", lambda _device: usable)
    plain, x = model(Pictures)
    low, _ = model(Pictures, low=torch.bfloat16)
    assert low.layout.channels_last
    assert not plain.layout.channels_last
    assert low.words == ""
    assert low.for_streams().words == (", channels last" if usable else "")
    assert low.for_streams().layout == low.layout
    ours, theirs = (each.state_dict(each.start_P, each.start_R) for each in (low, plain))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for each in (low, low.for_streams()):
        logits = each.forward(low.start_P, low.start_R, x, mode="eval")[0].logits_BC
        assert_close(
            logits, plain.forward(plain.start_P, plain.start_R, x, mode="eval")[0].logits_BC, rtol=0.05, atol=0.05
        )
