"""FedRep on loss (head * body - t_u)^2 / 2, from head = body = 1, lr 0.1, two epochs of one step.

t = 0: the head first, 1 - 0.1 * 1 = 0.9; then the body with the new head, 1 - 0.1 * 0.9 * 0.9 = 0.919.
t = 3: 1 + 0.1 * 2 = 1.2, then 1 + 0.1 * 1.2 * (3 - 1.2) = 1.216.
"""

import pytest
import torch
from federations import everyone, products, tiny, train, vector
from torch.testing import assert_close

from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals
from fedncv.engine.round import wire_bytes
from fedncv.methods import find_method


def test_a_round_by_hand():
    state = train(products("fedrep", epochs=2))
    assert_close(state.server.body_Q, vector((0.919 + 1.216) / 2))
    assert_close(state.kept[0].own, vector(0.9))
    assert_close(state.kept[1].own, vector(1.2))


def test_of_five_epochs_four_are_for_the_head():
    assert [(p.epochs, p.trains, p.mode) for p in find_method("fedrep").phases(5)] == [
        (4, ("head",), "still"),
        (1, ("body",), "train"),
    ]


def test_the_head_gets_an_epoch_even_where_none_is_left():
    assert [p.epochs for p in find_method("fedrep").phases(1)] == [1, 1]
    assert [p.epochs for p in find_method("fedrep:body_epochs=3").phases(5)] == [2, 3]


def test_statistics_move_only_while_the_body_does():
    """With the body's epoch left out, nothing but the head has moved, to the last bit."""
    problem = tiny("fedrep")
    layout = problem.model.layout
    state = train(problem)
    (arrival,) = arrivals(problem, state, everyone(0).ids)
    head_only = problem.method._replace(phases=lambda _epochs: find_method("fedrep").phases(2)[:1])
    trained = train_client(problem._replace(method=head_only), 1, arrival)
    assert torch.equal(trained.buffers_R, arrival.buffers_R)
    assert torch.equal(trained.y_P[layout.body], arrival.down.body_Q)
    assert not torch.equal(trained.y_P[layout.head], arrival.kept.own)
    assert not torch.equal(train_client(problem, 1, arrival).buffers_R, arrival.buffers_R)


def test_the_head_never_leaves():
    problem = tiny("fedrep")
    (arrival,) = arrivals(problem, train(problem), everyone(1).ids)
    trained = train_client(problem, 1, arrival)
    sent_bytes = wire_bytes(problem, trained.up, trained.buffers_R)
    assert sent_bytes == 8 * (problem.model.layout.body.stop + problem.model.start_R.numel())
    assert torch.equal(trained.kept.own, trained.y_P[problem.model.layout.head])


def test_a_body_without_an_epoch_is_refused():
    with pytest.raises(ValueError, match="body_epochs must be at least 1, not 0"):
        find_method("fedrep:body_epochs=0")
