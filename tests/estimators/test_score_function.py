"""Score-function estimators on the Bernoulli toy, every outcome enumerated."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap
from torch.testing import assert_close

from fedncv.estimators import bernoulli_outcomes, bernoulli_score, double_control_variate, reinforce, rloo

PROPERTY = settings(deadline=None, max_examples=15, derandomize=True)
probabilities = st.sampled_from([0.125, 0.25, 0.5, 0.75])


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def f(x_D):
    """A curved function of two bits and its gradient is taken by autograd."""
    return (x_D * tensor([2.0, -1.0])).sum() + 3 * (x_D[0] - 0.25).square() * (x_D[1] + 1) + 5


def exact_gradient(mu_D):
    """∂/∂logit μ of Σ_x p(x) f(x), by autograd through the enumeration."""

    def mean(logit_D):
        x_OKD, probability_O = bernoulli_outcomes(torch.sigmoid(logit_D), num_samples=1)
        return (probability_O * vmap(f)(x_OKD[:, 0])).sum()

    return torch.func.grad(mean)(torch.logit(mu_D))


def moments(estimator, mu_D, *, num_samples):
    """-> mean_D and total variance of estimator(x_KD) over all outcomes."""
    x_OKD, probability_O = bernoulli_outcomes(mu_D, num_samples=num_samples)
    g_OD = vmap(estimator)(x_OKD)
    mean_D = (probability_O[:, None] * g_OD).sum(dim=0)
    return mean_D, (probability_O[:, None] * (g_OD - mean_D).square()).sum()


@PROPERTY
@given(st.tuples(probabilities, probabilities), st.integers(1, 3), st.sampled_from([-1.0, 0.0, 0.5, 1.0]))
def test_all_three_are_unbiased_for_every_alpha(mu, num_samples, alpha):
    mu_D = tensor(mu)
    exact_D = exact_gradient(mu_D)
    estimators = (
        lambda x_KD: reinforce(vmap(f)(x_KD), bernoulli_score(x_KD, mu_D)),
        lambda x_KD: rloo(vmap(f)(x_KD), bernoulli_score(x_KD, mu_D), alpha=alpha),
        lambda x_KD: double_control_variate(vmap(f)(x_KD), vmap(torch.func.grad(f))(x_KD), x_KD, mu_D, alpha=alpha),
    )
    for estimator in estimators:
        assert_close(moments(estimator, mu_D, num_samples=num_samples)[0], exact_D)


def test_outcomes_are_complete_and_weighted():
    x_OKD, probability_O = bernoulli_outcomes(tensor([0.25, 0.5]), num_samples=2)
    assert x_OKD.shape == (16, 2, 2)
    assert len({tuple(x.flatten().tolist()) for x in x_OKD}) == 16
    assert_close(probability_O.sum(), tensor(1.0))
    # x_1 = (1, 0), x_2 = (0, 0): 1/4 · 1/2 · 3/4 · 1/2
    row = (x_OKD == tensor([[1.0, 0.0], [0.0, 0.0]])).flatten(1).all(dim=1)
    assert_close(probability_O[row], tensor([3 / 64]))


def test_estimates_by_hand():
    """f = (6, 2), s = (1, −1/2): REINFORCE (6 − 1)/2; RLOO ((6 − 2)·1 + (2 − 6)·(−1/2))/2;
    at α = 1/2, ((6 − 1)·1 + (2 − 3)·(−1/2))/2."""
    f_K, score_KD = tensor([6.0, 2.0]), tensor([[1.0], [-0.5]])
    assert_close(reinforce(f_K, score_KD), tensor([2.5]))
    assert_close(rloo(f_K, score_KD), tensor([3.0]))
    assert_close(rloo(f_K, score_KD, alpha=0.5), tensor([2.75]))
    assert_close(rloo(f_K[:1], score_KD[:1]), reinforce(f_K[:1], score_KD[:1]))


def test_the_double_control_variate_by_hand():
    """x = (1, 0), μ = 1/4, ∇f = (2, 4), so b = (4 · 3/4, 2 · (−1/4)) = (3, −1/2), μ(1 − μ) = 3/16.
    α = 2: f + αb = (6 + 6, 2 − 1) = (12, 1), RLOO ((11)(3/4) + (−11)(−1/4))/2 = 11/2, less 2 · 3 · 3/16."""
    mu_D, x_KD = tensor([0.25]), tensor([[1.0], [0.0]])
    g_D = double_control_variate(tensor([6.0, 2.0]), tensor([[2.0], [4.0]]), x_KD, mu_D, alpha=2.0)
    assert_close(g_D, tensor([11 / 2 - 18 / 16]))


def test_a_linear_function_leaves_the_double_control_variate_no_variance():
    mu_D, slope_D = tensor([0.25, 0.75]), tensor([2.0, -3.0])

    def estimator(x_KD):
        return double_control_variate(x_KD @ slope_D + 7, slope_D.expand_as(x_KD), x_KD, mu_D, alpha=-1.0)

    mean_D, variance = moments(estimator, mu_D, num_samples=2)
    assert_close(mean_D, slope_D * mu_D * (1 - mu_D))
    assert_close(variance, tensor(0.0), atol=1e-24, rtol=0)


def test_alpha_zero_is_rloo_and_one_sample_is_reinforce():
    mu_D, x_KD = tensor([0.25, 0.75]), tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    f_K, df_KD, score_KD = vmap(f)(x_KD), vmap(torch.func.grad(f))(x_KD), bernoulli_score(x_KD, mu_D)
    assert_close(double_control_variate(f_K, df_KD, x_KD, mu_D, alpha=0.0), rloo(f_K, score_KD))
    one = double_control_variate(f_K[:1], df_KD[:1], x_KD[:1], mu_D, alpha=-1.0)
    assert_close(one, reinforce(f_K[:1], score_KD[:1]))


def test_bad_input_is_refused():
    for wrong in (torch.zeros(2), torch.zeros(3, 1)):
        for estimator in (reinforce, rloo):
            with pytest.raises(ValueError, match="each of 3 samples"):
                estimator(wrong, torch.zeros(3, 2))
    with pytest.raises(ValueError, match="shapes differ"):
        double_control_variate(torch.zeros(3), torch.zeros(3, 1), torch.zeros(3, 2), tensor([0.5, 0.5]), alpha=1.0)
    with pytest.raises(ValueError, match=r"-0\.5"):
        bernoulli_outcomes(tensor([-0.5]), num_samples=1)
