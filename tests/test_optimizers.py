"""Local optimizers: torch.optim's numbers, in every engine, and only for methods whose algebra allows them."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from agreement import HARD, QUICK, close, close_rows
from federations import Tiny, everyone, model_of, quadratics, tiny, tiny_dataset, train
from torch import nn
from torch.testing import assert_close

import fedncv
from fedncv.cli import main
from fedncv.engine.local import plan
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.engine.processes import ProcessesEngine, can_fork
from fedncv.engine.sequential import run_round
from fedncv.engine.stacked import StackedEngine
from fedncv.keys import key_for
from fedncv.methods import METHODS, SWITCHES, find_method
from fedncv.optimizers import Optimizer, find_optimizer, sgd
from fedncv.tree import all_finite

PAGE = Path(__file__).parents[1] / "docs" / "optimizers.md"
LIKE_TORCH = [
    ("sgd", {"momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
    ("adam", {}, torch.optim.Adam, {}),
    ("adam:beta1=0.5,beta2=0.9,eps=0.1", {}, torch.optim.Adam, {"betas": (0.5, 0.9), "eps": 0.1}),
    ("adamw", {}, torch.optim.AdamW, {}),
    ("adamw:beta1=0,beta2=0.5", {}, torch.optim.AdamW, {"betas": (0.0, 0.5)}),
    ("rmsprop", {}, torch.optim.RMSprop, {}),
    ("rmsprop:alpha=0.8,eps=0.01,momentum=0.5", {}, torch.optim.RMSprop, {"alpha": 0.8, "eps": 0.01, "momentum": 0.5}),
    ("adagrad", {}, torch.optim.Adagrad, {}),
    ("adagrad:eps=0.1,initial=2", {}, torch.optim.Adagrad, {"eps": 0.1, "initial_accumulator_value": 2.0}),
]
# The gradient of a bias before BatchNorm is rounding error; divided by eps = 1e-8 it would be above 1e-10.
OTHERS = ["adamw:eps=1e-3", "adam:eps=1e-3", "rmsprop:eps=1e-3,momentum=0.5", "adagrad:eps=1e-3"]
QUICK_METHODS = {"fedgen": QUICK["fedgen"]}
NEED_SGD = {"fedncv", "fedncv-sums", "fednova", "scaffold", "fat_clipping_pr", "quasi_global"}
# Few stragglers: those of FedRep never reach the second phase.
UNEQUAL = {name: value for name, value in HARD.items() if name != "momentum"} | {"lr": 0.01, "stragglers": 0.1}


class NoDropout(Tiny):
    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.body[3] = nn.Identity()


# ---- torch's numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("text", "settings", "theirs", "knobs"), LIKE_TORCH, ids=lambda each: str(each)[:40])
def test_every_step_is_the_one_of_torch(text, settings, theirs, knobs, weight_decay):
    gradients = torch.from_numpy(np.random.default_rng(0).normal(size=(7, 5)))
    ours = find_optimizer(text, weight_decay=weight_decay, **settings)
    y_P = torch.linspace(-1, 2, 5, dtype=torch.float64)
    parameter = nn.Parameter(y_P.clone())
    optimizer = theirs([parameter], lr=0.05, weight_decay=weight_decay, **knobs)
    state = ours.init(y_P)
    for g_P in gradients:
        y_P, state = ours.update(g_P, state, y_P, 0.05)
        parameter.grad = g_P.clone()
        optimizer.step()
        assert_close(y_P, parameter.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("text", ["adam", "adamw"])
def test_a_first_step_in_single_precision_is_torchs_too(text):
    """1 - 0.999 in single precision is wrong in the fifth digit."""
    ours, y_P, g_P = find_optimizer(text), torch.zeros(3), torch.tensor([1.0, -2.0, 1e-3])
    parameter = nn.Parameter(y_P.clone())
    parameter.grad = g_P.clone()
    torch.optim.Adam([parameter], lr=0.1).step()
    assert_close(ours.update(g_P, ours.init(y_P), y_P, 0.1)[0], parameter.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("text", "theirs"), [("adamw:eps=1e-3", torch.optim.AdamW), ("rmsprop:eps=1e-3", torch.optim.RMSprop)]
)
def test_a_clients_training_equals_a_plain_torch_loop(text, theirs):
    problem = tiny("fedavg", model=NoDropout, optimizer=text, weight_decay=0.01, epochs=2, lr=0.02)
    (arrival,) = arrivals(problem, start(problem), everyone(1).ids)
    trained = train_client(problem, 0, arrival)
    module = NoDropout((4,), 3).double()
    module.load_state_dict(problem.model.state_dict(problem.model.start_P, problem.model.start_R))
    optimizer = theirs(module.parameters(), lr=0.02, weight_decay=0.01, eps=1e-3)
    mine = torch.from_numpy(problem.clients.train[1])
    x, y = problem.dataset.x[mine], problem.dataset.y[mine]
    for step in plan(problem.method, key_for(0, "batches", 0, 1), len(mine), epochs=2, batch_size=4, smallest=2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module.train()(x[step.rows]), y[step.rows]).backward()
        optimizer.step()
    expected = module.state_dict()
    for name, value in problem.model.layout.unflatten(trained.y_P, trained.buffers_R).items():
        assert_close(value, expected[name], rtol=1e-10, atol=1e-10)


def test_state_begins_anew_every_round():
    """Adam's first step has the length lr whatever the gradient; a second one, with moments kept, would not."""
    problem = quadratics("fedavg", a=(1.0,), b=(0.0,), steps=1, lr=0.5, optimizer="adam")
    assert float(train(problem, rounds=4).server.x_P) == pytest.approx(5 - 4 * 0.5, abs=1e-6)


