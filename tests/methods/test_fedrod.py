"""FedRoD: both losses' gradients by hand, what travels, and what neither head's loss may reach."""

import pytest
import torch
from federations import everyone, inside, tiny, train, vector
from torch import nn
from torch.testing import assert_close

from fedncv.engine import evaluate
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals
from fedncv.export import export
from fedncv.methods import find_method
from fedncv.methods.base import Batch
from fedncv.methods.fedavg import Down
from fedncv.methods.fedrod import log_frequencies


class Scaled(nn.Module):
    """Features z = w x, and a head of one weight per class."""

    def __init__(self, shape, num_classes):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(shape[0], num_classes, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        return self.head(self.w * x)


def gradient(text, *, w, generic, personal, x, label, counts):
    """The direction on (w, generic head, personal head), for one sample x and two classes."""
    problem = tiny(text, model=Scaled, inputs=torch.zeros(60, 1, dtype=torch.float64))
    ask = problem.ask(0, problem.model.start_R, 0)
    object.__getattribute__(ask, "__dict__")["client"] = ask.client._replace(label_counts_C=vector(*counts))
    y = vector(w, *generic, *personal)
    batch = Batch(vector(x)[None], torch.tensor([label]), torch.ones(1, dtype=torch.float64), 0)
    g, _ = problem.method.direction(ask, y, batch, Down(y[:4]), y[4:], ())
    return g


def softmax(*logits):
    return torch.softmax(vector(*logits), 0)


def test_the_three_gradients_by_hand():
    """Generic: p = softmax(g + log pi) - onehot, on the head p z, on w (p . head) x.  Personal: q = softmax(g + f) -
    onehot, on its head q z, and nowhere else."""
    generic, personal, counts, w, x = (1.0, -1.0, 0.5), (0.2, 0.4, -0.3), (1.0, 2.0, 5.0), 2.0, 1.5
    z, onehot = w * x, vector(1, 0, 0)
    logits = [z * each for each in generic]
    both = [a + z * b for a, b in zip(logits, personal, strict=True)]
    p = softmax(*(a + float(torch.tensor(n / 8).log()) for a, n in zip(logits, counts, strict=True))) - onehot
    q = softmax(*both) - onehot
    g = gradient("fedrod", w=w, generic=generic, personal=personal, x=x, label=0, counts=counts)
    assert_close(g, torch.cat([(p @ vector(*generic) * x)[None], p * z, q * z]), rtol=1e-6, atol=1e-6)


def test_gamma_is_the_exponent_of_the_frequencies():
    """gamma = 2: softmax(g + 2 log pi) is softmax(g) with odds multiplied by pi squared; here g = 0."""
    g = gradient("fedrod:gamma=2", w=1, generic=(0, 0, 0), personal=(0, 0, 0), x=1, label=0, counts=(1, 2, 3))
    assert_close(g[1:4], vector(1 / 14 - 1, 4 / 14, 9 / 14))
    assert_close(g[4:], vector(1 / 3 - 1, 1 / 3, 1 / 3))  # no prior in the personal loss


def test_the_personal_loss_reaches_neither_the_body_nor_the_generic_head():
    """Another personal head changes its own gradient alone, to the last bit."""
    known = {"w": 2, "generic": (1, -1, 0), "x": 1.5, "label": 1, "counts": (3, 1, 1)}
    one, other = (gradient("fedrod", personal=each, **known) for each in ((0, 0, 0), (3, -2, 1)))
    assert torch.equal(one[:4], other[:4])
    assert (one[4:] - other[4:]).abs().min() > 0.001


def test_absent_classes_are_left_out_and_give_numbers():
    g = gradient("fedrod", w=1, generic=(0, 0, 9), personal=(0, 0, 0), x=1, label=0, counts=(1, 3, 0))
    assert_close(g[1:4], vector(1 / 4 - 1, 3 / 4, 0))
    assert log_frequencies(vector(0, 0)).tolist() == [0, 0]  # targets that are not classes


def test_the_personal_head_stays_and_the_message_is_as_long_as_fedavgs():
    problem = tiny("fedrod")
    (arrival,) = arrivals(problem, train(problem), everyone(1).ids)
    trained = train_client(problem, 1, arrival)
    num = problem.model.layout.num_parameters
    assert trained.up.delta_P.shape == arrival.down.x_P.shape == (num,)
    assert torch.equal(trained.kept.own, trained.y_P[num:])
    assert not torch.equal(trained.kept.own, arrival.kept.own)
    assert trained.gradients == trained.samples  # one gradient of both losses


def test_a_client_predicts_with_both_heads_and_without_a_prior():
    """With a personal head of its own, the scores are those of the summed heads: the head is linear."""
    problem = tiny("fedrod")
    state = train(problem, rounds=2)
    (arrival,) = arrivals(problem, state, everyone(1).ids)
    layout = problem.model.layout
    summed = arrival.down.x_P.clone()
    summed[layout.head] += arrival.kept.own
    used = evaluate.received(problem, 2, arrival)
    assert used.offset_C is None
    x = problem.dataset.inputs(torch.arange(60), problem.dtype)
    output, _ = problem.model.forward(used.x_P, used.buffers_R, x, mode="eval")
    expected, _ = problem.model.forward(summed, used.buffers_R, x, mode="eval")
    assert_close(evaluate.decided(problem.method, problem.model, used, output), expected.logits_BC)
    assert not torch.allclose(output.logits_BC, expected.logits_BC)


def test_the_shared_model_is_the_generic_one_and_a_clients_own_is_not_exported():
    problem = tiny("fedrod")
    state = train(problem)
    assert torch.equal(problem.method.shared(state.server), state.server.x_P)
    assert len(export(problem, state)) > 0
    with pytest.raises(ValueError, match=r"predicts with more than a model.*leave --client out for the shared model"):
        export(problem, state, client=1)


def test_a_drift_correction_is_for_the_shared_part():
    """One step without momentum: what the memory holds is the mean gradient of body and generic head."""
    problem = tiny("fedrod+drift", epochs=1, batch_size=64)
    state = train(problem)
    assert inside(state.server, "c")[0].shape == problem.model.start_P.shape
    train(problem, state=state)


def test_refuses_what_it_contains_and_negative_exponents():
    with pytest.raises(ValueError, match=r"leave .prior out: fedrod balances"):
        find_method("fedrod+prior")
    with pytest.raises(ValueError, match=r"leave .blend out: fedrod keeps"):
        find_method("fedrod+blend")
    with pytest.raises(ValueError, match="gamma must be at least 0 and finite, not -1"):
        find_method("fedrod:gamma=-1")
