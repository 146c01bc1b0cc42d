"""The translation without processes: every method's numbers, every fault, and what crosses."""

from dataclasses import replace

import pytest

from fedncv.methods import METHODS, find_method

ROUNDS = 3


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_the_sequential_engine_s_bits(method, by_hand, tools):
    config = replace(tools.config, method=method, clients=3, per_round=2, rounds=ROUNDS)
    state, _ = by_hand(config)
    assert tools.compare(state, tools.sequential(config)) == "equal"
