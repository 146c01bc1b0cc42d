"""One client's training is plain SGD on a plain module, batch for batch."""

import numpy as np
import pytest
import torch
from federations import Tiny, everyone, quadratics, tiny, train
from torch import nn
from torch.testing import assert_close

from fedncv.engine.local import lr_of, plan
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.keys import key_for
from fedncv.methods import find_method
from fedncv.methods.base import Phase
from fedncv.optimizers import total_step


class NoDropout(Tiny):
    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.body[3] = nn.Identity()


def steps_of(method, n, *, epochs=2, batch_size=4, smallest=1, seed=0):
    return plan(method, key_for(seed, "b"), n, epochs=epochs, batch_size=batch_size, smallest=smallest)


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.01)])
def test_training_equals_a_plain_torch_loop(momentum, weight_decay):
    """The same batches through torch.optim.SGD and a module with its own BatchNorm state."""
    problem = tiny("fedavg", model=NoDropout, momentum=momentum, weight_decay=weight_decay, epochs=3)
    state = start(problem)
    (arrival,) = arrivals(problem, state, everyone(1).ids)
    trained = train_client(problem, 0, arrival)

    module = NoDropout((4,), 3).double()
    module.load_state_dict(problem.model.state_dict(problem.model.start_P, problem.model.start_R))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay)
    mine = torch.from_numpy(problem.clients.train[1])
    x, y = problem.dataset.x[mine], problem.dataset.y[mine]
    losses = []
    key = key_for(0, "batches", 0, 1)
    for step in plan(problem.method, key, len(mine), epochs=3, batch_size=4, smallest=2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module.train()(x[step.rows]), y[step.rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expected = module.state_dict()
    for name, value in problem.model.layout.unflatten(trained.y_P, trained.buffers_R).items():
        assert_close(value, expected[name], rtol=1e-12, atol=1e-12)
    assert float(trained.loss) == pytest.approx(np.mean(losses))


def test_every_epoch_sees_every_sample_once_in_an_order_of_its_own():
    steps = steps_of(find_method("fedavg"), 10)
    epochs = [torch.cat([s.rows for s in steps[:3]]), torch.cat([s.rows for s in steps[3:]])]
    for order in epochs:
        assert torch.equal(order.sort().values, torch.arange(10))
    assert not torch.equal(*epochs)
    assert [len(s.rows) for s in steps] == [4, 4, 2, 4, 4, 2]


def test_same_batches_keep_their_samples_and_change_places():
    method = find_method("fedavg")._replace(same_batches=True)
    steps = steps_of(method, 40, epochs=3)
    by_number = {}
    for step in steps:
        assert torch.equal(by_number.setdefault(step.number, step.rows), step.rows)
    assert len(by_number) == 10
    orders = [[s.number for s in steps[10 * e : 10 * e + 10]] for e in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0] != orders[1]


def test_a_batch_of_one_is_skipped_only_where_the_model_needs_two():
    method = find_method("fedavg")
    assert [len(s.rows) for s in steps_of(method, 5, epochs=1, smallest=1)] == [4, 1]
    assert [len(s.rows) for s in steps_of(method, 5, epochs=1, smallest=2)] == [4]
    assert steps_of(method, 1, smallest=2) == []


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_total_step_is_the_displacement_under_constant_gradients(momentum, num_steps):
    y = v = 0.0
    for _ in range(num_steps):
        v = momentum * v + 1.0
        y -= 0.1 * v
    assert total_step(num_steps, 0.1, momentum) == pytest.approx(-y)


def test_a_phase_that_trains_nothing_is_a_pass_over_the_data():
    seen = []
    base = find_method("fedavg")

    def direction(ask, y_P, batch, down, own, scratch):
        seen.append((ask.phase, y_P.clone(), len(batch.x)))
        return base.direction(ask, y_P, batch, down, own, scratch)

    method = base._replace(
        direction=direction, phases=lambda epochs: (Phase(1, trains=(), mode="still"), Phase(epochs))
    )
    problem = tiny(method, sizes=(12,), momentum=0.9)
    seen.clear()  # the method was tried
    train(problem)
    passes = [entry for entry in seen if entry[0] == 0]
    assert sum(size for _, _, size in passes) == 8  # of nine: a last batch of one is skipped
    assert all(torch.equal(y, problem.model.start_P) for _, y, _ in passes)
    plain = train(tiny("fedavg", sizes=(12,), momentum=0.9))
    assert not torch.equal(train(problem).server.x_P, plain.server.x_P)  # other batches: the pass took an epoch


def test_stragglers_do_the_first_part_of_their_steps():
    problem = quadratics("fedavg", a=(1.0,), b=(0.0,), steps=10)
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    assert float(train_client(problem, 0, arrival, share=0.45).y_P) == pytest.approx(5 * 0.95**5)
    assert float(train_client(problem, 0, arrival).y_P) == pytest.approx(5 * 0.95**10)


def test_a_training_measured_after_the_last_round_has_that_round_s_learning_rate():
    """A cosine over two rounds is 1, 1/2 and then 0, with which nothing would be trained."""
    problem = quadratics("fedavg", schedule="cosine", lr=0.4, rounds=2)
    assert [lr_of(problem, t) for t in range(3)] == pytest.approx([0.4, 0.2, 0.2])


def test_the_learning_rate_follows_its_schedule():
    problem = quadratics("fedavg", a=(1.0,), b=(0.0,), steps=1, schedule="step:every=1,factor=0.5", lr=0.4, rounds=3)
    assert [lr_of(problem, t) for t in range(3)] == pytest.approx([0.4, 0.2, 0.1])
    assert float(train(problem, rounds=3).server.x_P) == pytest.approx(5 * 0.6 * 0.8 * 0.9)
