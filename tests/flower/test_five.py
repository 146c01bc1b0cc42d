"""Five clients, three of them a round, over real processes: the sequential engine's bits for five methods."""

import re

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

from federations import FULL_FEDNCV

pytestmark = pytest.mark.slow

METHODS = ["fedavg", "scaffold", "fedper", FULL_FEDNCV, "fedncv-sums"]


@pytest.fixture(scope="module")
def federation(live):
    return live(5, partition="dirichlet:alpha=0.5")


@pytest.mark.parametrize("method", METHODS)
def test_five_clients_have_the_sequential_engine_s_bits(method, federation, tools):
    name = "five-" + re.sub("[:,=+]", "-", method)
    changes = {"method": method, "per_round": 3, "rounds": 3}
    state = federation.run(name, seconds=400.0, **changes)
    reference = tools.sequential(tools.changed(federation.config, **changes))
    assert tools.compare(state, reference) == "equal"
    assert tools.same(federation.kept(name), reference.kept) == "equal"
