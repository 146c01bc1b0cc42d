"""Switches for every shared method: the label prior, even samples, server momentum, and how they go together."""

import math
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from federations import everyone, model_of, quadratics, tiny, train, vector
from torch import nn
from torch.testing import assert_close

from fedncv.engine import evaluate
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.methods import find_method
from fedncv.methods.base import Prediction
from fedncv.methods.fedavg import fedavg
from fedncv.methods.switches import label_prior
from fedncv.methods.switches.label_prior import Config as PriorConfig
from fedncv.methods.switches.label_prior import log_prior, with_prior
from fedncv.methods.switches.through import through
from fedncv.tree import leaves


def linear(shape, num_classes):
    return nn.Linear(shape[0], num_classes)


def test_the_prior_is_the_smoothed_share_of_each_class():
    assert_close(log_prior(torch.tensor([3.0, 0.0, 1.0]), 0.5).exp(), torch.tensor([3.5, 0.5, 1.5]) / 5.5)
    assert torch.isfinite(log_prior(torch.zeros(4), 1.0)).all()


def test_one_step_with_the_prior_is_the_gradient_of_shifted_logits():
    """Linear model, one full batch: dW = (softmax(Wx + b + tau log pi) - onehot(y)) x^T / n, by hand."""
    problem = tiny("fedavg+prior:tau=0.7,epsilon=2", model=linear, batch_size=100, epochs=1, sizes=(20,))
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    rows = problem.clients.train[0]
    x, y = problem.dataset.x[rows], problem.dataset.y[rows]
    counts = torch.bincount(y, minlength=3).double()
    weights = problem.model.layout.unflatten(problem.model.start_P, problem.model.start_R)
    logits = x @ weights["weight"].T + weights["bias"] + 0.7 * ((counts + 2) / (len(y) + 6)).log()
    error = logits.softmax(1) - nn.functional.one_hot(y, 3)
    expected = torch.cat([(error.T @ x / len(x)).flatten(), error.mean(0)])
    up = train_client(problem, 0, arrival).up
    assert_close(up.delta_P, 0.1 * expected, rtol=1e-10, atol=1e-12)


def test_the_prior_is_made_once_a_client_for_all_its_steps(monkeypatch):
    """Four clients of 20 samples, three epochs of five batches each."""
    made = []

    def noted(counts_C, epsilon):
        made.append(counts_C.sum().item())
        return log_prior(counts_C, epsilon)

    problem = tiny("fedncv+samples", sizes=(20, 20, 20, 20), per_round=4, batch_size=3, epochs=3)
    monkeypatch.setattr(label_prior, "log_prior", noted)
    train(problem)
    assert made == [15.0] * 4  # a quarter of the samples is for testing


def test_the_prior_leaves_what_a_method_remembers_between_steps_alone():
    """It changes the loss and nothing else, so that around a memory of batches it is what it is inside."""
    around, inside = (train(tiny(f"fedavg+{text}", epochs=3)) for text in ("samples+prior", "prior+samples"))
    assert torch.equal(model_of(around), model_of(inside))
    assert not torch.equal(model_of(around), model_of(train(tiny("fedavg+prior", epochs=3))))


def test_a_client_predicts_with_its_own_prior_and_sends_none_of_it():
    """On a model of zeros the prediction is the majority class; the message has the fields of the bare method."""
    problem, bare = tiny("fedavg+prior", model=linear), tiny("fedavg", model=linear)
    zero = start(problem)._replace(server=start(problem).server._replace(x_P=torch.zeros_like(problem.model.start_P)))
    measured = evaluate.before(problem, zero)
    for u in range(4):
        counts = np.bincount(problem.dataset.y[problem.clients.train[u]], minlength=3)
        test = problem.dataset.y[problem.clients.test[u]].numpy()
        assert measured["before_clients"][u] == pytest.approx((test == counts.argmax()).mean())
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    assert [p for p, _ in leaves(train_client(problem, 0, arrival).up)] == list(bare.method.reveals)
    assert measured["pooled"] == pytest.approx(
        float((problem.dataset.y[np.concatenate(problem.clients.test)] == 0).double().mean())
    )


@pytest.mark.parametrize("text", ["fedavg+prior:tau=0", "fedavg+momentum:beta=0", "fedavg+samples:alpha=0"])
def test_a_switch_at_zero_is_the_method_to_the_last_bit(text):
    a, b = train(tiny(text), rounds=3), train(tiny("fedavg"), rounds=3)
    assert torch.equal(model_of(a), model_of(b))


def test_momentum_on_fedavg_is_fedavgm():
    a, b = tiny("fedavg+momentum:beta=0.7", per_round=2), tiny("fedavgm:beta=0.7", per_round=2)
    ours, theirs = train(a, rounds=4), train(b, rounds=4)
    assert torch.equal(a.method.shared(ours.server), b.method.shared(theirs.server))


@pytest.mark.parametrize(
    "text",
    [
        "scaffold+prior+momentum",
        "scaffold+even+samples:kind=svrg+prior+momentum",
        "fedprox:mu=0.1+prior",
        "moon+prior",
        "pfedsim:warm_up=1+momentum",
    ],
)
def test_switches_go_together_with_any_shared_method(text):
    problem = tiny(text)
    state = train(problem, rounds=3)
    assert 0 <= evaluate.after(problem, state)["after"] <= 1
    assert torch.isfinite(state.buffers[0] if isinstance(state.buffers, tuple) else state.buffers).all()


