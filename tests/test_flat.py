"""A module as functions of a flat vector: the module's own numbers, whatever it is made of."""

import contextlib
import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from federations import Tiny
from torch import nn
from torch.testing import assert_close

from fedncv.flat import Model
from fedncv.keys import key_for
from fedncv.models import MODELS, LeNet5, find_model
from fedncv.tasks import TASKS, find_task


def images(shape=(1, 28, 28), n=4):
    return torch.linspace(-1, 1, n * shape[0] * shape[1] * shape[2], dtype=torch.float64).reshape(n, *shape)


@pytest.mark.parametrize(("side", "flat"), [(28, 256), (32, 400), (64, 2704)])
def test_lenet5_is_the_one_of_the_protocol(side, flat):
    shapes = {name: tuple(p.shape) for name, p in LeNet5((3, side, side), 10).named_parameters()}
    weights = [shape for name, shape in shapes.items() if name.endswith("weight") and len(shape) > 1]
    assert weights == [(6, 3, 5, 5), (16, 6, 5, 5), (120, flat), (84, 120), (10, 84)]
    assert sum(len(shape) == 1 for shape in shapes.values()) == 5 + 2 * 2  # five biases, two BatchNorms


def test_the_head_comes_last_and_the_slices_cover_everything():
    model = Model(LeNet5, images(), 10, seed=0)
    layout = model.layout
    assert (layout.body.start, layout.body.stop) == (0, layout.head.start)
    assert layout.head.stop - layout.head.start == 84 * 10 + 10
    assert layout.num_parameters == len(model.start_P)
    assert layout.names[-2:] == ("head.weight", "head.bias")
    assert len(model.start_R) == 2 * (6 + 16)


def test_a_head_in_the_middle_of_the_module_is_moved_to_the_end():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 2)
            self.stem = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.stem(x))

    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    model = Model(lambda _s, _o: Odd(), x, 2, seed=1)
    assert model.layout.names == ("stem.weight", "stem.bias", "head.weight", "head.bias")
    module = Odd()
    module.load_state_dict(model.state_dict(model.start_P, model.start_R))
    output, _ = model.forward(model.start_P, model.start_R, x, mode="eval")
    assert torch.equal(output.logits_BC, module(x))
    assert torch.equal(output.features_BF, module.stem(x))
    assert torch.equal(model.head(model.start_P, output.features_BF), output.logits_BC)


def test_gradients_and_running_statistics_are_the_plain_modules():
    x, y = images(), torch.tensor([0, 1, 2, 3])
    model = Model(LeNet5, x, 10, seed=3)
    module = LeNet5((1, 28, 28), 10).double()
    module.load_state_dict(model.state_dict(model.start_P, model.start_R))
    loss = F.cross_entropy(module.train()(x), y)
    loss.backward()
    leaf = model.start_P.clone().requires_grad_()
    output, moved_R = model.forward(leaf, model.start_R, x, mode="train")
    (g_P,) = torch.autograd.grad(F.cross_entropy(output.logits_BC, y), leaf)
    plain = {name: p.grad for name, p in module.named_parameters()}
    ours = model.layout.unflatten(g_P, moved_R)
    for name, gradient in plain.items():
        assert_close(ours[name], gradient, rtol=1e-12, atol=1e-14)
    for name in model.layout.buffer_names:
        assert_close(ours[name], module.get_buffer(name), rtol=1e-12, atol=1e-14)


def test_modes_decide_what_moves():
    x = images()
    model = Model(LeNet5, x, 10, seed=0)
    start_P, start_R = model.start_P.clone(), model.start_R.clone()
    train_out, moved = model.forward(start_P, start_R, x, mode="train")
    still_out, still = model.forward(start_P, start_R, x, mode="still")
    eval_out, kept = model.forward(start_P, start_R, x, mode="eval")
    assert torch.equal(train_out.logits_BC, still_out.logits_BC)
    assert not torch.equal(train_out.logits_BC, eval_out.logits_BC)
    assert not torch.equal(moved, start_R)
    assert torch.equal(still, start_R)
    assert torch.equal(kept, start_R)
    assert torch.equal(start_R, model.start_R)


def test_dropout_is_keyed_and_scaled():
    x = torch.ones(1000, 4, dtype=torch.float64)
    model = Model(lambda _s, _o: nn.Sequential(nn.Dropout(0.25), nn.Linear(4, 1, bias=False)), x, 1, seed=0)
    ones = torch.ones_like(model.start_P)

    def out(key):
        return model.forward(ones, model.start_R, x, mode="train", key=key)[0].logits_BC

    assert torch.equal(out(key_for(0, "a")), out(key_for(0, "a")))
    assert not torch.equal(out(key_for(0, "a")), out(key_for(0, "b")))
    kept = out(key_for(0, "a")).mean() / 4  # each input is 1/(1-p) with probability 1-p: mean 1, variance p/(1-p)
    assert abs(kept - 1) < 5 * (0.25 / 0.75 / 4000) ** 0.5
    assert torch.equal(model.forward(ones, model.start_R, x, mode="eval")[0].logits_BC, torch.full_like(x[:, :1], 4))


