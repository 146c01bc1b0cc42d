"""Gradients of single samples: from layers as one by one, and models that have none are refused."""

import gc
import weakref
from typing import ClassVar

import pytest
import torch
from federations import Tiny, tiny
from torch import nn
from torch.testing import assert_close

from fedncv.engine import gradients
from fedncv.engine.layer_gradients import kernel_gradients, layers_of, listening, understood
from fedncv.flat import Model
from fedncv.tasks import TASKS


class SeesOthers(Tiny):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class LooksAtValues(Tiny):
    def forward(self, x):
        return super().forward(x * (1 if float(x.detach().sum()) < 1e9 else 2))


class OwnStatistics(Tiny):
    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.body[1] = nn.BatchNorm1d(6, track_running_stats=False)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (SeesOthers, "affect each other"),
        (LooksAtValues, "no gradients of single samples"),
        (OwnStatistics, "no gradients of single samples"),
    ],
)
def test_models_whose_samples_have_no_gradients_of_their_own_are_refused(model, message):
    gradients.check(tiny("fedavg"))
    refused = tiny("fedavg", model=model)
    for _ in range(2):  # at every probe
        with pytest.raises(ValueError, match=f"{message}.*leave probe empty"):
            gradients.check(refused)


class Pictures(nn.Module):
    """Convolutions, BatchNorm of pictures and of rows, and whatever ``between`` is."""

    window: ClassVar[dict] = {}

    def __init__(self, shape, num_classes):
        super().__init__()
        body = [nn.Conv2d(shape[0], 4, 3, **self.window), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*body, nn.Conv2d(4, 3, (2, 3), **self.window), nn.Flatten(), nn.LazyLinear(6))
        self.rows = nn.BatchNorm1d(6)
        self.between = self.other()
        self.head = nn.Linear(6, num_classes, bias=False)
        self(torch.zeros(2, *shape))

    def other(self):
        return nn.Identity()

    def forward(self, x):
        return self.head(self.between(self.rows(self.body(x))))


class Strided(Pictures):
    window: ClassVar[dict] = {"stride": 2, "padding": (1, 2)}


class Dilated(Pictures):
    window: ClassVar[dict] = {"dilation": 2, "bias": False}


class Grouped(Pictures):
    def other(self):
        return nn.GroupNorm(2, 6)


class Twice(Pictures):
    def forward(self, x):
        y = self.body(x)
        return self.head(self.rows(y) + self.rows(y.square()))


class BesideItsLayer(Pictures):
    def forward(self, x):
        y = self.rows(self.body(x))
        return self.head(y) + y @ self.head.weight.square().T


class InPlace(Pictures):
    def forward(self, x):
        return self.head(self.rows(self.body(x)).mul_(2))


