"""Frozen parameters (requires_grad=False) are constants: never trained, never sent, in no control variate."""

import os

import pytest
import torch
import torch.nn.functional as F
from agreement import HARD, close, close_rows, runs
from federations import Tiny, everyone, inside, model_of, tiny, tiny_dataset, train
from torch import nn
from torch.testing import assert_close

import fedncv
from fedncv.engine import evaluate
from fedncv.engine.choose import engine_for
from fedncv.engine.problem import start
from fedncv.engine.sequential import run_round
from fedncv.engine.stacked import CannotStackError, StackedEngine
from fedncv.engine.stacked_scores import ScoringEngine
from fedncv.export import export
from fedncv.flat import Model


def fixed(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class OnFeatures(nn.Module):
    """A linear head on fixed features; ``frozen`` decides who computes them."""

    def __init__(self, frozen):
        super().__init__()
        self.stem = nn.Linear(4, 5)
        self.stem.weight.data, self.stem.bias.data = fixed(5, 4), fixed(5, seed=1)
        self.stem.requires_grad_(False)
        if not frozen:
            del self.stem
        self.frozen = frozen
        self.head = nn.Linear(5, 3)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        return self.head(torch.tanh(self.stem(x)) if self.frozen else x)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedncv", "fedavg+samples", "fedavg+memory"])
def test_training_behind_a_frozen_stem_is_training_on_its_features(method):
    """The same federation, once with the stem in the model and once with the stem's outputs as data."""
    settings = HARD | {"sizes": (20, 6, 9, 18, 7)}
    whole = tiny(method, model=lambda *_: OnFeatures(frozen=True), **settings)
    data = whole.dataset
    features = torch.tanh(F.linear(data.x, fixed(5, 4), fixed(5, seed=1)))
    head = tiny(method, model=lambda *_: OnFeatures(frozen=False), inputs=features, **settings)
    states = [start(whole), start(head)]
    for _ in range(3):
        (states[0], row), (states[1], expected) = run_round(whole, states[0]), run_round(head, states[1])
        close_rows(row, expected)  # losses, work, and bytes: the stem is in no message
    close(states[0], states[1])
    assert evaluate.after(whole, states[0]) == evaluate.after(head, states[1])


def test_bytes_are_those_of_the_trained_parameters():
    problem = tiny("scaffold", model=lambda *_: OnFeatures(frozen=True), dtype="float64")
    _, row = run_round(problem, start(problem), everyone(0, 1))
    assert problem.model.layout.num_parameters == 5 * 3 + 3
    assert row["bytes_down"] == row["bytes_up"] == 2 * 2 * 18 * 8  # two clients, model and control variate, float64


class Partly(Tiny):
    """The first layer is frozen, with the bias of the head."""

    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.body[0].requires_grad_(False)
        self.head.bias.requires_grad_(False)


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "scaffold"])
def test_the_stacked_engine_agrees(method):
    problem = tiny(method, model=Partly, **HARD)
    engine = StackedEngine([problem])
    (stacked,), rows = runs(engine, 2)
    state = start(problem)
    for t in range(2):
        state, row = run_round(problem, state)
        close_rows(rows[t][0], row)
    close(stacked, state)


def test_an_export_holds_the_frozen_weights_at_their_start_and_the_trained_ones():
    problem = tiny("fedavg", model=Partly)
    state = train(problem, rounds=2)
    tensors = export(problem, state)
    module = Partly((4,), 3).double()
    module.load_state_dict(tensors)
    begin = problem.model.state_dict(problem.model.start_P, problem.model.start_R)
    moved = {name for name, tensor in tensors.items() if not torch.equal(tensor, begin[name])}
    assert moved == {"body.1.weight", "body.1.bias", "body.1.running_mean", "body.1.running_var", "head.weight"}
    x = problem.dataset.x
    ours, _ = problem.model.forward(model_of(state), state.buffers, x, mode="eval")
    assert_close(module.eval()(x), ours.logits_BC)


def test_a_tied_tensor_is_exported_under_all_its_names():
    class TwoNames(nn.Module):
        def __init__(self, *_):
            super().__init__()
            self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
            self.head.weight = self.first.weight

        def forward(self, x):
            return self.head(self.first(x))

    model = Model(TwoNames, torch.ones(2, 4), 4, seed=0)
    tensors = model.state_dict(model.start_P + 1, model.start_R)
    assert torch.equal(tensors["head.weight"], tensors["first.weight"])
    assert_close(tensors["head.weight"], model._module.first.weight.detach() + 1)


class FrozenHead(Tiny):
    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.head.requires_grad_(False)


@pytest.mark.parametrize("method", ["fedper", "fedrep", "pfedsim"])
def test_methods_that_treat_the_head_apart_refuse_a_frozen_one(method):
    with pytest.raises(ValueError, match="head of this model has no trainable parameters"):
        tiny(method, model=FrozenHead)