def test_the_initial_model_is_a_function_of_the_seed():
    assert torch.equal(Model(LeNet5, images(), 10, seed=1).start_P, Model(LeNet5, images(), 10, seed=1).start_P)
    assert not torch.equal(Model(LeNet5, images(), 10, seed=1).start_P, Model(LeNet5, images(), 10, seed=2).start_P)


def test_batchnorm_over_single_values_needs_two_samples():
    assert Model(Tiny, torch.randn(3, 4, generator=torch.Generator()), 2, seed=0).smallest_batch == 2
    assert Model(LeNet5, images(), 10, seed=0).smallest_batch == 1


class Noisy(nn.Linear):
    """Draws in a pass from a generator that is not keyed."""

    def __init__(self, draw):
        super().__init__(4, 2)
        self.draw = draw

    def forward(self, x):
        return super().forward(x) * float(self.draw())


class Counting(nn.Linear):
    def __init__(self, *_):
        super().__init__(4, 2)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        self.seen += len(x)
        return super().forward(x)


class Returning(nn.Linear):
    """Return what ``wrap`` makes of the outputs, in training or afterwards."""

    def __init__(self, wrap, *, training):
        super().__init__(4, 2)
        self.wrap, self.when = wrap, training

    def forward(self, x):
        outputs = super().forward(x)
        return self.wrap(outputs) if self.training == self.when else outputs


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            lambda *_: Returning(lambda x: (x, x), training=True),
            "returns tuple, not a tensor; return the outputs alone",
        ),
        (lambda *_: Returning(lambda x: (x, x), training=False), "returns tuple, not a tensor"),
        (
            lambda *_: Returning(lambda x: SimpleNamespace(logits=x), training=True),
            "returns SimpleNamespace, not a tensor; wrap it with fedncv.models.Logits",
        ),
        (nn.Linear(4, 2), r"is a module \(Linear\); give a function.*: lambda shape, outputs: Linear\(...\)"),
        (lambda *_: nn.Sequential(nn.Linear(4, 2), nn.RReLU()), "its own random numbers"),
        (lambda *_: Noisy(random.random), "its own random numbers"),
        (lambda *_: Noisy(np.random.rand), "its own random numbers"),
        (lambda *_: Noisy(lambda: torch.rand(())), "its own random numbers"),
        (Counting, "'seen' .*changes in training"),
        (lambda *_: nn.Flatten(), "no parameters"),
        (lambda *_: nn.Linear(5, 2), "rejects an input of shape .4,."),
        (lambda *_: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, momentum=None)), "momentum=None"),
        (LeNet5, "images of at least 16x16, .*; try mlp, or char_lstm for token ids"),
    ],
)
def test_models_that_could_not_repeat_or_fit_are_refused(factory, message):
    with pytest.raises(ValueError, match=message):
        Model(factory, torch.ones(3, 4), 2, seed=0)


def test_an_offset_goes_into_the_heads_bias():
    x = images()
    model = Model(MODELS["mlp"], x, 3, seed=0)
    offset = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    module = copy.deepcopy(MODELS["mlp"]((1, 28, 28), 3)).double()
    module.load_state_dict(model.state_dict(model.start_P, model.start_R, offset))
    output, _ = model.forward(model.start_P, model.start_R, x, mode="eval")
    assert_close(module(x), output.logits_BC + offset)


def test_models_and_tasks_are_found_by_name_or_by_path():
    assert find_model("lenet5") is LeNet5
    assert find_model("fedncv.models:MLP") is MODELS["mlp"]
    assert find_task("classification") is TASKS["classification"]
    for find in (find_model, find_task):
        for name in ("lenet6", "nowhere:x", "fedncv.models:x"):
            with pytest.raises(ValueError, match=name):
                find(name)
    with pytest.raises(ValueError, match="is type, not a"):
        find_task("fedncv.models:MLP")


class Reused(nn.Module):
    """One dropout layer, used twice and known under two names."""

    def __init__(self, *_):
        super().__init__()
        self.first = self.second = nn.Dropout(0.5)
        self.linear = nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.linear(self.first(torch.ones_like(x)) - self.second(torch.ones_like(x))) * self.scale