@pytest.mark.parametrize(
    ("kind", "by_layers"),
    [(Pictures, True), (Strided, True), (Dilated, True)]
    + [(kind, False) for kind in (Grouped, Twice, BesideItsLayer, InPlace)],
)
def test_moments_from_layers_are_those_of_the_samples_gradients(kind, by_layers, monkeypatch):
    """Three clients, one of a single sample, at statistics of their own; what layers cannot tell, samples do."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(11, 2, 11, 12, generator=random, dtype=torch.float64)
    target = torch.randint(3, (11,), generator=random)
    model, task = Model(kind, x[:2], 3, seed=0), TASKS["classification"]
    shaken_P = model.start_P + 0.1 * torch.randn(model.start_P.shape, generator=random, dtype=torch.float64)
    b_R = model.start_R + torch.rand(model.start_R.shape, generator=random, dtype=torch.float64)
    at = gradients.Standing(shaken_P, b_R, torch.randn(3, 3, generator=random, dtype=torch.float64))
    parts = [torch.arange(0, 6), torch.arange(6, 7), torch.arange(7, 11)]
    told = listening(model)
    assert by_layers == (told is not None and understood(told, task, shaken_P, b_R, x[:2], target[:2]))
    for size in (1 << 25, 1):  # all at once, and as few as there can be
        monkeypatch.setitem(gradients.CHUNK_BYTES, "cpu", size)
        mean_KP, spread_KL = gradients.moments(model, task, lambda i: (x[i], target[i]), at, parts)
        offset_BC = torch.cat([at.offset_KC[k].expand(len(part), 3) for k, part in enumerate(parts)])
        g_BP = gradients.sample_gradients(model, task)(shaken_P, b_R, x, target, offset_BC)
        for k, part in enumerate(parts):
            assert_close(mean_KP[k], g_BP[part].mean(0), rtol=1e-10, atol=1e-12)
            centred = g_BP[part] - g_BP[part].mean(0)
            assert_close(spread_KL[k], gradients.by_layer(centred, model.layout).sum(0), rtol=1e-9, atol=1e-12)


class HiddenAtTheStart(BesideItsLayer):
    """The square of a head that starts at zero has no gradient there."""

    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        nn.init.zeros_(self.head.weight)


def test_a_model_whose_start_hides_that_layers_do_not_tell_all_is_left_to_samples():
    random = torch.Generator().manual_seed(0)
    x, target = torch.randn(2, 2, 11, 12, generator=random, dtype=torch.float64), torch.tensor([0, 2])
    model, task = Model(HiddenAtTheStart, x, 3, seed=0), TASKS["classification"]
    assert understood(listening(model), task, model.start_P, model.start_R, x, target)
    assert layers_of(model, task, lambda: (x, target)) is None


def test_a_model_is_tried_once_and_forgotten_with_its_owner():
    x, target, tried = torch.ones(2, 2, 11, 12), torch.tensor([0, 2]), []
    model = Model(Pictures, x, 3, seed=0)
    for _ in range(2):
        layers_of(model, TASKS["classification"], lambda: tried.append(1) or (x, target))
    assert len(tried) == 1
    left = weakref.ref(model)
    del model
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("of", ["layers", "samples"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 22, 100])
def test_many_clients_share_a_chunk_and_one_client_spans_many(of, size):
    """Against one backward pass a sample: clients of a single sample, in the midst of others and at the end."""
    sizes = [1, 1, 5, 1, 2, 9, 1, 1, 1]
    random = torch.Generator().manual_seed(1)
    x = torch.randn(22, 2, 11, 12, generator=random, dtype=torch.float64)
    target = torch.randint(3, (22,), generator=random)
    model, task = Model(Pictures, x[:2], 3, seed=0), TASKS["classification"]
    parts = torch.split(torch.randperm(22, generator=random), sizes)
    at = gradients.Standing(model.start_P, model.start_R, torch.randn(9, 3, generator=random, dtype=torch.float64))
    inputs = lambda i: (x[i], target[i])  # noqa: E731
    if of == "layers":
        layers, _ = layers_of(model, task, lambda: inputs(parts[0]))
        mean_KP, spread_KL = gradients.of_layers(layers, task, inputs, at, parts, size)
    else:
        mean_KP, spread_KL = gradients.of_samples(model, task, inputs, at, parts, size)
    for k, part in enumerate(parts):
        g_nP = torch.stack([alone(model, task, at, k, x[i : i + 1], target[i : i + 1]) for i in part.tolist()])
        assert_close(mean_KP[k], g_nP.mean(0), rtol=1e-10, atol=1e-12)
        pieces = torch.split(g_nP - g_nP.mean(0), [shape.numel() for shape in model.layout.shapes], dim=1)
        spread_L = torch.stack([piece.square().sum() for piece in pieces])
        assert_close(spread_KL[k], spread_L, rtol=1e-9, atol=1e-12)
        assert len(part) > 1 or not spread_KL[k].any()


def alone(model, task, at, k, x, target):
    leaf_P = at.y_P.clone().requires_grad_()
    logits = model.forward(leaf_P, at.buffers_R, x, mode="eval")[0].logits_BC + at.offset_KC[k]
    return torch.autograd.grad(task.loss(logits, target).sum(), leaf_P)[0]


def test_a_chunk_says_whose_samples_it_holds():
    at = gradients.Standing(torch.zeros(1), torch.zeros(0), torch.tensor([[10.0], [20.0], [30.0]]))
    parts = [torch.arange(3), torch.arange(3, 4), torch.arange(4, 8)]
    first, second = gradients.chunks(lambda i: (i, -i), at, parts, 5)
    assert (first.here, first.sizes) == (slice(0, 3), [3, 1, 1])
    assert (second.here, second.sizes) == (slice(2, 3), [3])
    assert first.x.tolist() + second.x.tolist() == list(range(8))
    assert first.offset_BC[:, 0].tolist() == [10, 10, 10, 20, 30]
    assert second.offset_BC[:, 0].tolist() == [30, 30, 30]


@pytest.mark.parametrize(
    "shape",
    [{}, {"stride": (2, 1)}, {"padding": (0, 2)}, {"dilation": (1, 3)}, {"stride": 3, "padding": 1, "dilation": 2}],
)
def test_kernel_gradients_are_those_of_autograd(shape):
    layer = nn.Conv2d(2, 4, (2, 3), dtype=torch.float64, **shape)
    a_B = torch.randn(3, 2, 9, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gives_B = layer(a_B)
    d_B = torch.randn(gives_B.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = [torch.autograd.grad(layer(a[None]), layer.weight, d[None])[0] for a, d in zip(a_B, d_B, strict=True)]
    found = kernel_gradients(layer, a_B, d_B)
    torch.testing.assert_close(found, torch.stack(expected).flatten(1), rtol=1e-12, atol=1e-12)
