"""pFedSim: mixing by hand, from the second client on, and FedAvg before."""

from math import log, sqrt

import pytest
import torch
from federations import everyone, products, tiny, train, vector
from torch.testing import assert_close

from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.methods import find_method
from fedncv.methods.base import Replies
from fedncv.methods.pfedsim import Server, Statistics

ITSELF = -log(1e-4)
# heads at 45 degrees: phi = 1/sqrt(2); opposite heads have phi = 0
FRIEND = -log(1 - 1 / sqrt(2))


def mixed(*, n=(1.0, 3.0, 1.0, 0.0)):
    """Four clients after the warm-up, the last one not heard of; bodies 1, 2, 3."""
    heads = [[2.0, 0.0], [1.0, 1.0], [-1.0, 0.0], [0.0, 0.0]]
    return Server(
        x_P=vector(10.0, 20.0, 30.0),
        body_NQ=vector(1.0, 2.0, 3.0, 0.0)[:, None],
        head_NH=torch.tensor(heads, dtype=torch.float64),
        n_N=vector(*n),
        round=5,
        warm_rounds=5,
    )


def test_bodies_are_mixed_by_the_similarity_of_heads():
    """The first client's: (ITSELF * 1 + FRIEND * 2) / (ITSELF + FRIEND); the third resembles nobody."""
    x_SP = find_method("pfedsim").broadcast(mixed(), torch.tensor([0, 2])).x_P
    assert_close(x_SP[0], vector((ITSELF + 2 * FRIEND) / (ITSELF + FRIEND), 2.0, 0.0))
    assert_close(x_SP[1], vector(3.0, -1.0, 0.0))


def test_running_statistics_are_mixed_alike():
    rule = find_method("pfedsim").buffers
    state = Statistics(vector(7.0), vector(1.0, 2.0, 3.0, 0.0)[:, None])
    b_SR = rule.broadcast(state, mixed(), torch.tensor([0, 3]))
    assert_close(b_SR, vector((ITSELF + 2 * FRIEND) / (ITSELF + FRIEND), 7.0)[:, None])


def test_mixing_does_not_wait_until_all_were_heard_of():
    """With only the first two heard of, they mix; the others get the average."""
    x_SP = find_method("pfedsim").broadcast(mixed(n=(1.0, 1.0, 0.0, 0.0)), torch.arange(4)).x_P
    assert_close(x_SP[1], vector((2 * ITSELF + FRIEND) / (ITSELF + FRIEND), 1.0, 1.0))
    assert_close(x_SP[2:], vector(10.0, 20.0, 30.0).expand(2, 3))


def test_a_head_of_zeros_resembles_nobody():
    x_SP = find_method("pfedsim").broadcast(mixed(n=(1.0, 1.0, 1.0, 1.0)), torch.tensor([3, 0])).x_P
    assert_close(x_SP[0], vector(0.0, 0.0, 0.0))
    assert_close(x_SP[1, 0], vector((ITSELF + 2 * FRIEND) / (ITSELF + FRIEND))[0])


def test_only_the_direction_of_a_head_counts():
    server = mixed()
    small = server._replace(head_NH=server.head_NH * 1e-3)
    ours, theirs = (find_method("pfedsim").broadcast(s, torch.tensor([0])).x_P for s in (small, server))
    assert_close(ours[:, 0], theirs[:, 0])


def test_equal_heads_share_alike():
    """phi = 1 is clamped to a client's similarity with itself."""
    server = mixed()._replace(head_NH=torch.ones(4, 2, dtype=torch.float64))
    assert_close(find_method("pfedsim").broadcast(server, torch.tensor([0])).x_P[0, 0], vector(2.0)[0])


def test_the_server_keeps_what_each_client_sent_and_their_average():
    """Products: after the warm-up (none), body and head of each client as in one step of SGD: 0.9, 1.2."""
    problem = products("pfedsim:warm_up=0")
    state = train(problem)
    assert_close(state.server.body_NQ, vector(0.9, 1.2)[:, None])
    assert_close(state.server.head_NH, vector(0.9, 1.2)[:, None])
    assert_close(state.server.x_P, vector(1.05, 1.05))
    alone = train(problem, ids=[1])
    assert_close(alone.server.x_P, vector(1.2, 1.2))
    assert_close(alone.server.n_N, vector(0.0, 1.0))


