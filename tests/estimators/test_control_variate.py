"""The centred unit and the server's estimate: identities, limits, and every draw enumerated."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap
from torch.testing import assert_close

from fedncv.estimators import (
    centred,
    controlled,
    horvitz_thompson_weights,
    leave_one_out_mean,
    self_normalised_weights,
    server_estimate,
)

PROPERTY = settings(deadline=None, max_examples=40, derandomize=True)
numbers = st.integers(-64, 64).map(lambda i: i / 8)
betas = st.sampled_from([0.0, 0.3, 1.0, 1.7])


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def federations(draw):
    """-> n_N with zeros allowed, delta_NP, h_NP of which some clients were never seen, m drawn."""
    N, P = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    n_N = tensor(draw(st.lists(st.integers(0, 9), min_size=N, max_size=N).filter(any)))
    delta_NP, h_NP = (tensor(draw(st.lists(numbers, min_size=N * P, max_size=N * P))).reshape(N, P) for _ in range(2))
    seen_N = torch.tensor(draw(st.lists(st.booleans(), min_size=N, max_size=N)))
    return n_N, delta_NP, h_NP * seen_N[:, None], draw(st.integers(1, N))


@PROPERTY
@given(federations())
def test_the_centred_unit_is_the_scaled_leave_one_out_difference_and_has_mean_zero(federation):
    n_U, a_UP, _, _ = federation
    w_U = n_U / n_U.sum()
    d_UP = centred(a_UP, w_U)
    difference_UP = a_UP - leave_one_out_mean(a_UP, w_U)
    partly = w_U < 1  # where one unit holds all the weight, the difference is scaled by zero
    assert_close(d_UP[partly], ((1 - w_U)[:, None] * difference_UP)[partly])
    assert_close(d_UP[~partly], torch.zeros_like(d_UP[~partly]))
    assert_close((w_U[:, None] * d_UP).sum(dim=0), torch.zeros_like(d_UP[0]), atol=1e-13, rtol=0)


def test_centring_by_hand():
    assert_close(centred(tensor([[4.0], [8.0]]), tensor([0.25, 0.75])), tensor([[-3.0], [1.0]]))


def test_a_controlled_gradient_by_hand():
    assert_close(controlled(tensor([5.0]), tensor([3.0]), tensor([1.0]), alpha=0.5), tensor([4.0]))
    assert_close(controlled(tensor([5.0]), tensor([3.0]), tensor([1.0]), alpha=0.0), tensor([5.0]))


@PROPERTY
@given(federations(), betas)
def test_horvitz_thompson_is_unbiased_over_all_draws(federation, beta):
    n_N, delta_NP, h_NP, m = federation
    p_N, N = n_N / n_N.sum(), len(n_N)
    mean_h_P = (p_N[:, None] * h_NP).sum(dim=0)
    estimates = []
    for S in map(list, combinations(range(N), m)):
        omega_S = horvitz_thompson_weights(p_N[S], torch.full((m,), m / N, dtype=torch.float64))
        estimates.append(server_estimate(delta_NP[S], h_NP[S], omega_S, mean_h_P, beta=beta))
    assert_close(torch.stack(estimates).mean(dim=0), (p_N[:, None] * delta_NP).sum(dim=0))


def test_horvitz_thompson_is_unbiased_under_unequal_inclusion():
    """Draw {0,1} with 1/2, {1,2} with 1/3, {2} with 1/6: inclusion 1/2, 5/6, 1/2."""
    p_N, inclusion_N = tensor([0.2, 0.5, 0.3]), tensor([1 / 2, 5 / 6, 1 / 2])
    delta_NP, h_NP = tensor([[1.0], [-4.0], [6.0]]), tensor([[2.0], [0.0], [5.0]])
    mean_h_P = (p_N[:, None] * h_NP).sum(dim=0)
    mean_P = torch.zeros(1, dtype=torch.float64)
    for probability, S in ((1 / 2, [0, 1]), (1 / 3, [1, 2]), (1 / 6, [2])):
        omega_S = horvitz_thompson_weights(p_N[S], inclusion_N[S])
        mean_P += probability * server_estimate(delta_NP[S], h_NP[S], omega_S, mean_h_P, beta=0.7)
    assert_close(mean_P, tensor([0.2 * 1 - 0.5 * 4 + 0.3 * 6]))


@PROPERTY
@given(federations())
def test_perfect_memory_has_no_variance_whatever_the_weights(federation):
    n_N, delta_NP, _, m = federation
    p_N = n_N / n_N.sum()
    full_P = (p_N[:, None] * delta_NP).sum(dim=0)
    for S in map(list, combinations(range(len(n_N)), m)):
        estimate_P = server_estimate(delta_NP[S], delta_NP[S], self_normalised_weights(p_N[S]), full_P, beta=1.0)
        assert_close(estimate_P, full_P)


def test_beta_zero_is_fedavg_to_the_last_bit():
    generator = torch.Generator().manual_seed(0)
    delta_SP, h_SP = torch.randn(2, 7, 5, generator=generator)
    n_S = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0], dtype=torch.float64)
    fedavg_P = (n_S / n_S.sum()).float() @ delta_SP
    mean_h_P = torch.randn(5, generator=generator).double()
    estimate_P = server_estimate(delta_SP, h_SP, self_normalised_weights(n_S), mean_h_P, beta=0.0)
    assert estimate_P.dtype == torch.float32
    assert torch.equal(estimate_P, fedavg_P)


def test_beta_one_with_equal_sizes_is_fedvarp():
    """Jhunjhunwala et al. 2022: mean_S(Δ_u − h_u) + mean_N(h_v)."""
    delta_SP, h_NP = tensor([[1.0], [5.0]]), tensor([[2.0], [4.0], [9.0]])
    omega_S = horvitz_thompson_weights(tensor([1 / 3, 1 / 3]), tensor([2 / 3, 2 / 3]))
    estimate_P = server_estimate(delta_SP, h_NP[:2], omega_S, h_NP.mean(dim=0), beta=1.0)
    assert_close(estimate_P, tensor([((1 - 2) + (5 - 4)) / 2 + 5.0]))


def test_weights_by_hand_and_at_zero():
    assert_close(self_normalised_weights(tensor([0.1, 0.3])), tensor([0.25, 0.75]))
    assert_close(self_normalised_weights(tensor([0.0, 0.0])), tensor([0.0, 0.0]))
    assert_close(horvitz_thompson_weights(tensor([0.1, 0.0]), tensor([0.5, 1.0])), tensor([0.2, 0.0]))


def test_the_estimate_vmaps_over_seeds():
    generator = torch.Generator().manual_seed(1)
    delta_RSP, h_RSP = torch.randn(2, 3, 4, 2, generator=generator, dtype=torch.float64)
    p_RS, mean_h_RP = (
        torch.rand(3, 4, generator=generator).double(),
        torch.rand(3, 2, generator=generator).double(),
    )

    def round_estimate(delta_SP, h_SP, p_S, mean_h_P):
        inclusion_S = torch.full_like(p_S, 0.5)
        self_P = server_estimate(delta_SP, h_SP, self_normalised_weights(p_S), mean_h_P, beta=p_S[0])
        ht_P = server_estimate(delta_SP, h_SP, horvitz_thompson_weights(p_S, inclusion_S), mean_h_P, beta=1.0)
        return self_P + ht_P + centred(delta_SP, p_S / p_S.sum())[0]

    rows = zip(delta_RSP, h_RSP, p_RS, mean_h_RP, strict=True)
    stacked = torch.stack([round_estimate(*row) for row in rows])
    assert_close(vmap(round_estimate)(delta_RSP, h_RSP, p_RS, mean_h_RP), stacked)


@pytest.mark.parametrize("inclusion", [0.0, -0.5, 1.5])
def test_impossible_inclusion_probabilities_are_refused(inclusion):
    with pytest.raises(ValueError, match=str(inclusion)):
        horvitz_thompson_weights(tensor([0.5, 0.5]), tensor([0.5, inclusion]))


def test_bad_input_is_refused():
    one, two = tensor([[1.0]]), tensor([[1.0], [2.0]])
    half_S = tensor([0.5, 0.5])
    with pytest.raises(ValueError, match="sum to one, got 2"):
        centred(two, tensor([1.0, 1.0]))
    with pytest.raises(ValueError, match="shapes differ"):
        server_estimate(two, one, half_S, one[0], beta=1.0)
    with pytest.raises(ValueError, match="shapes differ"):
        server_estimate(two, two, half_S, tensor([1.0, 1.0]), beta=1.0)
    with pytest.raises(ValueError, match="2 units"):
        server_estimate(two, two, tensor([0.5]), one[0], beta=1.0)
    with pytest.raises(ValueError, match="shapes differ"):
        controlled(one[0], tensor([1.0, 2.0]), tensor([1.0, 2.0]), alpha=1.0)
    with pytest.raises(ValueError, match="shapes differ"):
        controlled(one[0], one[0], tensor([1.0, 2.0]), alpha=1.0)
    with pytest.raises(ValueError, match="shapes differ"):
        horvitz_thompson_weights(half_S, tensor([0.5]))
    with pytest.raises(ValueError, match=r"-0\.5"):
        horvitz_thompson_weights(-half_S, half_S)
    with pytest.raises(ValueError, match=r"-0\.5"):
        self_normalised_weights(-half_S)