def test_momentum_is_refused_where_no_model_is_shared():
    with pytest.raises(ValueError, match="needs a model that all clients share"):
        start(tiny("fedper+momentum"))


def test_a_typo_in_a_switch_gets_the_nearest_name():
    with pytest.raises(ValueError, match="unknown switch 'prio'; did you mean 'prior'"):
        find_method("fedavg+prio")
    assert find_method("fedprox:mu=1e+3")  # a plus in a number is not a switch


def test_with_even_samples_a_smaller_batch_makes_a_smaller_step():
    """Five samples in batches of four, gradients all a (x - b): steps of lr and lr/4, in either order."""
    problem = quadratics("fedavg+even", a=(2.0,), b=(0.0,), sizes=[5], steps=1, lr=0.1, batch_size=4)
    assert float(model_of(train(problem))) == pytest.approx(5 * (1 - 0.2) * (1 - 0.05))
    plain = quadratics("fedavg", a=(2.0,), b=(0.0,), sizes=[5], steps=1, lr=0.1, batch_size=4)
    assert float(model_of(train(plain))) == pytest.approx(5 * 0.8 * 0.8)


def test_a_client_smaller_than_a_batch_makes_whole_steps():
    problem = quadratics("fedavg+even", a=(2.0,), b=(0.0,), sizes=[3], steps=2, lr=0.1, batch_size=4)
    assert float(model_of(train(problem))) == pytest.approx(5 * 0.8**2)


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_knows_how_far_its_even_steps_went(option):
    """Option I: the gradient at x, 2 * 5. Option II: x - y over the sum of its steps, 0.1 (1 + 1/4)."""
    problem = quadratics(f"scaffold:option={option}+even", a=(2.0,), b=(0.0,), sizes=[5], steps=1, lr=0.1, batch_size=4)
    state = train(problem)
    displacement = 5 - float(model_of(state))
    assert float(state.kept[0].own) == pytest.approx(10 if option == "I" else displacement / 0.125)


@pytest.mark.parametrize(
    "text",
    [
        "fedavg+prior+prior",
        "fedncv+prior",
        "fedncv+even",
        "fedncv+momentum",
        "fedncv-sums+momentum",
        "fedavgm+momentum",
    ],
)
def test_a_switch_counts_once(text):
    with pytest.raises(ValueError, match=r"already|twice"):
        find_method(text)


def test_without_labels_the_prior_is_nothing():
    """A regression has no classes: its outputs must not be shifted."""
    assert torch.equal(log_prior(torch.zeros(4), 1.0) + math.log(4), torch.zeros(4))


def test_the_offset_of_predictions_by_hand():
    """tau log(C pi), C = 3, on top of an offset the method has of its own; 0 where there are no labels."""
    config = PriorConfig(tau=0.7, epsilon=0.5)
    own_C = vector(1.0, 2.0, 3.0)
    bare, shifting = fedavg(), fedavg()._replace(predict=lambda _ask, y_P, _down, _own: Prediction(y_P, None, own_C))
    ask = SimpleNamespace(client=SimpleNamespace(label_counts_C=vector(3.0, 0.0, 1.0)), buffers_R=None)
    ask.replace = lambda prior_C: ask
    expected_C = 0.7 * (3 * vector(3.5, 0.5, 1.5) / 5.5).log()
    assert_close(with_prior(bare, config).predict(ask, None, None, ()).offset_C, expected_C)
    assert_close(with_prior(shifting, config).predict(ask, None, None, ()).offset_C, own_C + expected_C)
    unlabelled = SimpleNamespace(client=SimpleNamespace(label_counts_C=torch.zeros(4)), buffers_R=None)
    unlabelled.replace = lambda prior_C: unlabelled
    assert torch.equal(with_prior(bare).predict(unlabelled, None, None, ()).offset_C, torch.zeros(4))


@pytest.mark.parametrize("text", ["prior:tau=-1", "prior:epsilon=0", "momentum:beta=1", "momentum:beta=-0.1"])
def test_knobs_of_switches_out_of_range_are_refused(text):
    name, value = text.partition(":")[2].split("=")
    with pytest.raises(ValueError, match=f"{name} must be .*, not {value}"):
        find_method(f"fedavg+{text}")


def test_a_state_around_the_servers_is_looked_through():
    """The model is set, and what is handed out is made, one level down."""
    Around = namedtuple("Around", "server mine")
    plain = find_method("fedavg+average")
    method = through(plain)
    state = Around(plain.init(torch.zeros(2), None), "mine")
    moved = method.with_model(state, torch.ones(2))
    assert torch.equal(method.model(moved), torch.ones(2))
    assert moved.mine == "mine"
    ids_S = torch.arange(3)
    assert torch.equal(method.hand_out(moved, ids_S).x_P, plain.hand_out(moved.server, ids_S).x_P)


@pytest.mark.parametrize("knob", ["tau", "epsilon"])
def test_an_infinite_prior_is_refused(knob):
    with pytest.raises(ValueError, match=f"{knob} must be .* finite, not inf"):
        PriorConfig(**{knob: math.inf})
