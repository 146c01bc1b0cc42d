"""The accountant against closed forms: what one round spends, what many do, and the noise that a budget needs."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedncv import accountant
from fedncv.accountant import Release, epsilon, least_noise, rounds_within

DELTA = 1e-5


def solved(delta_of):
    """The epsilon at which a decreasing delta is DELTA."""
    return brentq(lambda e: delta_of(e) - DELTA, 1e-9, 200, xtol=1e-12)


def gaussian(noise):
    """Balle and Wang, theorem 8: delta = Phi(1/2s - e s) - exp(e) Phi(-1/2s - e s)."""
    return solved(lambda e: norm.cdf(0.5 / noise - e * noise) - math.exp(e) * norm.cdf(-0.5 / noise - e * noise))


def one_poisson_round(q, noise):
    """The hockey-stick divergence of (1-q) N(0,s^2) + q N(1,s^2) and N(0,s^2), both ways, by where they meet."""

    def removed(e):
        x = noise**2 * math.log((math.exp(e) - 1 + q) / q) + 0.5
        mixture = (1 - q) * norm.sf(x / noise) + q * norm.sf((x - 1) / noise)
        return mixture - math.exp(e) * norm.sf(x / noise)

    def added(e):
        if math.exp(-e) <= 1 - q:
            return 0.0
        x = noise**2 * math.log((math.exp(-e) - 1 + q) / q) + 0.5
        mixture = (1 - q) * norm.cdf(x / noise) + q * norm.cdf((x - 1) / noise)
        return norm.cdf(x / noise) - math.exp(e) * mixture

    return solved(lambda e: max(removed(e), added(e)))


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (5.0, 10), (20.0, 100)])
def test_without_sampling_it_is_the_gaussian_mechanism(noise, rounds):
    """T rounds of noise z are one of z / sqrt(T); a replaced client moves the sum twice as far."""
    assert epsilon(Release(noise, 7, 7, False), rounds, DELTA) == pytest.approx(gaussian(noise / rounds**0.5), rel=1e-6)
    replaced = epsilon(Release(2 * noise, 7, 7, True), rounds, DELTA)
    assert replaced == pytest.approx(gaussian(noise / rounds**0.5), rel=1e-6)


@pytest.mark.parametrize(("q", "noise"), [(0.01, 0.7), (0.1, 1.0), (0.5, 2.0)])
def test_one_poisson_round_is_the_closed_form(q, noise):
    found = epsilon(Release(noise, round(1000 * q), 1000, False), 1, DELTA)
    exact = one_poisson_round(q, noise)
    assert exact <= found <= exact + 2e-3


def test_little_spending_is_not_lost_in_the_rounding_of_losses():
    """1,000 rounds of noise 20 and share 0.01 spend 0.055; with losses rounded up to 1e-3 it would be 0.073."""
    release = Release(20.0, 100, 10_000, False)
    assert epsilon(release, 1000, 1e-6) < epsilon(release, 1000, 1e-6, "rdp") < 0.065


def test_two_poisson_rounds_are_the_integral_over_both():
    """delta = sum max(0, p(x) p(y) - exp(e) q(x) q(y)) on a fine grid, and the other way round."""
    q, noise = 0.2, 1.5
    x = np.linspace(-12, 14, 1301)
    step = x[1] - x[0]
    low = norm.pdf(x, 0, noise) * step
    high = (1 - q) * low + q * norm.pdf(x, 1, noise) * step
    both = [(np.outer(high, high), np.outer(low, low)), (np.outer(low, low), np.outer(high, high))]
    exact = solved(lambda e: max(np.maximum(a - math.exp(e) * b, 0).sum() for a, b in both))
    assert epsilon(Release(noise, 200, 1000, False), 2, DELTA) == pytest.approx(exact, abs=4e-3)


def test_renyi_differences_of_poisson_rounds_are_the_binomial_sum():
    """At whole orders: log sum_k C(a,k) (1-q)^(a-k) q^k exp((k^2-k) / 2 s^2) / (a-1); Mironov 2019, section 3.3."""
    q, noise, rounds = 0.05, 1.2, 60
    bounds = []
    for a in range(2, 33):
        drawn = [math.comb(a, k) * (1 - q) ** (a - k) * q**k for k in range(a + 1)]
        moment = sum(p * math.exp((k * k - k) / 2 / noise**2) for k, p in enumerate(drawn))
        rdp = rounds * math.log(moment) / (a - 1)
        bounds.append(rdp + math.log1p(-1 / a) - math.log(DELTA * a) / (a - 1))
    release = Release(noise, 50, 1000, False)
    assert epsilon(release, rounds, DELTA, "rdp") == pytest.approx(min(bounds), rel=1e-9)
    assert epsilon(release, rounds, DELTA) < min(bounds)


def test_a_fixed_number_of_clients_has_the_bound_of_wang_for_twice_the_sensitivity():
    """Order 2: log(1 + q^2 min(4 (exp e - 1), 2 exp e)), e = 2 / (2 (z/2)^2)."""
    q, noise = 0.1, 3.0
    orders, rdp = accountant._divergences(Release(noise, 10, 100, True))
    e = 1 / (noise / 2) ** 2
    expected = math.log(1 + q**2 * min(4 * math.expm1(e), 2 * math.exp(e)))
    assert rdp[list(orders).index(2)] == pytest.approx(expected, rel=1e-9)


def test_the_bound_for_a_fixed_number_is_above_what_two_neighbours_show():
    """One client with +1 or -1: (1-q) N(0,s^2) + q N(1,s^2) against the same with -1."""
    q, noise = 0.2, 2.0
    x = np.linspace(-40, 40, 400_001)
    step = x[1] - x[0]
    base = (1 - q) * norm.pdf(x, 0, noise)
    p, r = base + q * norm.pdf(x, 1, noise), base + q * norm.pdf(x, -1, noise)
    shown = solved(lambda e: np.maximum(p - math.exp(e) * r, 0).sum() * step)
    assert shown < epsilon(Release(noise, 20, 100, True), 1, DELTA)


@pytest.mark.parametrize("replace", [False, True])
def test_it_grows_with_rounds_and_with_the_share_and_falls_with_the_noise(replace):
    def of(noise=2.0, drawn=10, rounds=20):
        return epsilon(Release(noise, drawn, 100, replace), rounds, DELTA)

    assert 0 == of(rounds=0) < of(rounds=1) < of(rounds=20) < of(rounds=40)
    assert of(drawn=5) < of(drawn=10) < of(drawn=20)
    assert of(noise=4.0) < of(noise=2.0) < of(noise=1.0)
    assert of(noise=0) == math.inf


def test_sampling_amplifies_and_poisson_with_everybody_is_no_sampling():
    assert epsilon(Release(2.0, 10, 100, False), 20, DELTA) < epsilon(Release(2.0, 100, 100, False), 20, DELTA)
    almost = epsilon(Release(2.0, 99_999, 100_000, False), 20, DELTA)
    assert almost == pytest.approx(epsilon(Release(2.0, 1, 1, False), 20, DELTA), rel=1e-3)


@pytest.mark.parametrize("budget", [1.0, pytest.param(8.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "release",
    [
        Release(0, 10, 100, False),
        pytest.param(Release(0, 10, 100, True), marks=pytest.mark.slow),
        Release(0, 100, 100, True),
    ],
)
def test_the_noise_that_is_found_is_enough_and_hardly_more(release, budget):
    noise = least_noise(release, 30, budget=budget, delta=DELTA)
    assert epsilon(release._replace(noise=noise), 30, DELTA) <= budget
    assert epsilon(release._replace(noise=noise / 1.003), 30, DELTA) > budget


def test_no_rounds_and_no_budget_need_no_noise():
    assert least_noise(Release(0, 1, 10, False), 0, budget=1.0, delta=DELTA) == 0
    assert least_noise(Release(0, 1, 10, False), 5, budget=math.inf, delta=DELTA) == 0


def test_a_budget_that_no_noise_keeps_is_refused():
    with pytest.raises(ValueError, match="epsilon 1e-09 at delta 1e-05 would need noise of more than 10000"):
        least_noise(Release(0, 10, 10, False), 10, budget=1e-9, delta=DELTA)


@pytest.mark.parametrize(("budget", "rounds"), [(0.4, 0), (0.5, 1), (3.2, 6), (49.9, 99), (50.0, 100), (1e9, 100)])
def test_the_rounds_within_a_budget(budget, rounds):
    assert rounds_within(lambda t: 0.5 * t, budget, 100) == rounds
