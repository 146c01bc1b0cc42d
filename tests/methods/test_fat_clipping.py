"""FAT-Clipping on f_u(x) = a_u/2 (x - b_u)^2 at x = 5: gradients 5 and 16; lr 0.05."""

import pytest
import torch
from federations import quadratics, tiny, train, vector
from torch.testing import assert_close

from fedncv.methods.fat_clipping import IterationConfig, RoundConfig, clip_factor


def test_every_gradient_is_clipped():
    """clip = 10: steps of 0.05 * 5 and 0.05 * 10."""
    assert_close(train(quadratics("fat_clipping_pi:clip=10", steps=1)).server.x_P, vector(5 - (0.25 + 0.5) / 2))


def test_in_every_iteration():
    """clip = 2, three steps: each moves by 0.1, the gradients staying above 2."""
    assert_close(train(quadratics("fat_clipping_pi:clip=2", steps=3)).server.x_P, vector(4.7))


def test_the_sum_of_a_rounds_gradients_is_clipped():
    """Two steps: the first client's gradients sum to 5 + 4.75 = 9.75, the second's to 16 + 12.8; clip = 12."""
    state = train(quadratics("fat_clipping_pr:clip=12", steps=2))
    assert_close(state.server.x_P, vector(5 - 0.05 * (9.75 + 12) / 2))


@pytest.mark.parametrize("which", ["pi", "pr"])
def test_the_server_step_scales_the_mean(which):
    problem = quadratics(f"fat_clipping_{which}:clip=2,server_lr=3", steps=1)
    assert_close(train(problem).server.x_P, vector(5 - 3 * 0.1))


def test_the_norm_is_that_of_the_whole_gradient():
    """||(3, 4)|| = 5."""
    assert_close(clip_factor(vector(3.0, 4.0), 2.0), vector(0.4)[0])
    assert clip_factor(vector(3.0, 4.0), 6.0) == 1


@pytest.mark.parametrize("clip", [1.0, float("inf")])
def test_a_gradient_of_zero_stays_zero(clip):
    assert clip_factor(torch.zeros(3), clip) == 1


def test_running_statistics_are_not_clipped():
    """However short the steps, they are averaged as FedAvg's: the first batch is the same, at the same model."""
    clipped, free = (tiny(t, epochs=1, batch_size=64) for t in ("fat_clipping_pr:clip=1e-9", "fedavg"))
    assert torch.equal(train(clipped).buffers, train(free).buffers)


@pytest.mark.parametrize("config", [IterationConfig, RoundConfig])
@pytest.mark.parametrize("text", ["clip=0", "server_lr=0", "server_lr=inf"])
def test_values_out_of_range_are_refused(config, text):
    name, value = text.split("=")
    with pytest.raises(ValueError, match=f"{name} must be above 0.*, not {value}"):
        config(**{name: float(value)})
