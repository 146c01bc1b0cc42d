"""FedLC: logits lowered by tau n^(-1/4): 16 samples by tau/2, one by tau, 10^-8 (none) by 100 tau."""

from types import SimpleNamespace

import pytest
import torch
from federations import everyone, tiny, vector
from torch.testing import assert_close

from fedncv.engine.problem import arrivals, start
from fedncv.methods import find_method
from fedncv.methods.base import Batch


def offset(text, *counts):
    """What the method adds to the logits of a client with these samples of each class."""
    asked = []
    ask = SimpleNamespace(
        client=SimpleNamespace(label_counts_C=vector(*counts)),
        grad=lambda _y_P, _batch, *, offset_C: asked.append(offset_C),
    )
    find_method(text).direction(ask, None, None, None, (), ())
    return asked[0]


def test_the_offset_by_hand():
    assert_close(offset("fedlc:tau=2", 16.0, 1.0, 81.0), vector(-1.0, -2.0, -2 / 3))


def test_an_absent_class_has_a_value():
    assert_close(offset("fedlc", 16.0, 0.0), vector(-0.5, -100.0))
    assert_close(offset("fedlc:absent=1", 16.0, 0.0), vector(-0.5, -1.0))


def test_an_absent_class_is_left_alone():
    """Its share of the softmax is e^-100, so neither its bias nor its weights move; in FedAvg they do."""
    problem = tiny("fedlc")
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    counts_C = problem.client(0).label_counts_C
    (absent, *_) = (counts_C == 0).nonzero().flatten().tolist()
    index = torch.from_numpy(problem.clients.train[0])
    batch = Batch(problem.dataset.x[index], problem.dataset.y[index], torch.ones(len(index)), 0)
    ask = problem.ask(0, arrival.buffers_R, 0)
    head = problem.model.layout.head
    for text, moves in (("fedlc", False), ("fedavg", True)):
        g_P, _ = find_method(text).direction(ask, arrival.down.x_P, batch, arrival.down, (), ())
        bias_C = g_P[head][-problem.dataset.num_classes :]
        assert (bias_C[absent].abs() > 1e-3) == moves
        assert bias_C[counts_C > 0].abs().min() > 1e-3


def test_predictions_are_not_calibrated():
    ask = SimpleNamespace(buffers_R=None)
    assert find_method("fedlc").predict(ask, vector(1.0), None, ()).offset_C is None


@pytest.mark.parametrize("text", ["tau=-1", "absent=0"])
def test_values_out_of_range_are_refused(text):
    name, value = text.split("=")
    with pytest.raises(ValueError, match=f"{name} must be .*, not {value}"):
        find_method(f"fedlc:{text}")


def test_without_strength_nothing_is_added():
    assert_close(offset("fedlc:tau=0", 16.0, 0.0), vector(0.0, 0.0))
