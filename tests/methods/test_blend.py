"""Blend: predict between the received and the trained model."""

import pytest
import torch
from federations import everyone, model_of, tiny, train
from torch.testing import assert_close

from fedncv.engine import evaluate
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals
from fedncv.methods import find_method


@pytest.mark.parametrize(("blend", "share"), [(0.5, 1 / 2), (1, 1 / 3)])  # 1 / (1 + blend * 2) after two rounds
def test_blend_changes_only_what_is_predicted_after_training(blend, share):
    whole, half = tiny("fedncv:blend=0"), tiny(f"fedncv:blend={blend}")
    state = train(whole, rounds=2)
    assert torch.equal(model_of(state), model_of(train(half, rounds=2)))
    assert evaluate.before(whole, state) == evaluate.before(half, state)
    (arrival,) = arrivals(half, state, everyone(0).ids)
    trained = train_client(half, 2, arrival)
    ask = half.ask(0, trained.buffers_R, 2, received_R=arrival.buffers_R)
    predicted = half.method.predict(ask, trained.y_P, arrival.down, trained.kept.own)
    assert_close(predicted.x_P, (1 - share) * arrival.down.down.x_P + share * trained.y_P)
    assert_close(predicted.buffers_R, (1 - share) * arrival.buffers_R + share * trained.buffers_R)


def test_a_rate_of_zero_is_the_method_itself():
    assert find_method("fedavg+blend:rate=0").switches == ()


@pytest.mark.parametrize("rate", ["-1", "inf", "nan"])
def test_a_rate_out_of_range_is_refused(rate):
    with pytest.raises(ValueError, match=f"rate must be at least 0 and finite, not {rate}"):
        find_method(f"fedavg+blend:rate={rate}")
