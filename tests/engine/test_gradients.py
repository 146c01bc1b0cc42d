"""Gradients of single samples: from layers as one by one, and models that have none are refused."""

from typing import ClassVar

import pytest
import torch
from federations import Tiny, tiny
from torch import nn
from torch.testing import assert_close

from fedncv.engine import gradients
from fedncv.engine.layer_gradients import listening, understood
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
        (SeesOthers, "see each other"),
        (LooksAtValues, "no gradients of single samples"),
        (OwnStatistics, "no gradients of single samples"),
    ],
)
def test_models_whose_samples_have_no_gradients_of_their_own_are_refused(model, message):
    gradients.check(tiny("fedavg"))
    with pytest.raises(ValueError, match=f"{message}.*leave probe empty"):
        gradients.check(tiny("fedavg", model=model))


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
        return super().forward(x) + self.rows(self.body(x)) @ self.head.weight.square().T


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
