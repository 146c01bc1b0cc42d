"""FedNCV as printed: the cancellations that docs/theory.md proves, in the running method."""

import pytest
import torch
from federations import everyone, quadratics, tiny, train
from torch.testing import assert_close

from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.methods import find_method
from fedncv.methods.base import Ask, Batch


@pytest.mark.parametrize("sampling", ["uniform", "likelihood"])
def test_with_equal_sizes_the_model_never_moves(sampling):
    problem = tiny(f"fedncv-paper:sampling={sampling}", sizes=(12,) * 3)
    assert_close(train(problem, rounds=3).server.x_P, problem.model.start_P, rtol=0, atol=1e-14)


def test_small_clients_push_the_model_the_wrong_way():
    """Sizes 1 and 3 of one f = (x - 0)^2/2: p = (1/4, 3/4), weights w = 1 - p_v/(1 - p_v) of the other: -2 and 2/3.

    p w = (-1/2, 1/2): the server's step is (Delta_2 - Delta_1) / 2. With alpha = 0 both clients make the same
    update when they agree, and it cancels; with different optima the model moves by half the difference.
    """
    agree = quadratics("fedncv-paper:alpha=0,gamma=0,sampling=uniform", a=(1, 1), b=(0, 0), sizes=[1, 3], steps=1)
    assert float(train(agree).server.x_P) == pytest.approx(5.0)
    differ = quadratics("fedncv-paper:alpha=0,gamma=0,sampling=uniform", a=(1, 4), b=(0, 1), sizes=[1, 3], steps=1)
    assert float(train(differ).server.x_P) == pytest.approx(5 - (0.05 * 16 - 0.05 * 5) / 2)


def test_with_uniform_weights_the_clients_rule_is_a_rescaling():
    """(1 - alpha) times the plain gradient; a batch of one has nothing to leave out and keeps all of it."""
    for size, factor in ((4, 1 - 0.3), (1, 1.0)):
        problem = quadratics("fedncv-paper:alpha=0.3,sampling=uniform", a=(2,), b=(1,), sizes=[size], steps=1)
        (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
        delta = train_client(problem, 0, arrival).up.delta_P
        assert float(delta) == pytest.approx(0.05 * factor * 2 * (5 - 1))


def test_alpha_is_driven_to_one_where_the_gradient_vanishes():
    """1 - alpha <- (1 - alpha)(1 - 2 gamma ||g||^2) with g = 8: gamma = 1/1280 shrinks it by 0.9 a round."""
    problem = quadratics(
        "fedncv-paper:alpha=0.5,gamma=0.00078125,sampling=uniform", a=(2, 2), b=(1, 1), sizes=[4, 4], steps=1
    )
    state = start(problem)
    for expected in (0.5, 0.5 * 0.9, 0.5 * 0.81):
        assert (1 - state.server.alpha_N).tolist() == pytest.approx([expected] * 2)
        state = train(problem, state=state)  # equal sizes: x stays, so the gradient does


def test_likelihood_weights_follow_the_models_own_probabilities():
    """g_B = sum_i pi_i (g_i - alpha mean of the others), sample by sample, pi_i ~ exp(-loss_i), padding left out."""
    problem = tiny("fedncv-paper:alpha=0.4,sampling=likelihood", sizes=(20,))
    method, dataset = problem.method, problem.dataset
    rows = problem.clients.train[0][:5]
    x, y = dataset.x[rows], dataset.y[rows]
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)

    def ask():
        like = problem.ask(0, arrival.buffers_R, 0)
        known = {"client": like.client, "round": 0, "key": like.key, "num_batches": like.num_batches, "batch_size": 5}
        # in training mode BatchNorm would let samples see each other
        return Ask(problem.model, problem.task, arrival.buffers_R, mode="eval", **known)

    def gradient(i):
        one = Batch(x[i : i + 1], y[i : i + 1], torch.ones(1, dtype=x.dtype), 0)
        return ask().grad(problem.model.start_P, one), float(ask().loss(problem.model.start_P, one))

    g, losses = zip(*(gradient(i) for i in range(5)), strict=True)
    pi = torch.softmax(-torch.tensor(losses, dtype=x.dtype), dim=0)
    others = [(sum(g) - g[i]) / 4 for i in range(5)]
    expected = sum(pi[i] * (g[i] - 0.4 * others[i]) for i in range(5))
    assert pi.max() - pi.min() > 0.01

    real = ask()
    weight = torch.tensor([1.0] * 5 + [0.0] * 3, dtype=x.dtype)
    padded = Batch(torch.cat([x, x[:3] * 100]), torch.cat([y, y[:3]]), weight, 0)
    y_P, scratch = method.begin(real, arrival.down, ())
    original = real.forward
    real.__dict__["forward"] = lambda p, b, mode=None: original(p, b, mode="eval")
    result, slope = method.direction(real, y_P, padded, arrival.down, (), scratch)
    assert_close(result, expected, rtol=1e-10, atol=1e-12)
    # g_B = q - alpha c, so d||g_B||^2 / d alpha = -2 <c, g_B>
    c = sum(pi[i] * others[i] for i in range(5))
    assert_close(slope.total, -2 * (c @ expected), rtol=1e-10, atol=1e-12)


def test_with_uniform_weights_samples_that_differ_count_alike():
    problem = tiny("fedncv-paper:alpha=0.4,sampling=uniform", sizes=(20,))
    rows = problem.clients.train[0][:5]
    batch = Batch(problem.dataset.x[rows], problem.dataset.y[rows], torch.ones(5, dtype=torch.float64), 0)
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    plain, ours = (problem.ask(0, arrival.buffers_R, 0) for _ in range(2))
    y_P, scratch = problem.method.begin(ours, arrival.down, ())
    g_P, _ = problem.method.direction(ours, y_P, batch, arrival.down, (), scratch)
    assert_close(g_P, 0.6 * plain.grad(y_P, batch), rtol=1e-10, atol=1e-12)


def test_the_slope_that_is_sent_is_the_mean_over_the_steps():
    """alpha = 1/2, gradients 8, then 2 (4.8 - 1): -2 (1 - alpha) g^2 is -64, then -57.76."""
    problem = quadratics("fedncv-paper:alpha=0.5", a=(2,), b=(1,), sizes=[4], steps=2)
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    assert float(train_client(problem, 0, arrival).up.slope) == pytest.approx(-(64 + 57.76) / 2)


def test_alpha_stays_between_zero_and_one():
    """A step of 2 gamma ||g||^2 = 12.8 would throw 1 - alpha to -5.9."""
    problem = quadratics("fedncv-paper:gamma=0.1,sampling=uniform", a=(2, 2), b=(1, 1), sizes=[4, 4], steps=1)
    assert train(problem).server.alpha_N.tolist() == [1, 1]


@pytest.mark.parametrize("text", ["alpha=-0.1", "alpha=1.1", "gamma=-1"])
def test_values_out_of_range_are_refused(text):
    name, value = text.split("=")
    with pytest.raises(ValueError, match=f"{name} must be .*, not {value}"):
        find_method(f"fedncv-paper:{text}")


@pytest.mark.parametrize("alpha", [0, 0.5, 1])
def test_without_a_step_alpha_stays_where_it_began(alpha):
    """Also at the ends of its range."""
    problem = quadratics(f"fedncv-paper:alpha={alpha},gamma=0", a=(2, 2), b=(1, 1), sizes=[4, 4], steps=1)
    assert train(problem).server.alpha_N.tolist() == [alpha, alpha]