def test_other_methods_train_a_body_below_a_frozen_head():
    problem = tiny("scaffold", model=FrozenHead)
    state = train(problem)
    assert len(inside(state.server, "x_P")) == problem.model.layout.body.stop
    assert torch.equal(export(problem, state)["head.weight"], problem.model._module.head.weight.detach())


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="all 6 parameters of the model have requires_grad=False"):
        tiny("fedavg", model=lambda *arguments: Tiny(*arguments).requires_grad_(False))


def test_a_part_that_is_held_in_eval_keeps_its_statistics():
    class Held(Tiny):
        def train(self, mode=True):
            super().train(mode)
            self.body[1].eval()
            return self

    assert len(tiny("fedavg").model.start_R) == 12
    problem = tiny("fedavg", model=Held, **HARD)
    assert len(problem.model.start_R) == 0
    (stacked,), _ = runs(StackedEngine([problem]), 1)
    close(stacked, run_round(problem, start(problem))[0])
    Tiny((4,), 3).load_state_dict(export(problem, stacked))


# ---- several seeds, one base -----------------------------------------------------------------------------


class SameBase(Partly):
    """The frozen layer is the same for all seeds, as a pretrained one is."""

    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.body[0].weight.data = fixed(6, 4)
        nn.init.ones_(self.body[0].bias)
        nn.init.zeros_(self.head.bias)


def test_seeds_with_one_base_train_together_and_hold_it_once():
    problems = [tiny("fedavg", model=SameBase, seed=seed, **HARD) for seed in (0, 5)]
    engine = StackedEngine(problems)
    together, _ = runs(engine, 2)
    for state, problem in zip(together, problems, strict=True):
        expected = start(problem)
        for _ in range(2):
            expected, _ = run_round(problem, expected)
        close(state, expected)
    models = [engine.model, *(problem.model for problem in problems)]
    assert len({model._module.body[0].weight.data_ptr() for model in models}) == 1
    assert engine._start_JP.shape == (2, problems[0].model.layout.num_parameters)


def test_seeds_that_draw_their_base_do_not_stack_and_say_so(capsys):
    problems = [tiny("fedavg", model=Partly, seed=seed, engine="stacked") for seed in (0, 5)]
    with pytest.raises(CannotStackError, match="draws frozen weights"):
        ScoringEngine(problems)
    engine_for(problems)
    assert "frozen weights or buffers from its seed" in capsys.readouterr().err


# ---- what is not sent is compared ------------------------------------------------------------------------


def pretrained(*arguments):
    """A base from outside, as a file of weights would be."""
    module = SameBase(*arguments)
    module.body[0].weight.data = fixed(6, 4, seed=int(os.environ["TEST_BASE"])).float()
    return module


def test_a_run_resumes_only_with_the_frozen_weights_it_began_with(tmp_path, monkeypatch):
    objects, folder = {"model": pretrained, "data": tiny_dataset()}, tmp_path / "run"
    settings = {"clients": 3, "per_round": 2, "epochs": 1, "batch_size": 8, "rounds": 2}
    monkeypatch.setenv("TEST_BASE", "0")
    with pytest.raises(KeyboardInterrupt):
        fedncv.simulate(out=folder, on_round=stop_after_one, **objects, **settings)
    monkeypatch.setenv("TEST_BASE", "1")
    with pytest.raises(ValueError, match="other frozen weights"):
        fedncv.resume(folder, **objects)
    monkeypatch.setenv("TEST_BASE", "0")
    resumed, whole = fedncv.resume(folder, **objects), fedncv.simulate(**objects, **settings)
    assert torch.equal(model_of(resumed.state), model_of(whole.state))


def stop_after_one(row):
    if row["round"] == 1:
        raise KeyboardInterrupt


def test_the_mark_of_constants_sees_other_weights_and_not_the_last_bits():
    def mark(change):
        model = Model(SameBase, torch.ones(2, 4), 3, seed=0)
        model._module.body[0].weight.data = change(model._module.body[0].weight.data)
        return model.constants_mark

    plain = mark(lambda w: w)
    assert mark(lambda w: w * (1 + 1e-7)) == pytest.approx(plain, rel=1e-5)
    assert mark(lambda w: w.flip(0)) != pytest.approx(plain, rel=1e-3)
    assert Model(Tiny, torch.ones(2, 4), 3, seed=0).constants_mark == 0


def test_integer_inputs_get_parameters_of_the_dtype_that_was_asked_for():
    class Tokens(nn.Module):
        def __init__(self, *_):
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 2)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            return self.head(self.embedding(x).mean(1) * self.scale)

    data = fedncv.Dataset("tokens", torch.arange(40).reshape(20, 2) % 5, torch.arange(20) % 2, 2)
    for dtype in (torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        result = fedncv.simulate(data=data, model=Tokens, dtype=name, clients=2, per_round=2, rounds=1)
        assert {tensor.dtype for tensor in result.state_dict().values()} == {dtype}
        assert result.rows[-1]["bytes_up"] == 2 * 23 * dtype.itemsize
