"""FedPer on loss (head * body - t_u)^2 / 2 with t = (0, 3), from head = body = 1, lr 0.1, one step.

Residuals 1 and -2: both parts of a client move by -0.1 * residual, to 0.9 and 1.2; the body's mean is 1.05.
"""

import torch
from federations import everyone, products, tiny, train, vector
from torch.testing import assert_close

from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.engine.round import wire_bytes


def test_a_round_by_hand():
    state = train(products("fedper"))
    assert_close(state.server.body_Q, vector(1.05))
    assert_close(state.kept[0].own, vector(0.9))
    assert_close(state.kept[1].own, vector(1.2))


def test_the_next_round_begins_with_the_shared_body_and_the_own_head():
    """Second client: residual 1.05 * 1.2 - 3, its body moves by 0.1 * 1.2 times it."""
    problem = products("fedper")
    state = train(problem, ids=[1], state=train(problem))
    assert_close(state.server.body_Q, vector(1.05 - 0.1 * 1.2 * (1.05 * 1.2 - 3)))
    assert_close(state.kept[1].own, vector(1.2 - 0.1 * 1.05 * (1.05 * 1.2 - 3)))
    assert_close(state.kept[0].own, vector(0.9))


def test_the_head_never_leaves():
    """What is sent is the body's update and nothing else, and does not depend on where the head ended."""
    problem = tiny("fedper")
    layout, state = problem.model.layout, train(problem)
    (arrival,) = arrivals(problem, state, everyone(1).ids)
    trained = train_client(problem, 1, arrival)
    assert trained.up._fields == ("delta_Q",)
    assert torch.equal(trained.up.delta_Q, arrival.down.body_Q - trained.y_P[layout.body])
    sent_bytes = wire_bytes(problem, trained.up, trained.buffers_R)
    assert sent_bytes == 8 * (layout.body.stop + problem.model.start_R.numel())
    assert wire_bytes(problem, arrival.down, arrival.buffers_R) == sent_bytes


def test_a_newcomer_has_the_initial_head():
    problem = tiny("fedper")
    (arrival,) = arrivals(problem, start(problem), everyone(3).ids)
    assert torch.equal(arrival.kept.own, problem.model.start_P[problem.model.layout.head])


def test_there_is_no_shared_model():
    problem = tiny("fedper")
    assert problem.method.shared(start(problem).server) is None
