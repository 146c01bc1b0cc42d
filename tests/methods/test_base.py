"""The contract's own arithmetic: weights, sums, and what an Ask counts and differentiates."""

from collections import namedtuple

import pytest
import torch
from federations import tiny, vector
from torch import nn
from torch.testing import assert_close

from fedncv.engine.problem import start
from fedncv.engine.sequential import run_round
from fedncv.keys import key_for
from fedncv.methods.base import (
    Ask,
    Batch,
    Replies,
    ServerAsk,
    aggregate,
    for_all,
    sums_from_totals,
    sums_of,
    weighted_sum,
)
from fedncv.methods.fedavg import fedavg


def test_weights_are_shares_of_the_samples_that_answered():
    replies = Replies((), torch.tensor([2, 5]), vector(1.0, 3.0), torch.ones(2))
    assert_close(replies.weight_S, vector(0.25, 0.75))


def test_a_weighted_sum_by_hand():
    """0.5 (1, 2) + 2 (3, 4), in the precision of the summands."""
    a_SP = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(weighted_sum(vector(0.5, 2.0), a_SP), torch.tensor([6.5, 9.0]))
    assert torch.equal(weighted_sum(vector(1.0, 1.0), vector(3.0, 4.0)), torch.tensor(7.0).double())


def test_the_same_message_for_all_is_not_copied():
    x_P = vector(1.0, 2.0)
    x_SP = for_all(x_P, torch.tensor([4, 7, 9]))
    assert x_SP.tolist() == [[1, 2]] * 3
    assert x_SP.data_ptr() == x_P.data_ptr()


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
            client=problem.client(0), round=0, key=key_for(0, "test"), num_batches=1, stacked=stacked,
        )  # fmt: skip
        g_P = ask.grad(x_P, Batch(x, y, torch.ones(4, dtype=x.dtype), 0))
        return g_P, ask.notes.value, ask.notes.buffers_R

    x, y = problem.dataset.x[:8].reshape(2, 4, -1), problem.dataset.y[:8].reshape(2, 4)
    start_R = problem.model.start_R
    together = torch.vmap(lambda *each: answers(*each, stacked=True))(x, y, start_R.repeat(2, 1))
    for i in range(2):
        alone = answers(x[i], y[i], start_R, stacked=False)
        assert_close(tuple(part[i] for part in together), alone, rtol=1e-10, atol=1e-12)


def test_a_servers_loop_by_hand():
    """state <- model * row - state + given over the rows 3 and 5: 10 * 3 - 1 + 100, then 10 * 5 - 129 + 100."""

    def step(model, state, row, given):
        return model * row - state + given

    ask = ServerAsk(10, 0, key_for(0, "test"))
    assert ask.loop(step, 1, vector(3.0, 5.0), 100) == 21
    asked_of = ask._replace(repeat=lambda *arguments: arguments)
    assert asked_of.loop(step, 1, (), 100) == (step, 1, (), 100)


def test_sums_by_hand():
    """n = (1, 3): a by samples has the mean (2 + 3 * 6) / 4 and the sum 20, b by one (1 + 5) / 2 and 6."""
    up = namedtuple("Up", "a b")
    replies = Replies(up(vector(2.0, 6.0), vector(1.0, 5.0)), torch.tensor([0, 4]), vector(1.0, 3.0), torch.ones(2))
    sums = sums_of(replies, {"b": "one"})
    assert [float(each("a")) for each in (sums.mean, sums.sum)] == [5, 20]
    assert [float(each("b")) for each in (sums.mean, sums.sum)] == [3, 6]
    assert (float(sums.samples), sums.num_replies) == (4, 2)
    totals = sums_from_totals({"a": vector(20.0), "b": vector(6.0)}, vector(4.0), 2, {"b": "one"})
    assert [float(totals.mean(name)) for name in "ab"] == [5, 3]
    assert float(sums.with_mean("a", vector(7.0)).mean("a")) == 7
    assert float(sums.with_mean("a", vector(7.0)).mean("b")) == 3


def test_other_weights_replace_the_shares_of_the_samples():
    up = namedtuple("Up", "a")
    replies = Replies(up(vector(2.0, 6.0)), torch.tensor([0, 4]), vector(1.0, 3.0), torch.ones(2), vector(0.5, 2.0))
    assert float(sums_of(replies, {}).mean("a")) == 0.5 * 2 + 2 * 6


def test_a_step_must_say_what_it_returns():
    method = fedavg()._replace(step=lambda _ask, server, _sums: server)
    replies = Replies((), torch.tensor([0]), vector(1.0), torch.ones(1))
    with pytest.raises(TypeError, match="must return Stepped"):
        aggregate(method, ServerAsk(None, 0, None), method.init(vector(1.0), None), replies)


def test_numbers_of_a_step_are_in_the_row_of_the_round():
    def step(ask, server, sums):
        return fedavg().step(ask, server, sums)._replace(numbers={"length": torch.tensor(2.5)})

    problem = tiny(fedavg()._replace(step=step))
    assert run_round(problem, start(problem))[1]["length"] == 2.5
    clashing = tiny(fedavg()._replace(step=lambda *given: fedavg().step(*given)._replace(numbers={"loss": 1.0})))
    with pytest.raises(ValueError, match="'loss'"):
        run_round(clashing, start(clashing))
