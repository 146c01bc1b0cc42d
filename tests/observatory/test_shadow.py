"""Memory kept along a path that is not one's own."""

from dataclasses import replace

import pytest
import torch
from federations import FULL_FEDNCV, tiny
from torch.testing import assert_close

from fedncv.engine.local import train
from fedncv.engine.problem import arrivals
from fedncv.engine.round import draw
from fedncv.observatory.compare import rows_of
from fedncv.observatory.everyone import common_point, engine_for
from fedncv.observatory.shadow import states_along
from fedncv.tree import leaves

SIZES = (20, 13, 9, 18, 31)


def problem_of(method):
    return tiny(method, sizes=SIZES, per_round=2, rounds=4, epochs=1)


def path(method, rounds=4):
    problem = problem_of(method)
    return [common_point(problem, states[0]) for states in states_along(engine_for([problem]), rounds)]


def shadow(method, of, rounds=4):
    problem = problem_of(method)
    return problem, [states[0] for states in states_along(engine_for([problem]), rounds, [path(of)])]


@pytest.mark.parametrize("method", ["fedavg", "scaffold", FULL_FEDNCV, "fedvarp+momentum", "fedncv:average=0"])
def test_in_its_own_shadow_a_run_is_itself_bit_for_bit(method):
    _, followed = shadow(method, method)
    own = [states[0] for states in states_along(engine_for([problem_of(method)]), 4)]
    for one, other in zip(own, followed, strict=True):
        for (place, a), (_, b) in zip(leaves((one.server, one.kept)), leaves((other.server, other.kept)), strict=True):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)), (one.round, place)


def test_fedvarp_remembers_what_the_drawn_clients_would_have_sent_from_the_references_models():
    """FedVARP's clients train as FedAvg's, so h_u is the Delta_u of FedAvg's run in the last round that drew u."""
    _, states = shadow("fedvarp", "fedavg")
    reference = problem_of("fedavg")
    expected = {}
    for t, run in enumerate(states_along(engine_for([reference]), 3)):
        for arrival in arrivals(reference, run[0], draw(reference, t).ids):
            expected[arrival.client] = train(reference, t, arrival).up.delta_P
    assert_close(dict(states[-1].server.h), expected, rtol=0, atol=0)


def test_the_model_and_running_statistics_are_the_references_and_what_clients_keep_is_not():
    points = path("fedavg")
    _, states = shadow("scaffold", "fedavg")
    for state, point in zip(states, points, strict=True):
        assert torch.equal(state.server.x_P, point.x_P)
        assert torch.equal(state.buffers, point.buffers_R)
    c_NP = torch.stack([states[-1].kept[u].own for u in sorted(states[-1].kept)])
    assert_close(states[-1].server.c_P, c_NP.sum(dim=0) / len(SIZES))  # SCAFFOLD's invariant holds along any path
    assert float(c_NP.abs().max()) > 0


@pytest.mark.slow
def test_rows_come_for_every_method_seed_and_round_and_own_paths_differ_from_a_shared_one():
    config = tiny("fedavg").config.__class__(
        data="digits", model="mlp", clients=6, per_round=2, rounds=2, epochs=1, lr=0.05, batch_size=100, partition="iid"
    )
    configs = [replace(config, seed=seed) for seed in (0, 1)]
    settings = {"at": [2], "num_draws": 50, "within": False}
    shared = list(rows_of(configs, ["fedavg", "scaffold"], reference="fedavg", **settings))
    own = list(rows_of(configs, ["fedavg", "scaffold"], reference="own", **settings))
    keys = [(method, 2, seed) for method in ("fedavg", "scaffold") for seed in (0, 1)]
    assert [(row["method"], row["round"], row["seed"]) for row in shared] == keys
    assert [row["reference"] for row in own] == ["fedavg"] * 2 + ["scaffold"] * 2
    assert [row["mse"] for row in shared[:2]] == [row["mse"] for row in own[:2]]  # FedAvg is the reference
    assert shared[-1]["mse"] != own[-1]["mse"]