def test_the_average_counts_samples():
    problem = tiny("pfedsim:warm_up=0")
    server = train(problem, ids=[0, 2]).server
    n = [float(len(problem.clients.train[u])) for u in (0, 2)]
    rows = [torch.cat([server.body_NQ[u], server.head_NH[u]]) for u in (0, 2)]
    assert_close(server.x_P, (n[0] * rows[0] + n[1] * rows[1]) / sum(n))


def test_half_of_the_rounds_are_fedavg():
    """Four rounds: two are FedAvg's, to the last bit; then clients begin with what they have."""
    ours, theirs = tiny("pfedsim", rounds=4), tiny("fedavg", rounds=4)
    state, plain = train(ours, rounds=2), train(theirs, rounds=2)
    assert torch.equal(state.server.x_P, plain.server.x_P)
    assert ours.method.shared(train(ours).server) is not None
    assert ours.method.shared(state.server) is None
    (arrival, _) = arrivals(ours, state, everyone(0, 1).ids)
    assert torch.equal(arrival.down.x_P, plain.server.x_P)
    assert torch.equal(arrival.buffers_R, plain.buffers)
    sent_P = train_client(ours, 2, arrival).up.y_P
    (again,) = arrivals(ours, train(ours, state=state, ids=[0, 1]), everyone(0).ids)
    head, body = ours.model.layout.head, ours.model.layout.body
    assert torch.equal(again.down.x_P[head], sent_P[head])
    assert not torch.equal(again.down.x_P[body], sent_P[body])


def test_of_two_rounds_the_first_is_warm():
    problem = tiny("pfedsim", rounds=2)
    assert start(problem).server.warm
    assert not train(problem).server.warm


def test_rounds_without_replies_count_for_the_warm_up():
    problem = tiny("pfedsim", rounds=4)
    state = train(problem)._replace(round=3)
    assert not train(problem, state=state).server.warm


def test_statistics_of_clients_and_their_average():
    """After the warm-up the rule keeps the rows of those heard of, and averages them by samples."""
    method = find_method("pfedsim")
    replies = Replies((), torch.tensor([0, 1]), vector(1.0, 3.0), torch.ones(2))
    state = Statistics(vector(0.0), torch.zeros(4, 1, dtype=torch.float64))
    server = mixed(n=(0.0, 0.0, 0.0, 0.0))
    after = method.buffers.step(None, state, server, (vector(4.0, 8.0)[:, None], replies))
    assert_close(after.b_NR, vector(4.0, 8.0, 0.0, 0.0)[:, None])
    assert_close(after.b_R, vector(7.0))
    warm = method.buffers.step(None, state, server._replace(warm_rounds=9), (vector(4.0, 8.0)[:, None], replies))
    assert_close(warm.b_R, vector(7.0))
    assert_close(warm.b_NR, state.b_NR)


def test_start_is_the_initial_model_for_all():
    problem = tiny("pfedsim:warm_up=0")
    for arrival in arrivals(problem, start(problem), everyone(0, 3).ids):
        assert torch.equal(arrival.down.x_P, problem.model.start_P)
        assert torch.equal(arrival.buffers_R, problem.model.start_R)


@pytest.mark.parametrize("value", ["-0.1", "1.1"])
def test_a_share_out_of_range_is_refused(value):
    with pytest.raises(ValueError, match=f"warm_up must be from 0 to 1, not {value}"):
        find_method(f"pfedsim:warm_up={value}")


def test_with_every_round_warm_it_never_mixes():
    problem = tiny("pfedsim:warm_up=1", rounds=3)
    assert train(problem, rounds=2).server.warm
    assert not train(problem, rounds=3).server.warm  # three of three are over
