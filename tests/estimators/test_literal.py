"""The paper's rules: each against its definition, and what algebra says they amount to."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap
from torch.testing import assert_close

from fedncv.estimators import (
    alpha_step,
    client_gradient,
    networked_gradient,
    reshaped_gradients,
    sample_weights,
    server_gradient,
    server_weights,
)

PROPERTY = settings(deadline=None, max_examples=40, derandomize=True)
numbers = st.integers(-64, 64).map(lambda i: i / 8)
alphas = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def matrices(draw, rows):
    num_rows, P = draw(rows), draw(st.integers(1, 3))
    values = draw(st.lists(numbers, min_size=num_rows * P, max_size=num_rows * P))
    return tensor(values).reshape(num_rows, P)


@PROPERTY
@given(matrices(st.integers(2, 6)), alphas)
def test_the_client_rule_rescales_by_one_minus_alpha(g_IP, alpha):
    assert_close(reshaped_gradients(g_IP, alpha=alpha).mean(dim=0), (1 - alpha) * g_IP.mean(dim=0))


def test_reshaping_subtracts_alpha_times_the_mean_of_the_others():
    g_IP = tensor([[1.0], [2.0], [6.0]])
    assert_close(reshaped_gradients(g_IP, alpha=0.5), tensor([[-1.0], [0.25], [5.25]]))


@PROPERTY
@given(matrices(st.integers(2, 6)), alphas, st.data())
def test_algorithm_1_needs_no_sample_gradients(g_IP, alpha, data):
    """Three ways to Σ_i π_i g'_i: sample by sample, from q and ḡ, and as one weighted sum of gradients."""
    num = len(g_IP)
    raw = tensor(data.draw(st.lists(st.integers(1, 9), min_size=num, max_size=num)))
    pi_I = raw / raw.sum()
    by_sample = (pi_I[:, None] * reshaped_gradients(g_IP, alpha=alpha)).sum(dim=0)
    q_P = (pi_I[:, None] * g_IP).sum(dim=0)
    assert_close(client_gradient(q_P, g_IP.mean(dim=0), size=num, alpha=alpha), by_sample)
    kappa_I = sample_weights(pi_I, size=num, alpha=alpha)
    assert_close((kappa_I[:, None] * g_IP).sum(dim=0), by_sample)


def test_uniform_sampling_makes_algorithm_1_a_rescaling():
    mean_P = tensor([3.0, -1.0])
    assert_close(client_gradient(mean_P, mean_P, size=5, alpha=0.25), tensor([2.25, -0.75]))


def test_one_sample_has_no_control_variate():
    g_P = tensor([3.0])
    assert_close(client_gradient(g_P, g_P, size=1, alpha=0.5), g_P)
    assert_close(sample_weights(tensor([1.0]), size=1, alpha=0.5), tensor([1.0]))
    assert_close(reshaped_gradients(g_P[None], alpha=0.5), g_P[None])
    assert_close(alpha_step(tensor(0.5), g_P, g_P, size=1, lr=0.1), tensor(0.5))


def test_padding_is_told_by_the_size():
    """Two samples in a batch padded to three: κ_i = π_i − α (1 − π_i)."""
    kappa_I = sample_weights(tensor([0.25, 0.75, 0.0]), size=2, alpha=0.5)
    assert_close(kappa_I[:2], tensor([0.25 - 0.375, 0.75 - 0.125]))


@st.composite
def clients(draw):
    """-> list of sample gradients g_u_IP of one to three samples, two to four clients."""
    P = draw(st.integers(1, 2))
    counts = draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    values = st.lists(numbers, min_size=P, max_size=P)
    return [tensor(draw(st.lists(values, min_size=n, max_size=n))) for n in counts]


@PROPERTY
@given(clients(), alphas)
def test_double_equals_ncv(g_u_IP, alpha):
    """Eq. (Double), client means put into the server's rule, is eq. (NCV), the sum over samples."""
    n_U = tensor([len(g_IP) for g_IP in g_u_IP])
    g_UP = torch.stack([reshaped_gradients(g_IP, alpha=alpha).mean(dim=0) for g_IP in g_u_IP])
    assert_close(server_gradient(g_UP, n_U), networked_gradient(g_u_IP, alpha=alpha))


def test_ncv_by_hand():
    """n = 3, α = 1/2. Client one: 4 and 8 reshape to 0 and 6; client two: 5 alone stays.
    g = 1/3 (0 − 5 + 6 − 5 + 5 − (0 + 6)/2) = −2/3."""
    g = networked_gradient([tensor([[4.0], [8.0]]), tensor([[5.0]])], alpha=0.5)
    assert_close(g, tensor([-2 / 3]))


