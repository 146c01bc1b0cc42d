"""Local: nothing crosses, and every client goes to its own optimum."""

import torch
from federations import everyone, quadratics, tiny, train, vector
from torch.testing import assert_close

from fedncv.engine.problem import arrivals, start
from fedncv.tree import leaves


def test_every_client_goes_on_from_where_it_was():
    """y - b shrinks by (1 - lr a)^K a round: 0.95^20 * 5 and 1 + 0.8^20 * 4 after two rounds of ten steps."""
    state = train(quadratics("local"), rounds=2)
    assert_close(state.kept[0].own, vector(0.95**20 * 5))
    assert_close(state.kept[1].own, vector(1 + 0.8**20 * 4))


def test_an_absent_client_stands_still():
    problem = quadratics("local", steps=1)
    state = train(problem, ids=[1], state=train(problem))
    assert_close(state.kept[0].own, vector(4.75))
    assert_close(state.kept[1].own, vector(1 + 0.8**2 * 4))


def test_nothing_crosses():
    state = train(tiny("local"), rounds=2)
    assert (state.totals.bytes_down, state.totals.bytes_up) == (0, 0)
    assert state.totals.samples > 0
    assert list(leaves(state.server)) == []


def test_running_statistics_are_the_clients_own():
    """Also where the study averages them: client 0's do not depend on who else took part."""
    problem = tiny("local", buffers="averaged")
    together, alone = train(problem, rounds=2), train(problem, rounds=2, ids=[0])
    assert torch.equal(together.kept[0].buffers_R, alone.kept[0].buffers_R)
    assert torch.equal(together.kept[0].own, alone.kept[0].own)
    assert not torch.equal(alone.kept[0].buffers_R, problem.model.start_R)


def test_a_newcomer_has_the_initial_model_and_there_is_no_shared_one():
    problem = tiny("local")
    (arrival,) = arrivals(problem, start(problem), everyone(2).ids)
    assert torch.equal(arrival.kept.own, problem.model.start_P)
    assert problem.method.shared(()) is None
