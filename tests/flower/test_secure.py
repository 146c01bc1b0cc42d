"""Secure sums over messages made by hand."""

from dataclasses import replace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

from fedncv.flower.rules import Rules
from fedncv.results import read_rows

FAST = Rules(round_seconds=5.0, stage_seconds=5.0, join_seconds=5.0, attempts=1)
SECURE = "threshold=3,neighbours=0"


@pytest.fixture
def config(tools):
    return replace(tools.config, clients=4, per_round=4, rounds=2, epochs=1, method="scaffold+fixed_point")


METHODS = ["fedavg", "scaffold", "fedncv-sums"]


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_that_of_the_simulation_bit_for_bit(method, by_hand, tools, config):
    config = replace(config, method=f"{method}+fixed_point")
    state, _ = by_hand(config, rules=FAST, secure=SECURE)
    assert tools.compare(state, tools.sequential(config)) == "equal"
    assert [line["counted"] for line in read_rows(by_hand.folder / "server" / "runs" / "run")[1:]] == [[0, 1, 2, 3]] * 2
