"""MOON: the contrast and its gradient by hand, whose previous model it is, and what it costs."""

from math import exp

import pytest
import torch
from federations import everyone, tiny, vector
from torch import nn
from torch.testing import assert_close

from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.engine.round import Reply, aggregate
from fedncv.methods import find_method
from fedncv.methods.base import Batch
from fedncv.methods.fedavg import Down


class Scales(nn.Module):
    """Features z = w * x, and a head of zeros: no gradient of the loss reaches w."""

    def __init__(self, shape, num_classes):
        super().__init__()
        self.w = nn.Parameter(torch.ones(shape))
        self.head = nn.Linear(shape[0], num_classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        return self.head(self.w * x)


def gradient(text, y, x, previous):
    """On w = (w_1 .. w_4), for one sample of ones, with these w as local, received and previous model."""
    problem = tiny(text, model=Scales)
    start_P = problem.model.start_P

    def at(w):
        return torch.cat([vector(*w), start_P[4:]])

    batch = Batch(torch.ones(1, 4, dtype=torch.float64), torch.tensor([0]), torch.ones(1), 0)
    ask = problem.ask(0, problem.model.start_R, 0)
    g_P, _ = problem.method.direction(ask, at(y), batch, Down(at(x)), at(previous), ())
    return g_P[:4]


def test_the_gradient_of_the_contrast_by_hand():
    """z = z_glob = (1, 0, 0, 0), z_prev = (0, 1, 0, 0), of cosines 1 and 0. d cos(z, u)/dz = u - cos(z, u) z for unit
    vectors: 0 and z_prev. softplus((0 - 1)/tau) has slope 1/(1 + e^2) / tau at tau = 1/2, and mu = 5.
    """
    g_P = gradient("moon", (1, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0))
    assert_close(g_P, vector(0, 5 * 2 / (1 + exp(2)), 0, 0))


def test_the_global_model_attracts():
    """Received and previous model exchanged: cosines 0 and 1, slope 1/(1 + e^(-1/tau)) / tau, towards z_glob."""
    g_P = gradient("moon:mu=3,tau=1", (1, 0, 0, 0), (0, 1, 0, 0), (1, 0, 0, 0))
    assert_close(g_P, vector(0, -3 / (1 + exp(-1)), 0, 0))


def test_equal_models_do_not_contrast():
    assert_close(gradient("moon", (1, 2, 0, 1), (0, 1, 1, 0), (0, 1, 1, 0)), torch.zeros(4, dtype=torch.float64))


def test_features_of_zero_have_no_direction():
    assert_close(gradient("moon", (0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0)).isfinite(), torch.ones(4).bool())


def test_the_contrast_is_a_mean_over_the_samples_that_count():
    """Two samples of ones and padding of another kind give the gradient of one."""
    problem = tiny("moon", model=Scales)
    y_P, x_P, previous_P = (torch.cat([vector(*w), problem.model.start_P[4:]]) for w in torch.eye(4)[:3].tolist())

    def direction(*rows, weights):
        x = torch.tensor(rows, dtype=torch.float64)
        batch = Batch(x, torch.zeros(len(rows), dtype=torch.long), vector(*weights), 0)
        ask = problem.ask(0, problem.model.start_R, 0)
        return problem.method.direction(ask, y_P, batch, Down(x_P), previous_P, ())[0]

    one, other = (1.0, 2.0, 3.0, 4.0), (9.0, 1.0, -5.0, 3.0)
    assert_close(direction(one, one, other, weights=(1, 1, 0)), direction(one, weights=(1,)))


def test_without_contrast_it_is_the_gradient_of_the_loss():
    problem = tiny("moon:mu=0")
    index = torch.from_numpy(problem.clients.train[0])
    batch = Batch(problem.dataset.x[index], problem.dataset.y[index], torch.arange(len(index)).double(), 0)
    x_P = problem.model.start_P
    g_P, _ = problem.method.direction(problem.ask(0, problem.model.start_R, 0), x_P, batch, Down(x_P), x_P, ())
    assert torch.equal(g_P, problem.ask(0, problem.model.start_R, 0).grad(x_P, batch))


def test_what_is_sent_is_the_update():
    problem = tiny("moon")
    (arrival,) = arrivals(problem, start(problem), everyone(1).ids)
    trained = train_client(problem, 0, arrival)
    assert torch.equal(trained.up.delta_P, arrival.down.x_P - trained.y_P)


def test_every_client_keeps_its_own_last_model_whatever_the_order_of_replies():
    problem = tiny("moon")
    state = start(problem)
    replies = [Reply(a.client, train_client(problem, 0, a)) for a in arrivals(problem, state, everyone(0, 1, 2).ids)]
    after, _ = aggregate(problem, state, replies[::-1])
    for reply in replies:
        assert torch.equal(after.kept[reply.client].own, reply.trained.y_P)
    assert len({tuple(after.kept[u].own.tolist()) for u in range(3)}) == 3


def test_until_a_client_has_trained_its_previous_model_is_the_initial_one():
    problem = tiny("moon")
    (arrival,) = arrivals(problem, start(problem), everyone(2).ids)
    assert torch.equal(arrival.kept.own, problem.model.start_P)


def test_costs_two_forward_passes_more_and_moves_no_statistics_in_them():
    """At the first step all three models are equal, so even the statistics after a round of one step are FedAvg's."""
    ours, theirs = (tiny(name, epochs=1, batch_size=64) for name in ("moon", "fedavg"))
    trained, plain = (train_client(p, 0, next(arrivals(p, start(p), everyone(0).ids))) for p in (ours, theirs))
    assert (trained.gradients, trained.forwards) == (plain.gradients, 2 * plain.samples)
    assert torch.equal(trained.buffers_R, plain.buffers_R)


@pytest.mark.parametrize("text", ["mu=-1", "tau=0"])
def test_values_out_of_range_are_refused(text):
    name, value = text.split("=")
    with pytest.raises(ValueError, match=f"{name} must be .*, not {value}"):
        find_method(f"moon:{text}")
