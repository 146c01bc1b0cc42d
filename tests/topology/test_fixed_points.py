"""Where methods come to rest on parabolas f_u = a_u/2 (x - b_u)^2, on every graph that stays the same.

A client's K local steps move it by m_u (x - b_u), m_u = 1 - (1 - lr a_u)^K. So D-PSGD rests where
x = W (x - M (x - b)), a linear system. Methods that track rest at the optimum of the sum, sum a b / sum a, for any K.

On parabolas a round is an affine map of the state, z <- P z + q. The engine's own rounds give P and q, a round for
every number of the state; then thousands of rounds are a power of a matrix.
"""

import numpy as np
import pytest
import torch
from parabolas import OPTIMUM, SAMPLES, WEIGHT, A, B, W_of, models, on

from fedncv.engine.problem import start
from fedncv.engine.sequential import run_round
from fedncv.tree import leaves, tree_map

LR = 0.15
FIXED = ["ring", "chain", "tree", "star", "torus", "exponential", "random_regular:degree=3", "erdos_renyi:p=0.5",
         "complete"]  # fmt: skip
CONSTANT = ("size", "seen", "total_step", "c_E")  # numbers of the state that no longer change after some rounds


def with_graphs(*quick):
    return pytest.mark.parametrize(
        "text", [text if text in quick else pytest.param(text, marks=pytest.mark.slow) for text in FIXED]
    )


def vector(state):
    return np.concatenate([leaf.reshape(-1).numpy() for leaf in moving(state)])


def moving(state):
    tree = (state.server, state.kept)
    return [x for path, x in leaves(tree) if torch.is_tensor(x) and path.rpartition(".")[2] not in CONSTANT]


def with_vector(state, z):
    """The state with these numbers in place of those that move."""
    mine = {id(leaf) for leaf in moving(state)}
    parts = iter(np.split(z, np.cumsum([leaf.numel() for leaf in moving(state)])))

    def fill(leaf):
        return torch.from_numpy(next(parts)).reshape(leaf.shape) if id(leaf) in mine else leaf

    server, kept = tree_map(fill, (state.server, state.kept))
    return state._replace(server=server, kept=kept)


def rest(method, text, *, steps=1, sizes=None):
    """The clients' models after 2^12 rounds, and the largest eigenvalue that is not 1 of a round."""
    problem = on(text, method, lr=LR, steps=steps, sizes=sizes)
    state = start(problem)
    for _ in range(7):  # all flags are set, and relayed sums have arrived
        state, _ = run_round(problem, state)
    if "size" in str(state.server):  # of the samples behind a tracked sum: mixed to their total
        state = state._replace(server=tree_map(settled(sum(sizes or [1] * 6)), state.server))
    z = vector(state)

    def after(z):
        return vector(run_round(problem, with_vector(state, z))[0])

    q = after(np.zeros_like(z))
    P = np.stack([after(e) - q for e in np.eye(len(z))], axis=1)
    np.testing.assert_allclose(after(z), P @ z + q, atol=1e-10)  # it is affine
    step = np.block([[P, q[:, None]], [np.zeros((1, len(z))), np.ones((1, 1))]])
    eigenvalues = np.abs(np.linalg.eigvals(P))
    power = np.linalg.matrix_power(step, 2**12)
    found = (power @ np.append(z, 1.0))[:-1]
    return models(with_vector(state, found)), eigenvalues[eigenvalues < 1 - 1e-9].max(), eigenvalues.max()


def settled(samples):
    def change(leaf):
        return torch.full_like(leaf, samples) if leaf.dim() == 1 else leaf

    return change


def rests_at(found, expected, atol=1e-8):
    """It comes to rest, from anywhere near, at these models."""
    x, slowest, largest = found
    assert largest <= 1 + 1e-9
    assert slowest < 1
    np.testing.assert_allclose(x, expected, atol=atol)


def shares(steps):
    return 1 - (1 - LR * np.array(A)) ** steps


@with_graphs("ring", "star")
@pytest.mark.parametrize(("steps", "sizes"), [(1, None), pytest.param(3, SAMPLES, marks=pytest.mark.slow)])
def test_d_psgd_rests_where_the_linear_system_says_and_not_at_the_optimum(text, steps, sizes):
    weight = np.ones(6) if sizes is None else WEIGHT
    M, W = np.diag(weight * shares(steps)), W_of(text, 6)
    expected = np.linalg.solve(np.eye(6) - W + W @ M, W @ M @ np.array(B))
    found = rest("fedavg", text, steps=steps, sizes=sizes)
    rests_at(found, expected)
    if text != "complete":
        assert np.abs(found[0] - OPTIMUM).max() > 0.05
        assert found[0].std() > 0.02  # the clients do not even agree


@with_graphs("ring")
@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("method", ["scaffold", pytest.param("fedavg+drift:memory=clients", marks=pytest.mark.slow)])
def test_tracking_rests_at_the_optimum_with_any_number_of_local_steps(method, text, steps):
    rests_at(rest(method, text, steps=steps), OPTIMUM)


@pytest.mark.slow
@with_graphs()
def test_tracking_by_samples_rests_at_the_optimum_of_all_samples(text):
    """fedncv-sums without its other parts: clients count by their samples."""
    a = np.array(A) * SAMPLES
    rests_at(rest("fedavg+drift:memory=clients", text, steps=1, sizes=SAMPLES), np.dot(a, B) / a.sum())


@with_graphs("ring")
@pytest.mark.parametrize("steps", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_d2_rests_at_the_optimum_with_one_step_and_where_a_server_would_with_several(text, steps):
    m = shares(steps)
    rests_at(rest("d2", text, steps=steps), OPTIMUM if steps == 1 else np.dot(m, B) / m.sum())


@pytest.mark.parametrize("text", ["chain", *(pytest.param(text, marks=pytest.mark.slow) for text in ("star", "tree"))])
@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_relaysgd_rests_where_a_server_would(text, steps):
    m = shares(steps)
    rests_at(rest("relaysgd", text, steps=steps), np.dot(m, B) / m.sum())


@pytest.mark.slow
@with_graphs()
def test_quasi_global_momentum_rests_where_d_psgd_rests(text):
    M, W = np.diag(shares(1)), W_of(text, 6)
    expected = np.linalg.solve(np.eye(6) - W + W @ M, W @ M @ np.array(B))
    rests_at(rest("quasi_global:beta=0.5,mu=0.5", text), expected)
