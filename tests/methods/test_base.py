"""The contract's own arithmetic: weights, sums, and what an Ask counts and differentiates."""

import torch
from federations import tiny, vector
from torch.testing import assert_close

from fedncv.methods.base import Batch, Replies, for_all, weighted_sum


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


def asked(weights=(1, 1, 1, 1)):
    problem = tiny("fedavg")
    index = torch.from_numpy(problem.clients.train[0][:4])
    batch = Batch(problem.dataset.x[index], problem.dataset.y[index], vector(*weights), 0)
    return problem, problem.ask(0, problem.model.start_R, 0), batch


def test_questions_are_counted_and_gradients_apart():
    problem, ask, batch = asked()
    ask.forward(problem.model.start_P, batch)
    ask.grad(problem.model.start_P, batch)
    assert (ask.num_gradients, ask.num_forwards) == (1, 1)


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


def test_only_training_moves_the_statistics():
    problem, ask, batch = asked()
    for mode in ("still", "eval"):
        ask.grad(problem.model.start_P, batch, mode=mode)
        assert torch.equal(ask.buffers_R, problem.model.start_R)
    ask.grad(problem.model.start_P, batch)
    assert not torch.equal(ask.buffers_R, problem.model.start_R)


def test_gradients_are_of_any_function_of_the_parameters():
    problem, ask, _ = asked()
    x_P = problem.model.start_P
    assert_close(ask.grad_of(lambda y_P: (y_P**2).sum(), x_P), 2 * x_P)
    assert_close(ask.value, (x_P**2).sum())
