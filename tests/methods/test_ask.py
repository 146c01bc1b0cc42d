"""The contract's own arithmetic: weights, sums, and what an Ask counts and differentiates."""

import pytest
import torch
from federations import tiny, vector
from torch import nn
from torch.testing import assert_close

from fedncv.keys import key_for
from fedncv.methods.base import (
    Ask,
    Batch,
)


class Follows(nn.Module):
    """A running statistic that depends on the parameters."""

    def __init__(self, shape, num_classes):
        super().__init__()
        self.head = nn.Linear(shape[0], num_classes)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        logits = self.head(x)
        self.mean.copy_(logits.mean())
        return logits


def asked(weights=(1, 1, 1, 1), **settings):
    problem = tiny("fedavg", **settings)
    index = torch.from_numpy(problem.clients.train[0][:4])
    batch = Batch(problem.dataset.x[index], problem.dataset.y[index], vector(*weights), 0)
    return problem, problem.ask(0, problem.model.start_R, 0), batch


def test_questions_are_counted_and_gradients_apart():
    problem, ask, batch = asked()
    ask.forward(problem.model.start_P, batch)
    ask.grad(problem.model.start_P, batch)
    assert (ask.notes.num_gradients, ask.notes.num_forwards) == (1, 1)
    ask.forward(problem.model.start_P, batch)
    assert (ask.notes.num_gradients, ask.notes.num_forwards) == (1, 2)
    assert ask.phase == 0  # outside a client's steps it is the first


def test_a_loss_is_the_mean_over_the_samples_that_count():
    problem, ask, batch = asked(weights=(1, 0, 1, 0))
    losses_B = ask.losses(ask.forward(problem.model.start_P, batch, mode="still").logits_BC, batch)
    value = ask.loss(problem.model.start_P, batch, mode="still")
    assert_close(value, (losses_B[0] + losses_B[2]) / 2)


def test_an_offset_is_added_to_the_logits():
    """The gradient of cross-entropy on the head's bias is the mean of softmax(logits + offset) - onehot."""
    problem, ask, batch = asked()
    offset_C = vector(0.5, -1.0, 2.0)
    logits_BC = ask.forward(problem.model.start_P, batch, mode="still").logits_BC
    g_P = ask.grad(problem.model.start_P, batch, offset_C=offset_C, mode="still")
    onehot_BC = torch.eye(3, dtype=torch.float64)[batch.y]
    assert_close(g_P[-3:], (torch.softmax(logits_BC + offset_C, 1) - onehot_BC).mean(0))


def test_a_prior_is_added_to_the_logits_of_every_loss():
    """On top of an offset: the head's bias gets the mean of softmax(logits + offset + prior) - onehot."""
    problem, ask, batch = asked()
    logits_BC = ask.forward(problem.model.start_P, batch, mode="still").logits_BC
    ask = ask.replace(prior_C=vector(1.0, 0.0, -2.0))
    g_P = ask.grad(problem.model.start_P, batch, offset_C=vector(0.5, -1.0, 2.0), mode="still")
    onehot_BC = torch.eye(3, dtype=torch.float64)[batch.y]
    assert_close(g_P[-3:], (torch.softmax(logits_BC + vector(1.5, -1.0, 0.0), 1) - onehot_BC).mean(0))


def test_the_head_takes_features_to_logits():
    problem, ask, batch = asked()
    output = ask.forward(problem.model.start_P, batch, mode="still")
    assert_close(ask.head(problem.model.start_P, output.features_BF), output.logits_BC)


def test_only_training_moves_the_statistics():
    problem, ask, batch = asked()
    for mode in ("still", "eval"):
        ask.grad(problem.model.start_P, batch, mode=mode)
        assert torch.equal(ask.notes.buffers_R, problem.model.start_R)
    ask.grad(problem.model.start_P, batch)
    assert not torch.equal(ask.notes.buffers_R, problem.model.start_R)


def test_gradients_are_of_any_function_of_the_parameters():
    problem, ask, _ = asked()
    x_P = problem.model.start_P
    assert_close(ask.grad_of(lambda y_P: (y_P**2).sum(), x_P), 2 * x_P)
    assert_close(ask.notes.value, (x_P**2).sum())


def test_a_gradient_leaves_no_graph_behind():
    problem, ask, batch = asked(model=Follows)
    ask.grad(problem.model.start_P, batch)
    assert ask.notes.buffers_R != 0
    assert not any(v.requires_grad for v in (problem.model.start_P, ask.notes.value, ask.notes.buffers_R))


def test_stacked_clients_get_what_they_get_alone():
    """Gradient, loss and statistics of two batches, under torch.vmap and one at a time."""
    problem, _, _ = asked()
    x_P = problem.model.start_P

    def answers(x, y, buffers_R, *, stacked):
        ask = Ask(
            problem.model, problem.task, buffers_R,
            client=problem.client(0), round=0, key=key_for(0, "test"), num_batches=1, batch_size=4, stacked=stacked,
        )  # fmt: skip
        g_P = ask.grad(x_P, Batch(x, y, torch.ones(4, dtype=x.dtype), 0))
        return g_P, ask.notes.value, ask.notes.buffers_R

    x, y = problem.dataset.x[:8].reshape(2, 4, -1), problem.dataset.y[:8].reshape(2, 4)
    start_R = problem.model.start_R
    together = torch.vmap(lambda *each: answers(*each, stacked=True))(x, y, start_R.repeat(2, 1))
    for i in range(2):
        alone = answers(x[i], y[i], start_R, stacked=False)
        assert_close(tuple(part[i] for part in together), alone, rtol=1e-10, atol=1e-12)


def test_another_ask_differs_in_what_is_given_only_and_notes_the_same_work():
    problem, ask, batch = asked()
    prior_C = vector(1.0, 0.0, -2.0)
    changed = ask.replace(prior_C=prior_C).replace(phase=3)
    assert changed.phase == 3
    assert torch.equal(changed.prior_C, prior_C)  # a second change keeps the first
    changed.grad(problem.model.start_P, batch)
    assert ask.notes.num_gradients == 1


def test_statistics_that_were_received_are_those_it_has_unless_given():
    problem, ask, _ = asked()
    assert ask.received_R is ask.buffers_R
    other_R = problem.model.start_R + 1
    assert problem.ask(0, problem.model.start_R, 0, received_R=other_R).received_R is other_R


def test_it_is_noted_whether_the_round_was_looked_at():
    _, ask, _ = asked()
    assert not ask.notes.saw_round
    assert ask.round == 0
    assert ask.notes.saw_round


def test_nothing_else_can_be_replaced_or_deleted():
    _, ask, _ = asked()
    with pytest.raises(TypeError, match="phase or prior_C, not round"):
        ask.replace(round=3)
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del ask.phase
