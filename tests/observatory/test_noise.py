"""Runs with scaled sampling noise: 1 is the run itself, 0 is full participation, and in between it is linear."""

import pytest
import torch
from federations import model_of, tiny, train
from torch.testing import assert_close

from fedncv.engine.round import draw
from fedncv.engine.sequential import SequentialEngine
from fedncv.observatory.noise import states_with_noise

UNEQUAL = (20, 13, 9, 18)


def run(text, scales, rounds, **config):
    engine = SequentialEngine([tiny(text, sizes=UNEQUAL, **config) for _ in scales])
    return list(states_with_noise(engine, scales, rounds))


@pytest.mark.parametrize("text", ["fedavg", "scaffold", "fedncv:momentum=off,average=off"])
def test_a_scale_of_one_is_the_run_itself(text):
    (state,) = run(text, [1.0], 4, per_round=2)[-1]
    assert torch.equal(model_of(state), model_of(train(tiny(text, sizes=UNEQUAL, per_round=2), rounds=4)))


def test_a_scale_of_zero_is_full_participation_without_running_statistics():
    """In the first round, whatever statistics the model has: all clients begin with the same ones."""
    (state,) = run("fedavg", [0.0], 1, per_round=1)[-1]
    assert_close(model_of(state), model_of(train(tiny("fedavg", sizes=UNEQUAL), rounds=1)), rtol=1e-10, atol=1e-12)


def test_the_step_is_linear_in_the_scale():
    states = run("fedavg+momentum", [0.0, 0.5, 1.0, 2.0], 1, per_round=2)[-1]
    none, half, one, two = (model_of(state) for state in states)
    assert not torch.allclose(none, one)
    assert_close(half - none, (one - none) / 2)
    assert_close(two - none, 2 * (one - none))


def test_only_clients_drawn_renew_what_is_remembered():
    problem = tiny("scaffold", sizes=UNEQUAL, per_round=1)
    drawn = {draw(problem, t).ids.item() for t in range(2)}
    for state in run("scaffold", [0.0, 1.0, 2.0], 2, per_round=1)[-1]:
        assert set(state.kept) == drawn


@pytest.mark.parametrize(("scales", "why"), [([-1.0], "at least 0"), ([1.0, 1.0], "as many scales")])
def test_wrong_scales_are_refused(scales, why):
    engine = SequentialEngine([tiny("fedavg")])
    with pytest.raises(ValueError, match=why):
        next(states_with_noise(engine, scales, 1))


def test_a_method_without_a_shared_model_is_refused():
    with pytest.raises(ValueError, match="no model that all clients share"):
        run("fedper", [0.5], 1)
