"""SCAFFOLD on two clients f_u(x) = a_u/2 (x - b_u)^2, a = (1, 4), b = (0, 1): the joint optimum is 0.8."""

import pytest
import torch
from federations import model_of, quadratics, tiny, train, vector
from torch.testing import assert_close

from fedncv.engine.problem import Kept, start
from fedncv.methods import find_method

OPTIONS = ["scaffold", "scaffold:option=I"]


def begun(problem, *, c=0.0, c_u=(0.0, 0.0)):
    """The start, with these control variates."""
    state = start(problem)
    kept = {u: Kept(vector(value), problem.model.start_R[:0]) for u, value in enumerate(c_u)}
    return state._replace(server=state.server._replace(c_P=vector(c)), kept=kept)


def own(state):
    return torch.cat([state.kept[u].own for u in sorted(state.kept)])


@pytest.mark.parametrize("text", OPTIONS)
def test_after_one_full_batch_step_the_control_variate_is_the_local_gradient(text):
    """Option II with K = 1: c_u' = c_u - c + (g - c_u + c) = g. Pins every sign at once."""
    problem = quadratics(text, steps=1)
    state = train(problem, state=begun(problem, c=0.3, c_u=(1.0, -2.0)))
    assert_close(own(state), vector(5.0, 16.0))  # a_u (x - b_u) at x = 5


@pytest.mark.parametrize("text", OPTIONS)
def test_a_corrected_step_by_hand(text):
    """y_u = 5 - 0.05 (g_u - c_u + c): with g = (5, 16), c_u = (1, -2), c = 0.3 the mean moves by 0.05 * 11.3."""
    problem = quadratics(text, steps=1)
    state = train(problem, state=begun(problem, c=0.3, c_u=(1.0, -2.0)))
    assert_close(state.server.x_P, vector(5 - 0.05 * (4.3 + 18.3) / 2))


def test_option_two_over_three_steps_is_the_mean_gradient_of_the_path():
    """c = c_u = 0: c_u' = (x - y) / (3 lr) = (g_0 + g_1 + g_2) / 3 = a (x - b) (1 + q + q^2) / 3, q = 1 - lr a."""
    problem = quadratics("scaffold", steps=3)
    expected = 5 * (1 + 0.95 + 0.95**2) / 3, 16 * (1 + 0.8 + 0.8**2) / 3
    assert_close(own(train(problem)), vector(*expected))


def test_option_one_is_the_gradient_at_the_received_model_whatever_the_batches():
    """Three steps of training change nothing; batches of unequal size count by their samples."""
    problem = quadratics("scaffold:option=I", sizes=[3, 3], steps=1, batch_size=2)
    assert_close(own(train(problem)), vector(5.0, 16.0))


def test_option_one_costs_one_pass_over_the_data_more():
    """Two clients of one sample, three epochs: 2 * 4 gradients instead of 2 * 3."""
    assert train(quadratics("scaffold", steps=3)).totals.gradients == 6
    assert train(quadratics("scaffold:option=I", steps=3)).totals.gradients == 8


@pytest.mark.parametrize("text", OPTIONS)
def test_the_server_control_variate_stays_the_mean_of_the_clients(text):
    """One of three clients a round: the absent ones count, with what they have."""
    problem = quadratics(text, a=(1.0, 4.0, 2.0), b=(0.0, 1.0, 3.0), steps=3)
    state = train(problem, ids=[1], rounds=2)
    assert_close(state.server.c_P, own(state).sum(0, keepdim=True) / 3)
    state = train(problem, ids=[0, 2], state=state)
    assert_close(state.server.c_P, own(state).sum(0, keepdim=True) / 3)


@pytest.mark.parametrize("text", OPTIONS)
def test_reaches_the_optimum_that_fedavg_drifts_away_from(text):
    assert_close(train(quadratics(text, x=1.0), rounds=40).server.x_P, vector(0.8), atol=1e-5, rtol=0)


def test_clients_count_alike_and_the_server_step_scales_their_mean():
    """sizes (1, 3), server_lr 0.5, K = 1: x' = 5 - 0.5 * 0.05 (5 + 16)/2."""
    problem = quadratics("scaffold:server_lr=0.5", steps=1, sizes=[1, 3])
    assert_close(train(problem).server.x_P, vector(5 - 0.5 * 0.05 * 10.5))


def test_without_control_variates_and_with_equal_sizes_it_is_fedavg():
    ours, theirs = (tiny(name, sizes=(16, 16, 16)) for name in ("scaffold", "fedavg"))
    assert_close(train(ours).server.x_P, train(theirs).server.x_P, rtol=1e-12, atol=1e-12)


def test_with_momentum_the_mean_gradient_counts_gradients_as_often_as_they_are_used():
    """K = 2, momentum 0.5, gradients g and g': x - y = lr (1.5 g + g'), c_u' = (1.5 g + g') / 2.5."""
    problem = quadratics("scaffold", steps=2, momentum=0.5, a=(1.0,), b=(0.0,))
    assert_close(own(train(problem)), vector((1.5 * 5 + 4.75) / 2.5))


def test_a_server_step_of_zero_is_refused():
    with pytest.raises(ValueError, match="server_lr must be above 0 and finite, not 0"):
        find_method("scaffold:server_lr=0")


def test_with_samples_as_weights_c_is_the_clients_mean_by_samples():
    """One of three clients a round: the absent ones count with what they have, each by its samples."""
    problem = quadratics(
        "scaffold:weights=samples", a=(1.0, 4.0, 2.0), b=(0.0, 1.0, 3.0), sizes=[1, 3, 2], steps=3, batch_size=4
    )
    n_U = problem.federation.sizes_N.to(problem.dtype)
    state = train(problem, ids=[1], rounds=2)
    assert_close(state.server.c_P, own(state)[:1] * n_U[1] / n_U.sum())
    state = train(problem, ids=[0, 2], state=state)
    assert_close(state.server.c_P, (n_U @ own(state) / n_U.sum())[None])


def test_with_samples_as_weights_the_model_moves_by_the_mean_by_samples():
    """Sizes 1 and 3: y_u = 5 - 0.05 (g_u - c_u + c), and x moves by 0.05 (4.3 + 3 * 18.3) / 4."""
    problem = quadratics("scaffold:weights=samples", sizes=[1, 3], steps=1, batch_size=4)
    state = train(problem, state=begun(problem, c=0.3, c_u=(1.0, -2.0)))
    assert_close(state.server.x_P, vector(5 - 0.05 * (4.3 + 3 * 18.3) / 4))


def test_with_samples_as_weights_it_is_drift_at_the_clients_once_all_have_been_seen():
    """With equal c_u and c_bar both correct alike: two rounds from the same memory end at one model."""
    texts = ("scaffold:weights=samples", "fedavg+drift:memory=clients")
    ends = []
    for text in texts:
        problem = quadratics(text, sizes=[1, 3], steps=2, batch_size=4)
        ends.append(model_of(train(problem, rounds=6)))
    assert_close(*ends)
