"""The contract's own arithmetic: messages, a server's loop, what a step returns."""

import pytest
import torch
from federations import tiny, vector

from fedncv.engine.problem import start
from fedncv.engine.sequential import run_round
from fedncv.keys import key_for
from fedncv.methods.base import (
    Replies,
    ServerAsk,
    aggregate,
    for_all,
)
from fedncv.methods.fedavg import fedavg


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
