"""A method of one's own is tried before training: its mistakes are one line, and the trial changes no numbers."""

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from federations import Tiny, tiny, tiny_dataset, train
from torch import Tensor

import fedncv
from fedncv.engine import problem as building
from fedncv.methods import METHODS, find_method
from fedncv.methods.fedavg import Up, fedavg
from fedncv.tree import leaves

SIZE = 4 * 6 + 6 + 6 + 6 + 6 * 3 + 3  # of Tiny


class Two(NamedTuple):
    delta_P: Tensor
    more_P: Tensor


def made(**functions):
    return fedavg()._replace(**functions)


WRONG = [
    ({"direction": lambda *_: None}, rf"direction returns NoneType; .*\(g_P, scratch\), g_P of shape \({SIZE},\)"),
    ({"direction": lambda ask, y, batch, *_: ask.grad(y, batch)}, rf"direction returns a tensor of shape \({SIZE},\);"),
    ({"direction": lambda *_: (torch.zeros(3), ())}, r"returns a tensor of shape \(3,\) as g_P; .*per trainable"),
    ({"direction": lambda *_: (0.0, ())}, "direction returns float as g_P"),
    ({"direction": lambda _ask, y_P: (y_P, ())}, r"direction failed: TypeError: .*6 were given; .*direction\(ask, "),
    ({"direction": lambda _a, y, batch, *_: (y / batch.z, ())}, r"AttributeError: .*'z' \(.*test_trial.py, line \d+\)"),
    ({"begin": lambda _ask, down, _own: down.x_P}, "begin returns a tensor of shape"),
    ({"begin": lambda _ask, down, _own: (down, ())}, "begin returns 1 values as y_P"),
    ({"finish": lambda _ask, y, _w, down, *_: Up(down.x_P - y)}, "finish returns 1 values; it must return .up, own."),
    ({"finish": lambda _ask, y, *_: Two(y, y)}, "clients send a tensor without a name, but .* declares delta_P"),
    ({"finish": lambda _ask, y, *_: (Two(y, y), ())}, "clients send delta_P, more_P, but .* declares delta_P"),
    ({"init": lambda x_P: x_P}, r"init failed: TypeError: .*; it is called as init\(x_P, federation\)"),
]  # fmt: skip


@pytest.mark.parametrize(("functions", "words"), WRONG)
def test_a_mistake_is_one_line_that_names_the_function(functions, words):
    with pytest.raises(ValueError, match=rf"^method 'mine': .*{words}") as caught:
        fedncv.simulate(
            method=made(**functions),
            name="mine",
            data=tiny_dataset(),
            model=Tiny,
            partition="iid",
            clients=3,
            per_round=2,
        )
    assert "\n" not in str(caught.value)


def test_a_refusal_of_fedncv_keeps_its_words():
    def direction(ask, *_):
        ask.layout.head  # noqa: B018

    def frozen(shape, outputs):
        module = Tiny(shape, outputs)
        module.head.requires_grad_(False)
        return module

    with pytest.raises(ValueError, match=r"^the head of this model has no trainable"):
        tiny(made(direction=direction), model=frozen)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_passes_as_an_object(name):
    tiny(name)


def test_the_trial_draws_nothing_from_the_global_generators():
    def direction(ask, y_P, batch, _down, _own, scratch):
        noise = torch.randn(()) + np.random.normal() + random.random()
        return ask.grad(y_P, batch) + noise, scratch

    def draws():
        return torch.rand(()).item(), np.random.random(), random.random()

    def seed():
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)

    seed()
    plain = draws()
    seed()
    tiny(made(direction=direction))
    assert draws() == plain


@pytest.mark.parametrize("name", ["fedavg", "fedncv", "fedrep", "scaffold"])
def test_the_trial_changes_no_bits(name, monkeypatch):
    tried = train(tiny(find_method(name)), rounds=2)
    monkeypatch.setattr(building, "_try_method", lambda _problem: None)
    for (_, a), (_, b) in zip(leaves(tried), leaves(train(tiny(find_method(name)), rounds=2)), strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_built_in_methods_are_not_tried(monkeypatch):
    seen = []
    monkeypatch.setattr(building, "_try_method", seen.append)
    small = {"data": tiny_dataset(), "model": Tiny, "partition": "iid", "clients": 3, "per_round": 2, "rounds": 0}
    fedncv.simulate(method="fedavg+prior", **small)
    assert not seen
    fedncv.simulate(method="fedncv.methods.fedavg:fedavg+prior", **small)
    fedncv.simulate(method=fedavg(), **small)
    assert len(seen) == 2