def test_one_client_alone_keeps_its_gradient():
    g_IP = tensor([[4.0], [8.0]])
    assert_close(networked_gradient([g_IP], alpha=0.5), tensor([3.0]))
    assert_close(server_gradient(tensor([[3.0]]), torch.tensor([7])), tensor([3.0]))
    assert_close(server_weights(tensor([7.0])), tensor([1.0]))
    assert_close(server_weights(tensor([7.0, 0.0])), tensor([1.0, 0.0]))


@PROPERTY
@given(matrices(st.integers(2, 6)), st.data())
def test_the_servers_weights_are_its_coefficients_and_sum_to_zero(g_UP, data):
    sizes = st.lists(st.integers(1, 20), min_size=len(g_UP), max_size=len(g_UP))
    n_U = tensor(data.draw(sizes))
    w_U = server_weights(n_U)
    assert_close((w_U[:, None] * g_UP).sum(dim=0), server_gradient(g_UP, n_U))
    assert_close(w_U.sum(), tensor(0.0), atol=1e-13, rtol=0)


def test_the_servers_weights_by_hand():
    """n = (1, 3): p_v w_v = p_v − p_u of the other = ∓1/2. n = (1, 1, 2): odds 1/3, 1/3, 1."""
    assert_close(server_weights(tensor([1.0, 3.0])), tensor([-0.5, 0.5]))
    assert_close(server_weights(tensor([1.0, 1.0, 2.0])), tensor([-1 / 12, -1 / 12, 1 / 6]))
    assert_close(server_weights(tensor([5.0, 5.0, 5.0])), tensor([0.0, 0.0, 0.0]))
    assert_close(server_gradient(tensor([[2.0], [10.0]]), torch.tensor([1, 3])), tensor([4.0]))


@PROPERTY
@given(matrices(st.just(2)), st.integers(2, 9), st.sampled_from([0.0, 0.3, 0.9]))
def test_the_alpha_step_descends_the_squared_norm(pair, size, alpha):
    q_P, mean_P = pair
    norm = lambda a: client_gradient(q_P, mean_P, size=size, alpha=a).square().sum()  # noqa: E731
    slope = torch.func.grad(norm)(tensor(alpha))
    assert_close(alpha_step(tensor(alpha), q_P, mean_P, size=size, lr=0.1), alpha - 0.1 * slope)


def test_with_uniform_sampling_alpha_goes_to_one():
    """1 − α shrinks by 1 − 2γ‖ḡ‖² = 1 − 2 · 0.1 · 2 = 0.6 a step."""
    mean_P, alpha = tensor([1.0, 1.0]), tensor(0.0)
    for k in range(1, 4):
        alpha = alpha_step(alpha, mean_P, mean_P, size=4, lr=0.1)
        assert_close(1 - alpha, tensor(0.6**k))


def test_the_rules_vmap_over_clients_of_unequal_size():
    q_UP, mean_UP = tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), tensor([[2.0, 0.0], [1.0, 1.0], [5.0, 6.0]])
    size_U, alpha_U = torch.tensor([2, 5, 1]), tensor([0.5, 0.1, 0.9])
    rule = lambda q, mean, n, a: client_gradient(q, mean, size=n, alpha=a)  # noqa: E731
    step = lambda q, mean, n, a: alpha_step(a, q, mean, size=n, lr=0.1)  # noqa: E731
    weigh = lambda q, n, a: sample_weights(q / q.sum(), size=n, alpha=a)  # noqa: E731
    for f, args in (
        (rule, (q_UP, mean_UP, size_U, alpha_U)),
        (step, (q_UP, mean_UP, size_U, alpha_U)),
        (weigh, (q_UP, size_U, alpha_U)),
    ):
        assert_close(vmap(f)(*args), torch.stack([f(*row) for row in zip(*args, strict=True)]))
    n_RU = tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
    g_RUP = torch.stack([q_UP, mean_UP])
    assert_close(
        vmap(server_gradient)(g_RUP, n_RU),
        torch.stack([server_gradient(g, n) for g, n in zip(g_RUP, n_RU, strict=True)]),
    )


def test_mismatched_shapes_and_negative_sizes_are_refused():
    with pytest.raises(ValueError, match="shapes differ"):
        client_gradient(tensor([1.0]), tensor([1.0, 2.0]), size=2, alpha=0.5)
    with pytest.raises(ValueError, match="shapes differ"):
        alpha_step(tensor(0.0), tensor([1.0]), tensor([1.0, 2.0]), size=2, lr=0.5)
    with pytest.raises(ValueError, match="-2"):
        server_weights(tensor([1.0, -2.0]))
    with pytest.raises(ValueError, match="2 units"):
        server_gradient(torch.zeros(2, 1), torch.ones(3))