# ---- engines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", OTHERS)
@pytest.mark.parametrize("method", ["fedavg", "fedrep"])
def test_stacked_rounds_equal_the_sequential_engine(text, method):
    problem = tiny(method, optimizer=text, **UNEQUAL)
    engine, state = StackedEngine([problem]), start(problem)
    stacked = state
    for _ in range(2):
        state, row = run_round(problem, state)
        ((stacked, stacked_row),) = engine.run_rounds([stacked])
        close(stacked, state)
        close_rows(stacked_row, row)


def test_stacked_runs_have_learning_rates_of_their_own():
    problems = [tiny("fedavg", optimizer="adamw:eps=1e-3", weight_decay=0.1, lr=lr) for lr in (0.01, 0.002)]
    settled = StackedEngine(problems).run_rounds([start(problem) for problem in problems])
    for problem, (state, _) in zip(problems, settled, strict=True):
        close(state, run_round(problem, start(problem))[0])


@pytest.mark.skipif(not can_fork(), reason="workers are forked")
def test_processes_have_the_bits_of_the_sequential_engine():
    problem = tiny("fedavg", optimizer="adamw", **UNEQUAL)
    with ProcessesEngine([problem], workers=2) as engine:
        ((state, row),) = engine.run_rounds([start(problem)])
    expected, expected_row = run_round(problem, start(problem))
    assert row == expected_row
    assert torch.equal(model_of(state), model_of(expected))


def test_a_frozen_slice_keeps_its_bits_with_weight_decay_and_moments():
    """The head is trained first, then the body: with the body frozen, its weight decay must not move it."""
    method = find_method("fedrep")
    head_first = method.phases(2)[:1]
    problem = tiny(method._replace(phases=lambda _epochs: head_first), optimizer="adamw", weight_decay=0.5)
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    y_P = train_client(problem, 0, arrival).y_P
    layout, start_P = problem.model.layout, problem.model.start_P
    assert torch.equal(y_P[layout.body], start_P[layout.body])
    assert not torch.equal(y_P[layout.head], start_P[layout.head])


def test_an_optimizer_sees_no_gradient_of_a_frozen_slice():
    """One that divides by the norm of the gradient steps by lr in the slice that is trained."""
    unit = Optimizer(lambda y_P: (), lambda g_P, state, y_P, lr: (y_P - lr * g_P / g_P.norm(), state))
    method = find_method("fedrep")
    one_phase = method.phases(2)[:1]
    problem = tiny(method._replace(phases=lambda _epochs: one_phase), sizes=(5, 5), epochs=1, lr=0.3)
    problem = problem._replace(optimizer=unit)
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    moved = train_client(problem, 0, arrival).y_P - problem.model.start_P
    assert float(moved.norm()) == pytest.approx(0.3)


# ---- methods that need SGD -----------------------------------------------------------------------------


def test_methods_and_switches_that_need_sgd_are_those_whose_formulas_do():
    assert {name for name, entry in METHODS.items() if entry.make().needs_sgd} == NEED_SGD
    assert {name for name in SWITCHES if find_method(f"fedavg+{name}").needs_sgd} == {"drift", "even"}
    assert not find_method("scaffold:option=I").needs_sgd
    assert not find_method("fedncv:drift=off,even=off").needs_sgd


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name not in NEED_SGD])
def test_other_methods_never_read_the_sum_of_step_lengths(name):
    """It is NaN with Adam, and would make everything NaN."""
    problem = tiny(QUICK_METHODS.get(name, name), optimizer="adam", lr=0.01)
    state = train(problem, rounds=2)
    assert all_finite(state.server)
    assert all_finite(tuple(state.kept[u] for u in state.kept))


@pytest.mark.parametrize("name", [*sorted(NEED_SGD), "fedavg+drift:memory=clients", "moon+even+prior+average"])
def test_a_method_that_needs_sgd_refuses_others_and_says_why(name):
    small = {"data": tiny_dataset(60), "model": Tiny, "clients": 3, "per_round": 1}
    with pytest.raises(ValueError, match=f"{re.escape(name)} needs optimizer=sgd, not adam: .* (SGD|gradient)"):
        fedncv.simulate(method=name, optimizer="adam")
    with pytest.raises(ValueError, match="method needs optimizer=sgd, not optimizer: "):
        fedncv.simulate(method=find_method(name), optimizer=find_optimizer("adam"), **small)


