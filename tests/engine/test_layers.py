"""Layers people use, in every engine: the table of docs/models.md is what happens."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from agreement import close, same
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fedncv.config import RunConfig
from fedncv.data import Clients, Dataset
from fedncv.engine import evaluate
from fedncv.engine.choose import engine_for
from fedncv.engine.masked import masked, padding_changes
from fedncv.engine.problem import build, start
from fedncv.engine.processes import ProcessesEngine, can_fork
from fedncv.engine.sequential import SequentialEngine, run_round
from fedncv.engine.stacked_scores import ScoringEngine
from fedncv.flat import Model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


class Around(nn.Module):
    """Tokens -> (samples, 5 steps, 8 features) -> the layer, if it is one -> a head on the mean over the steps."""

    def __init__(self, use, layer=None):
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(7, 8), layer, nn.Linear(8, 3)
        self.use = use

    def forward(self, x):
        return self.head(self.use(self, self.embedding(x)).mean(1))


def first(module, h):
    return module.layer(h)[0]


def plain(module, h):
    return module.layer(h)


def over_time(module, h):
    return module.layer(h.transpose(1, 2)).transpose(1, 2)


def time_first(module, h):
    return module.layer(h.transpose(0, 1)).transpose(0, 1)


def cells(module, h):
    state = None
    for step in h.unbind(1):
        state = module.layer(step, state)
    return state[0][:, None]


def packed(module, h):
    lengths = torch.full((len(h),), h.shape[1])
    return pad_packed_sequence(module.layer(pack_padded_sequence(h, lengths, batch_first=True))[0], batch_first=True)[0]


def attention(module, h):
    return module.layer(h, h, h)[0]


def encoder(**more):
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, **more)


def wide(module, h):
    """As pictures of 2 x 4."""
    return module.layer(h.unflatten(2, (2, 4))).flatten(2)


def counted():
    module = Around(lambda _module, h: h)
    module.embedding.scale_grad_by_freq = True
    return module


def renormed():
    module = Around(lambda _module, h: h)
    module.embedding.max_norm = 1.0
    return module


CASES = {
    "nn.Linear": lambda: Around(plain, nn.Linear(8, 8)),
    "nn.Conv1d": lambda: Around(over_time, nn.Conv1d(8, 8, 3)),
    "nn.Conv2d": lambda: Around(wide, nn.Conv2d(5, 6, (1, 1))),
    "nn.Embedding": lambda: Around(lambda _module, h: h),
    "nn.LayerNorm": lambda: Around(plain, nn.LayerNorm(8)),
    "nn.RMSNorm": lambda: Around(plain, nn.RMSNorm(8)),
    "nn.GroupNorm": lambda: Around(over_time, nn.GroupNorm(2, 8)),
    "nn.InstanceNorm1d": lambda: Around(over_time, nn.InstanceNorm1d(8)),
    "nn.BatchNorm1d": lambda: Around(over_time, nn.BatchNorm1d(8)),
    "nn.BatchNorm2d": lambda: Around(wide, nn.BatchNorm2d(5)),
    "nn.Dropout": lambda: Around(plain, nn.Dropout(0.3)),
    "nn.Dropout2d": lambda: Around(wide, nn.Dropout2d(0.3)),
    "nn.AlphaDropout": lambda: Around(plain, nn.AlphaDropout(0.3)),
    "F.dropout": lambda: Around(lambda module, h: F.dropout(h, 0.3, module.training)),
    "nn.LSTM": lambda: Around(first, nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)),
    "nn.GRU": lambda: Around(first, nn.GRU(8, 4, 2, dropout=0.3, batch_first=True, bidirectional=True)),
    "nn.RNN": lambda: Around(first, nn.RNN(8, 8, batch_first=True)),
    "nn.LSTMCell": lambda: Around(cells, nn.LSTMCell(8, 8)),
    "nn.MultiheadAttention": lambda: Around(attention, nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)),
    "nn.TransformerEncoderLayer": lambda: Around(plain, encoder(batch_first=True)),
    "nn.TransformerEncoder": lambda: Around(plain, nn.TransformerEncoder(encoder(batch_first=True), 2)),
    "F.scaled_dot_product_attention": lambda: Around(
        lambda module, h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.3 if module.training else 0.0)
    ),
    "batch_first=False with dropout": lambda: Around(time_first, encoder(batch_first=False)),
    "nn.utils.rnn.pack_padded_sequence": lambda: Around(packed, nn.LSTM(8, 8, batch_first=True)),
    "nn.Embedding(scale_grad_by_freq=True)": counted,
    "nn.utils.parametrizations.spectral_norm": lambda: Around(
        plain, nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    ),
    "x[x > 0]": lambda: Around(lambda _module, h: h[h > -9].reshape(h.shape)),
    "if x.sum() > 0": lambda: Around(lambda _module, h: h if h.sum() > -1e9 else -h),
    "a statistic over the batch": lambda: Around(lambda _module, h: h - h.mean(0)),
    "nn.RReLU": lambda: Around(plain, nn.RReLU()),
    "torch.rand": lambda: Around(lambda _module, h: h * torch.rand(())),
    "random.random": lambda: Around(lambda _module, h: h * random.random()),
    "numpy.random.rand": lambda: Around(lambda _module, h: h * np.random.rand()),
    "nn.Embedding(max_norm=1)": renormed,
    "nn.BatchNorm1d(momentum=None)": lambda: Around(over_time, nn.BatchNorm1d(8, momentum=None)),
}
FAST = ("nn.GroupNorm", "nn.BatchNorm1d", "nn.AlphaDropout", "nn.LSTM", "nn.GRU", "nn.TransformerEncoderLayer")


def federation(factory, **settings):
    """Two clients with five and three samples to train on, in batches of four."""
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.integers(7, size=(12, 5))), torch.from_numpy(rng.integers(3, size=12))
    clients = Clients([np.arange(0, 5), np.arange(5, 8)], [np.arange(8, 9), np.arange(9, 12)])
    settings = {"lr": 0.1, "dtype": "float64", "batch_size": 4, "epochs": 1, "rounds": 2} | settings
    config = RunConfig(clients=2, per_round=2, **settings)
    return build(config, data=Dataset("tokens", x, y, 3), clients=clients, model=lambda *_: factory())


def written():
    """Name -> what the page says of it."""
    table = PAGE.read_text(encoding="utf-8").split("<!-- layers -->")[1]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `") or line.startswith("| a ")]
    return {
        name: said.strip().split(",")[0].split(":")[0]
        for names, said in rows
        for name in (re.findall(r"`([^`]+)`", names) or [names.strip()])
    }


def test_the_page_lists_the_layers_that_are_tested():
    assert list(written()) == list(CASES)
    assert set(written().values()) == {"stacked", "falls back", "refused"}


def of_outcome(outcome, fast=()):
    names = [name for name, said in written().items() if said == outcome]
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", of_outcome("stacked", FAST))
def test_stacked_layers_agree_with_the_sequential_engine(name):
    problem = federation(CASES[name])
    engine = ScoringEngine([problem])
    ((stacked, row),) = engine.run_rounds([start(problem)])
    state, expected = run_round(problem, start(problem))
    close(stacked, state)
    assert row["loss"] == pytest.approx(expected["loss"], abs=1e-10)
    for ours, theirs in ((engine.before, evaluate.before), (engine.after, evaluate.after)):
        (measured,) = ours([stacked])
        assert measured == theirs(problem, state)


FELL = ("nn.utils.rnn.pack_padded_sequence", "a statistic over the batch", "x[x > 0]")


@pytest.mark.parametrize("name", of_outcome("falls back", FELL))
def test_layers_that_cannot_be_stacked_fall_back_and_say_so(name, capsys):
    problem = federation(CASES[name], engine="stacked")
    engine = engine_for([problem])
    assert isinstance(engine, SequentialEngine)
    said = capsys.readouterr().err
    assert re.fullmatch(r"stacked: .+; running one client after the other instead\n", said)
    ((state, _),) = engine.run_rounds([start(problem)])
    same(state, run_round(problem, start(problem))[0])


BY_VALUE = ("nn.utils.rnn.pack_padded_sequence", "x[x > 0]", "if x.sum() > 0")
"""Their code reads values. (The lengths of packed sequences are on the CPU, so on a GPU those run.)"""


@pytest.mark.parametrize("name", of_outcome("falls back", FELL))
def test_layers_that_cannot_be_stacked_run_on_streams_with_the_same_numbers(name, capsys):
    problem = federation(CASES[name], engine="streams")
    engine = engine_for([problem])
    assert engine.name == ("sequential" if name in BY_VALUE else "streams")
    assert ("depend on values of the batch" in capsys.readouterr().err) == (name in BY_VALUE)
    ((got, row),) = engine.run_rounds([start(problem)])
    state, expected = run_round(problem, start(problem))
    close(got, state)
    assert row["loss"] == pytest.approx(expected["loss"], abs=1e-10)
    assert engine.before([got]) == [evaluate.before(problem, state)]
    assert engine.after([got]) == [evaluate.after(problem, state)]


@pytest.mark.parametrize("name", of_outcome("refused", CASES))
def test_layers_that_would_be_wrong_are_refused(name):
    with pytest.raises(ValueError, match=r"random numbers|max_norm|momentum=None"):
        federation(CASES[name])


def test_the_layer_that_cannot_be_stacked_is_named(capsys):
    class Inner(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    engine_for([federation(lambda: Around(plain, nn.Sequential(nn.ReLU(), Inner())), engine="stacked")])
    assert "stacked: layer layer.1 (Inner): " in capsys.readouterr().err


def test_a_layer_that_fails_in_scoring_only_falls_back_before_the_study(capsys):
    def use(module, h):
        return h if module.training else h[h > -9].reshape(h.shape)

    engine_for([federation(lambda: Around(use), engine="stacked")])
    assert "running one client after the other" in capsys.readouterr().err


@pytest.mark.skipif(not can_fork(), reason="the process engine forks")
@pytest.mark.slow
def test_draws_in_recurrent_layers_and_attention_are_the_same_bits_in_processes():
    def both():
        return Around(
            lambda module, h: module.layer[1](module.layer[0](h)[0]),
            nn.ModuleList([nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True), encoder(batch_first=True)]),
        )

    problem = federation(both)
    engine = ProcessesEngine([problem])
    try:
        ((state, _),) = engine.run_rounds([start(problem)])
    finally:
        engine.close()
    same(state, run_round(problem, start(problem))[0])


# ---- the padding trial -----------------------------------------------------------------------------------


def deep(*_):
    """Twenty layers with BatchNorm, which amplify the rounding of float32."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(20)]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(8, 3))


