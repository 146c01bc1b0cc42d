"""Models by name: their sizes are the published ones, and they refuse inputs they are not made for."""

import pytest
import torch
from agreement import close
from torch import nn
from torch.testing import assert_close

import fedncv
from fedncv.config import RunConfig
from fedncv.data import Clients, Dataset
from fedncv.engine.problem import build, start
from fedncv.engine.sequential import run_round
from fedncv.engine.stacked_scores import ScoringEngine
from fedncv.flat import Model
from fedncv.models import MODELS


def size(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", ["resnet18", "resnet18_bn"])
def test_resnet18_has_the_published_size_but_for_its_stem(name):
    """torchvision's has 11,689,512 with a 7x7 stem; the one for CIFAR-10 is known to have 11,173,962."""
    with torch.device("meta"):
        assert size(MODELS[name]((3, 32, 32), 1000)) == 11_689_512 - 64 * 3 * (7 * 7 - 3 * 3)
        assert size(MODELS[name]((3, 32, 32), 10)) == 11_173_962


def test_resnet18_halves_the_picture_three_times():
    module, x = MODELS["resnet18_bn"]((1, 16, 16), 4), torch.ones(2, 1, 16, 16)
    assert module.body[:-2](module.stem(x)).shape == (2, 512, 2, 2)
    assert sum(isinstance(part, nn.Conv2d) for part in module.modules()) == 17 + 3  # with the shortcuts


def test_char_lstm_is_leafs():
    """820,522 with 90 tokens in Reddi et al. 2021, table 2; torch has four gates' biases twice in two layers."""
    assert size(MODELS["char_lstm"]((80,), 90)) == 820_522 + 2 * 4 * 256


def test_char_transformer_has_about_the_size_of_char_lstm_and_sees_no_later_token():
    module = MODELS["char_transformer"]((80,), 90)
    assert size(module) == pytest.approx(822_570, rel=0.01)
    x = torch.arange(10)[None] % 7
    hidden = []
    module.body[-1].register_forward_hook(lambda _module, _args, out: hidden.append(out))
    module(x)
    module(x[:, :6])
    assert_close(hidden[0][:, :6], hidden[1])  # the first six are the same without those after them


@pytest.mark.parametrize("name", MODELS)
def test_the_head_is_the_last_linear_layer(name):
    x = torch.zeros(2, 16, dtype=torch.int64) if name.startswith("char") else torch.zeros(2, 1, 16, 16)
    model = Model(MODELS[name], x, 5, seed=0)
    assert model.layout.names[-2:] == ("head.weight", "head.bias")
    assert model.layout.head.stop - model.layout.head.start == (model.layout.features.numel() + 1) * 5


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("char_lstm", (3, 8, 8), torch.float32, "char_lstm needs sequences of token ids"),
        ("char_transformer", (8,), torch.float32, "needs token ids, whole numbers, not torch.float32"),
        ("resnet18", (8,), torch.float32, "resnet18 needs pictures"),
    ],
)
def test_other_inputs_are_refused(name, shape, dtype, message):
    with pytest.raises(ValueError, match=message):
        Model(MODELS[name], torch.ones(2, *shape, dtype=dtype), 5, seed=0)


@pytest.mark.parametrize("name", [pytest.param("char_lstm", marks=pytest.mark.slow), "char_transformer"])
def test_text_models_train_stacked_as_one_after_the_other(name):
    x = torch.arange(60).reshape(10, 6) * 7 % 11
    data = Dataset("text", x, x.sum(1) % 11, 11)
    clients = Clients([torch.arange(0, 4).numpy(), torch.arange(4, 7).numpy()], [torch.arange(7, 10).numpy()] * 2)
    config = RunConfig(clients=2, per_round=2, rounds=1, batch_size=4, epochs=1, dtype="float64", model=name)
    problem = build(config, data=data, clients=clients)
    ((state, _),) = ScoringEngine([problem]).run_rounds([start(problem)])
    close(state, run_round(problem, start(problem))[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "resnet18_bn"])
def test_resnets_train_stacked_as_one_after_the_other(name):
    x = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = Dataset("pictures", x, torch.arange(8) % 2, 2)
    clients = Clients([torch.arange(0, 4).numpy(), torch.arange(4, 7).numpy()], [torch.arange(7, 8).numpy()] * 2)
    config = RunConfig(clients=2, per_round=2, rounds=1, batch_size=4, epochs=1, dtype="float64", model=name, lr=0.01)
    problem = build(config, data=data, clients=clients)
    ((state, _),) = ScoringEngine([problem]).run_rounds([start(problem)])
    close(state, run_round(problem, start(problem))[0], 1e-9)


def test_a_char_model_learns_a_text_that_repeats():
    """abcabc…: the next character is a function of the last one."""
    text = torch.arange(60) % 3
    x = torch.stack([text[i : i + 4] for i in range(50)])
    data = Dataset("abc", x, text[4:54], 3)
    result = fedncv.simulate(
        data=data,
        model=small_lstm,
        clients=2,
        per_round=2,
        rounds=5,
        epochs=5,
        lr=0.3,
        momentum=0.9,
        batch_size=4,
        eval_every=0,
        after_every=0,
        partition="iid",
    )
    assert result.last["before"] == 1


def small_lstm(shape, num_tokens):
    module = MODELS["char_lstm"](shape, num_tokens)
    module.lstm, module.head = nn.LSTM(8, 16, num_layers=2, batch_first=True), nn.Linear(16, num_tokens)
    return module
