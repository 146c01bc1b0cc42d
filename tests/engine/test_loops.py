"""Loops of a server in fixed memory give what the plain loop gives, and nothing of one call is left for the next."""

from typing import NamedTuple

import torch
from federations import vector

from fedncv.engine.loops import MOST, Loops
from fedncv.keys import key_for
from fedncv.methods.base import ServerAsk
from fedncv.tree import leaves


class State(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
    name: int = 7  # numbers stay


def swap(_model, state, row, given):
    """Each takes the other's old value: an order of writing shows."""
    return state._replace(a=row[0] * state.b + given, b=state.a)


ASK = ServerAsk(None, 0, key_for(0, "test"))


def rows(*numbers):
    return (vector(*numbers)[:, None], torch.arange(len(numbers)))


def test_a_loop_by_hand():
    """(a, b) = (1, 2): row 3 gives (3·2 + 1, 1), row 4 gives (4·1 + 1, 7)."""
    for ask in (ASK, ASK._replace(repeat=Loops(None))):
        state = ask.loop(swap, State(vector(1.0), vector(2.0)), rows(3.0, 4.0), vector(1.0))
        assert [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in state] == [[5.0], [7.0], 7]


def test_another_call_begins_anew_and_leaves_earlier_results_alone():
    ask = ASK._replace(repeat=Loops(None))
    first = ask.loop(swap, State(vector(1.0), vector(2.0)), rows(3.0, 4.0), vector(1.0))
    again = ask.loop(swap, State(vector(0.0), vector(1.0), 8), rows(1.0, 1.0), vector(2.0))
    assert (first.a.tolist(), first.b.tolist(), first.name) == ([5.0], [7.0], 7)
    assert (again.a.tolist(), again.b.tolist(), again.name) == ([2.0], [3.0], 8)  # (0, 1) -> (3, 0) -> (2, 3)


def test_a_number_that_is_given_is_read_anew_in_every_call():
    """a = 1, a row of 3: a + 3·2 = 7 with 2 given, a + 3·5 = 16 with 5."""

    def add(_model, state, row, given):
        return state._replace(a=state.a + row[0] * given)

    for ask in (ASK, ASK._replace(repeat=Loops(None))):
        ends = [ask.loop(add, State(vector(1.0), vector(0.0)), rows(3.0), given).a.item() for given in (2.0, 5.0)]
        assert ends == [7.0, 16.0]


def test_other_forms_are_other_loops_and_only_some_are_held():
    loops = Loops(None)
    for n in (*range(1, MOST + 3), 2):
        start = State(vector(*range(n)), vector(*range(1, n + 1)))
        given, some = vector(*[0.5] * n), (torch.ones(3, n, dtype=torch.float64), torch.arange(3))
        ours, plain = (ask.loop(swap, start, some, given) for ask in (ASK._replace(repeat=loops), ASK))
        for (_, a), (_, b) in zip(leaves(ours), leaves(plain), strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert len(loops._recorded) <= MOST