def attentive(*_):
    return nn.Sequential(nn.Unflatten(1, (2, 4)), encoder4(), encoder4(), nn.Flatten(), nn.Linear(8, 3))


def encoder4():
    return nn.TransformerEncoderLayer(4, 2, 16, dropout=0.2, batch_first=True)


@pytest.mark.parametrize("factory", [deep, attentive])
def test_padding_is_judged_by_what_it_does_and_not_by_rounding(factory):
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    model = Model(factory, x, 3, seed=0)
    assert not padding_changes(model, masked(model), x[:2])
    noisy = model.changed(add_noise)  # as on a GPU, where another batch size means other kernels
    assert not torch.equal(
        *(each.forward(model.start_P, model.start_R, x, mode="eval")[0].logits_BC for each in (model, noisy))
    )
    assert not padding_changes(model, masked(noisy), x[:2])


def add_noise(module):
    """Let single precision, and only that, be inexact."""

    def inexact(_module, _args, out):
        return out * (1 + 1e-3 * torch.sin(1e6 * out)) if out.dtype == torch.float32 else out

    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_hook(inexact)


def test_a_gradient_that_padding_changes_is_noticed():
    model = Model(lambda *_: counted(), torch.ones(3, 5, dtype=torch.int64), 3, seed=0)
    assert padding_changes(model, masked(model), torch.ones(2, 5, dtype=torch.int64))


def test_the_layer_that_mixes_samples_is_named(capsys):
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    engine_for([federation(lambda: Around(plain, nn.Sequential(nn.ReLU(), Centred())), engine="stacked")])
    assert "stacked: layer layer.1 (Centred) mixes the samples of a batch" in capsys.readouterr().err
    engine_for([federation(lambda: Around(lambda _module, h: h - h.mean(0)), engine="stacked")])
    assert "the model's own forward, before its layer head (Linear), mixes the samples" in capsys.readouterr().err