def test_an_optimizer_with_a_total_step_is_as_good_as_sgd():
    """Plain SGD as an optimizer of one's own: the same bits of SCAFFOLD."""
    own = quadratics("scaffold")._replace(optimizer=sgd())
    assert torch.equal(model_of(train(own, rounds=3)), model_of(train(quadratics("scaffold"), rounds=3)))
    fedncv.simulate(method="scaffold", optimizer=sgd(), model="mlp", clients=5, per_round=2, rounds=1, epochs=1)


# ---- one's own, and bad input --------------------------------------------------------------------------


def test_the_page_s_own_optimizer_runs_and_stacks(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    there = {}
    exec(code, there)
    assert there["result"].problem.config.optimizer.startswith("custom:lion#")
    problem = tiny("fedavg", lr=0.01)._replace(optimizer=there["lion"]())
    ((state, _),) = StackedEngine([problem]).run_rounds([start(problem)])
    assert all_finite(state.server)  # not compared: a sign of Lion may turn with the last digit
    assert not torch.equal(model_of(state), problem.model.start_P)
    (tmp_path / "named_lion.py").write_text(code.partition("\n\nresult")[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    options = [
        "--model",
        "mlp",
        "--clients",
        "5",
        "--per-round",
        "2",
        "--rounds",
        "1",
        "--epochs",
        "1",
        "--out",
        "runs",
    ]
    assert main(["run", "--optimizer", "named_lion:lion:beta1=0.8", "--lr", "0.001", *options]) == 0
    assert 'optimizer = "named_lion:lion:beta1=0.8"' in (tmp_path / "runs" / "fedavg-seed0" / "config.toml").read_text()


def test_a_run_with_an_optimizer_of_ones_own_is_resumed_with_it(tmp_path):
    quick = {"model": Tiny, "data": tiny_dataset(60), "clients": 3, "per_round": 2, "epochs": 1, "rounds": 2}
    fedncv.simulate(out=tmp_path / "run", optimizer=find_optimizer("adam"), **quick)
    with pytest.raises(ValueError, match=r"objects of your own \(optimizer\); pass them again"):
        fedncv.resume(tmp_path / "run", data=quick["data"], model=Tiny)
    resumed = fedncv.resume(tmp_path / "run", data=quick["data"], model=Tiny, optimizer=find_optimizer("adam"))
    assert len(resumed.rows) == 3


WRONG = [
    (Optimizer(lambda y: 0, lambda g, s, y, lr: (y, s)), "init returns a state with a int; a state is made of tensors"),
    (Optimizer(lambda y: (), lambda g, s, y, lr: y), r"update\(g_P, state, y_P, lr\) fails .* it returns \(y_P, state"),
    (Optimizer(lambda y: (), lambda g, s: (g, s)), r"update\(g_P, state, y_P, lr\) fails"),
    (Optimizer(lambda y: y, lambda g, s, y, lr: (y, ())), "update returns nothing for state"),
    (Optimizer(lambda y: y, lambda g, s, y, lr: (y[:1], s)), r"update returns y_P \(1,\) torch.float32 for y_P"),
    (Optimizer(lambda y: y, lambda g, s, y, lr: (y, s.double())), "update returns state .* torch.float64 for state"),
]


@pytest.mark.parametrize(("optimizer", "message"), WRONG)
def test_an_optimizer_that_returns_the_wrong_thing_is_refused(optimizer, message):
    with pytest.raises(ValueError, match=f"optimizer 'optimizer': {message}"):
        fedncv.simulate(optimizer=optimizer, model="mlp")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "adamm"}, "unknown optimizer 'adamm'; did you mean 'adam'.* package.module:function"),
        ({"optimizer": "adam:beta3=1"}, "optimizer 'adam' has no knob 'beta3' .it has beta1, beta2, eps"),
        ({"optimizer": "adam:beta1=1"}, "optimizer 'adam:beta1=1': beta1 must be at least 0 and below 1, not 1.0"),
        ({"optimizer": "rmsprop:eps=0"}, "eps must be above 0 and finite, not 0.0"),
        ({"optimizer": "adagrad:initial=-1"}, "initial must be at least 0 and at most 1e30, not -1.0"),
        ({"optimizer": "sgd:momentum=0.9"}, "sgd has no knobs; use the settings momentum and weight_decay"),
        (
            {"optimizer": "adam", "momentum": 0.9},
            "momentum 0.9 is a setting of sgd, not of adam; beta1 is its momentum",
        ),
        ({"optimizer": "rmsprop", "momentum": 0.9}, "use rmsprop:momentum=0.9"),
        ({"optimizer": "adagrad", "momentum": 0.9}, "leave momentum at 0"),
        ({"optimizer": "nowhere.at:all"}, "optimizer 'nowhere.at:all': there is no module"),
        ({"optimizer": "fedncv.tasks:TASKS"}, "is dict, not a fedncv.Optimizer"),
        ({"optimizer": sgd(), "weight_decay": 0.1}, "weight_decay is 0.1, but an optimizer of your own has its own"),
    ],
)
def test_bad_input_is_refused_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        fedncv.simulate(**settings)
    assert "\n" not in str(caught.value)
