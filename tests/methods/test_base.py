"""The contract's own arithmetic: messages, a server's loop, what a step returns."""

import pytest
import torch
from federations import tiny, vector
from torch.testing import assert_close

from fedncv.engine.problem import DivergedError, start
from fedncv.engine.sequential import run_round
from fedncv.keys import key_for
from fedncv.methods.base import (
    Replies,
    ServerAsk,
    Sums,
    aggregate,
    combined,
    for_all,
    moved_by,
)
from fedncv.methods.fedavg import Server, fedavg


def test_the_same_message_for_all_is_not_copied():
    x_P = vector(1.0, 2.0)
    x_SP = for_all(x_P, torch.tensor([4, 7, 9]))
    assert x_SP.tolist() == [[1, 2]] * 3
    assert x_SP.data_ptr() == x_P.data_ptr()


def test_a_servers_loop_by_hand():
    """state <- model * row - state + given over the rows 3 and 5: 10 * 3 - 1 + 100, then 10 * 5 - 129 + 100."""

    def step(model, state, row, given):
        return model * row - state + given

    ask = ServerAsk(10, 0, key_for(0, "test"))
    assert ask.loop(step, 1, vector(3.0, 5.0), 100) == 21
    asked_of = ask._replace(repeat=lambda *arguments: arguments)
    assert asked_of.loop(step, 1, (), 100) == (step, 1, (), 100)


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


@pytest.mark.parametrize(("numbers", "message"), [({"before": 1.0}, "'before'"), ({"eta": torch.ones(2)}, "scalars")])
def test_numbers_that_would_be_misread_are_refused(numbers, message):
    problem = tiny(fedavg()._replace(step=lambda *given: fedavg().step(*given)._replace(numbers=numbers)))
    with pytest.raises(ValueError, match=message):
        run_round(problem, start(problem))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ({"weights": {"delta": "one"}}, "'delta'"),
        ({"weights": {"delta_P": "ones"}}, "'ones'"),
        ({"reveals": {"delta": "its update"}}, "clients send delta_P, but"),
    ],
)
def test_what_a_method_declares_is_checked(pieces, message):
    def one_round():
        problem = tiny(fedavg()._replace(**pieces))
        return run_round(problem, start(problem))

    with pytest.raises(ValueError, match=message):
        one_round()


def test_a_model_for_inference_that_is_not_finite_stops_the_run():
    problem = tiny("fedavg+average")
    state = start(problem)
    lost = state._replace(server=state.server._replace(a_P=state.server.a_P * float("nan")))
    with pytest.raises(DivergedError, match="server diverged"):
        run_round(problem, lost)


def test_a_server_moves_by_its_step():
    stepped = moved_by(Server(vector(5.0)), vector(2.0))
    assert_close(stepped.server.x_P, vector(3.0))
    assert_close(stepped.move_P, vector(2.0))


def test_a_method_that_combines_is_given_its_server_and_the_replies():
    """And one that does not is given sums: the two forms."""
    method = fedavg()._replace(combine=lambda server, replies: (server, replies))
    server, replies = Server(vector(1.0)), Replies((), torch.tensor([0]), vector(1.0), torch.ones(1))
    assert combined(method, server, replies) == (server, replies)
    assert isinstance(combined(fedavg(), server, replies), Sums)
    assert (method.form, fedavg().form) == ("each reply", "sums")
