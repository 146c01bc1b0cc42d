"""SAGA and SVRG tables: zero-mean corrections under the draw's weights, and a mean that stays true."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap
from torch.testing import assert_close

from fedncv.estimators import new_table, saga_direction, svrg_direction

PROPERTY = settings(deadline=None, max_examples=40, derandomize=True)
numbers = st.integers(-64, 64).map(lambda i: i / 8)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def batches(draw):
    """-> w_B of the batches' sizes, remembered a_BP, fresh g_BP."""
    B, P = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    n_B = tensor(draw(st.lists(st.integers(1, 9), min_size=B, max_size=B)))
    values = st.lists(numbers, min_size=B * P, max_size=B * P)
    return n_B / n_B.sum(), tensor(draw(values)).reshape(B, P), tensor(draw(values)).reshape(B, P)


@PROPERTY
@given(batches(), st.sampled_from([0.0, 0.5, 1.0]))
def test_directions_average_to_the_mean_gradient_under_the_draws_weights(parts, alpha):
    w_B, a_BP, g_BP = parts
    table = new_table(a_BP, w_B)
    index_B = torch.arange(len(w_B))
    z_BP = torch.stack([svrg_direction(table, b, g_P, alpha=alpha) for b, g_P in zip(index_B, g_BP, strict=True)])
    assert_close((w_B[:, None] * z_BP).sum(dim=0), (w_B[:, None] * g_BP).sum(dim=0))


@PROPERTY
@given(batches())
def test_a_current_table_with_alpha_one_has_no_variance(parts):
    w_B, _, g_BP = parts
    table = new_table(g_BP, w_B)
    for b, g_P in enumerate(g_BP):
        assert_close(svrg_direction(table, torch.tensor(b), g_P, alpha=1.0), (w_B[:, None] * g_BP).sum(dim=0))


@PROPERTY
@given(batches(), st.lists(st.integers(0, 4), max_size=6))
def test_saga_keeps_the_mean_of_its_table(parts, visits):
    w_B, a_BP, g_BP = parts
    table, expected_BP = new_table(a_BP, w_B), a_BP.clone()
    for k, b in enumerate(v % len(w_B) for v in visits):
        g_P = g_BP[b] + k
        z_P, after = saga_direction(table, w_B, torch.tensor(b), g_P, alpha=0.5)
        assert_close(z_P, svrg_direction(table, torch.tensor(b), g_P, alpha=0.5))
        expected_BP[b], table = g_P, after
    assert_close(table.a_BP, expected_BP)
    assert_close(table.mean_P, (w_B[:, None] * expected_BP).sum(dim=0))


def test_a_visit_by_hand():
    """w = (1/4, 3/4), a = (4, 8), ā = 7; visiting batch 0 with g = 10: z = 10 − 1/2 (4 − 7), ā ← 7 + 6/4."""
    w_B = tensor([0.25, 0.75])
    table = new_table(tensor([[4.0], [8.0]]), w_B)
    assert_close(table.mean_P, tensor([7.0]))
    z_P, table = saga_direction(table, w_B, torch.tensor(0), tensor([10.0]), alpha=0.5)
    assert_close(z_P, tensor([11.5]))
    assert_close(table.a_BP, tensor([[10.0], [8.0]]))
    assert_close(table.mean_P, tensor([8.5]))


def test_tables_vmap_over_clients_that_visit_different_batches():
    generator = torch.Generator().manual_seed(0)
    a_RBP, g_RBP = torch.randn(2, 3, 4, 2, generator=generator, dtype=torch.float64)
    w_RB, batch_R = torch.full((3, 4), 0.25, dtype=torch.float64), torch.tensor([3, 0, 1])

    def visit(a_BP, w_B, batch, g_P):
        z_P, table = saga_direction(new_table(a_BP, w_B), w_B, batch, g_P, alpha=0.3)
        return z_P, table.a_BP, table.mean_P, svrg_direction(table, batch, g_P, alpha=0.3)

    args = (a_RBP, w_RB, batch_R, g_RBP[:, 0])
    rows = [visit(*row) for row in zip(*args, strict=True)]
    assert_close(vmap(visit)(*args), tuple(torch.stack(z) for z in zip(*rows, strict=True)))


def test_bad_input_is_refused():
    table = new_table(torch.zeros(2, 3), torch.tensor([0.5, 0.5]))
    with pytest.raises(ValueError, match="sum to one, got 2"):
        new_table(torch.zeros(2, 3), torch.ones(2))
    with pytest.raises(ValueError, match="shapes differ"):
        svrg_direction(table, torch.tensor(0), torch.zeros(2), alpha=1.0)