def test_a_dropout_layer_used_twice_draws_twice():
    x = torch.ones(50, 4, dtype=torch.float64)
    model = Model(Reused, x, 4, seed=0)
    output, _ = model.forward(model.start_P, model.start_R, x, mode="train", key=key_for(0, "a"))
    assert output.logits_BC.abs().max() > 0


def test_constant_buffers_are_exported():
    model = Model(Reused, torch.ones(2, 4), 4, seed=0)
    Reused().load_state_dict(model.state_dict(model.start_P, model.start_R))


def test_a_normalised_head_trains():
    """weight_norm works through a hook on the head: it must stay."""

    def factory(_shape, outputs):
        return nn.Sequential(nn.Linear(4, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, outputs)))

    x = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)
    model = Model(factory, x, 2, seed=0)
    leaf = model.start_P.clone().requires_grad_()
    output, _ = model.forward(leaf, model.start_R, x, mode="train")
    (g_P,) = torch.autograd.grad(output.logits_BC.square().sum(), leaf)
    assert all(part.abs().max() > 0 for part in model.layout.unflatten(g_P, model.start_R).values())


@pytest.mark.parametrize("head", [lambda: nn.Linear(4, 3), lambda: nn.Sequential(nn.ReLU(), nn.Linear(4, 3))])
def test_an_offset_finds_the_bias_of_any_head(head):
    class Headed(nn.Module):
        def __init__(self, *_):
            super().__init__()
            self.head = head()

        def forward(self, x):
            return self.head(x)

    model = Model(Headed, torch.ones(2, 4), 3, seed=0)
    offset = torch.tensor([1.0, 2.0, 3.0])
    plain, shifted = (model.state_dict(model.start_P, model.start_R, o) for o in (None, offset))
    (name,) = [n for n in plain if n.endswith("bias")]
    assert_close(shifted[name] - plain[name], offset)


def refuse_to_work(*_):
    raise TypeError("no")


@pytest.mark.parametrize(
    ("factory", "message"),
    [(refuse_to_work, "the model's function failed .TypeError: no"), (lambda *_: 3, "returned int, not a torch")],
)
def test_a_function_that_makes_no_model_is_named(factory, message):
    with pytest.raises(ValueError, match=message):
        Model(factory, torch.ones(3, 4), 2, seed=0)


class Tied(nn.Module):
    """f(x) = W W x: one matrix under two names."""

    def __init__(self, _shape, _outputs):
        super().__init__()
        self.first, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.first.weight = self.head.weight

    def forward(self, x):
        if x.shape[0] == 3:
            raise RuntimeError("no three")
        return self.head(self.first(x))


def test_a_tied_parameter_is_one_and_stands_in_all_its_places():
    x_BF = torch.eye(2, dtype=torch.float64)
    model = Model(Tied, x_BF, 2, seed=0)
    w_P = torch.tensor([1.0, 2.0, 0.0, 3.0], dtype=torch.float64)
    assert len(model.start_P) == 4
    logits = model.forward(w_P, model.start_R, x_BF, mode="eval")[0].logits_BC
    assert_close(logits.T, torch.tensor([[1.0, 8.0], [0.0, 9.0]], dtype=torch.float64))  # W^2


@pytest.mark.parametrize("samples", [2, 3])
def test_a_pass_leaves_the_modules_own_parameters_in_place_even_when_it_fails(samples):
    model = Model(Tied, torch.eye(2, dtype=torch.float64), 2, seed=0)
    own = list(model._module.parameters())
    with contextlib.suppress(RuntimeError):
        model.forward(model.start_P + 1, model.start_R, torch.ones(samples, 2, dtype=torch.float64), mode="eval")
    assert all(a is b for a, b in zip(model._module.parameters(), own, strict=True))
    assert model._module.first.weight is model._module.head.weight


@pytest.mark.parametrize("draw", [random.gauss, np.random.normal])
def test_the_second_of_a_pair_of_normal_draws_is_noticed_too(draw):
    """Both generators make two at a time and keep one, so that the next draw leaves their words as they are."""
    draw(0, 1)
    with pytest.raises(ValueError, match="its own random numbers"):
        Model(lambda *_: Noisy(lambda: draw(0, 1)), torch.ones(2, 4), 2, seed=0)


def test_weights_drawn_with_python_or_numpy_follow_the_seed_and_leave_the_callers_generators_alone():
    def factory(*_):
        layer = nn.Linear(4, 2)
        with torch.no_grad():
            layer.bias.copy_(torch.tensor([random.random(), np.random.rand()]))
        return layer

    before = random.getstate(), np.random.get_state()[1].tolist()
    a, b, other = (Model(factory, torch.ones(2, 4), 2, seed=seed).start_P for seed in (3, 3, 4))
    assert torch.equal(a, b)
    assert not (a == other)[-2:].any()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
