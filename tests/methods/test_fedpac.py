"""FedPAC: the program against enumeration, statistics and centroids by hand, and the pull of the centroids."""

import itertools

import numpy as np
import pytest
import torch
from federations import answer, everyone, federation, tiny, train, vector
from torch.testing import assert_close

from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.layout import Layout
from fedncv.methods import find_method
from fedncv.methods.base import Batch
from fedncv.methods.fedpac import Down, Scratch, program


def grid(num, steps):
    """All points of the simplex with coordinates that are multiples of 1/steps."""
    for cuts in itertools.combinations(range(steps + num - 1), num - 1):
        edges = (-1, *cuts, steps + num - 1)
        yield np.diff(edges) - 1


@pytest.mark.parametrize("seed", range(6))
def test_the_program_has_the_smallest_value_on_a_grid_of_the_simplex(seed):
    """sum_j a_j^2 v_j + |sum_j a_j (h_u - h_j)|^2 from its definition, and no smaller value next to the found point."""
    rng = np.random.default_rng(seed)
    v, h = rng.uniform(0.01, 1, 4), rng.normal(size=(4, 5)) * rng.choice([0.1, 1])
    for u in range(4):

        def value(alpha, u=u):
            return (alpha**2 * v).sum() + (((h[u] - h) * alpha[:, None]).sum(0) ** 2).sum()

        found = program(v, h, u)
        assert found.sum() == pytest.approx(1)
        assert (found >= 0).all()
        assert value(found) <= min(value(point / 20) for point in grid(4, 20)) + 1e-9
        for i, j in itertools.permutations(range(4), 2):
            step = min(1e-3, found[i])
            near = found.copy()
            near[i] -= step
            near[j] += step
            assert value(found) <= value(near) + 1e-9


def test_equal_clients_share_by_their_certainty_and_far_ones_are_left_out():
    """h_1 = h_2: a_j ~ 1/v_j, the least variance of a mean. A third far away adds nothing but bias."""
    h = np.array([[1.0, 0], [1, 0], [100, 0]])
    assert_close(program(np.array([1.0, 3, 1]), h, 0), np.array([0.75, 0.25, 0]), atol=1e-4, rtol=0)
    assert_close(program(np.array([1.0, 3, 1]), h, 2), np.array([0, 0, 1.0]), atol=1e-3, rtol=0)


def test_a_client_without_spread_or_features_gets_a_head():
    assert program(np.zeros(2), np.zeros((2, 3)), 1).tolist() == [0, 1]
    assert_close(program(np.array([0.0, 1]), np.zeros((2, 3)), 1), np.array([1.0, 0]), atol=1e-4, rtol=0)


def features(problem, x_P, buffers_R, index):
    inputs = problem.dataset.inputs(index, problem.dtype)
    return problem.model.forward(x_P, buffers_R, inputs, mode="eval")[0].features_BF


def test_the_statistics_are_those_of_the_received_body_and_the_centroids_of_the_trained_one():
    problem = tiny("fedpac")
    (arrival,) = arrivals(problem, train(problem, rounds=2), everyone(0).ids)
    trained = train_client(problem, 2, arrival)
    up, index = trained.up, torch.from_numpy(problem.clients.train[0])[: 4 * (len(problem.clients.train[0]) // 4)]
    index = torch.from_numpy(problem.clients.train[0])
    assert len(index) % 4 != 1  # no batch is left out
    labels = problem.dataset.y[index]
    first = features(problem, torch.cat([arrival.down.body_Q, arrival.down.head_H]), arrival.buffers_R, index)
    last = features(problem, trained.y_P, trained.buffers_R, index)
    h = torch.stack([first[labels == c].sum(0) / len(index) for c in range(3)])
    assert_close(up.h_CF, h)
    assert_close(up.v, (first.square().sum() / len(index) - h.square().sum()) / len(index))
    assert_close(up.s_CF, torch.stack([last[labels == c].sum(0) for c in range(3)]))
    assert up.n_C.tolist() == torch.bincount(labels, minlength=3).tolist()


def small_server():
    layout = Layout(("b", "h"), (torch.Size([1]), torch.Size([2])), slice(0, 1), 3, (), (), torch.Size([1]))
    method = find_method("fedpac")
    return method, method.init(vector(5, 1, 2), federation((1, 3), layout=layout)._replace(num_classes=2))


def replies(**changes):
    """Two clients with features of one number and two classes; client 0 has no sample of class 1."""
    first = {"delta_Q": vector(1), "head_H": vector(1, 0), "h_CF": vector(1, 0)[:, None], "v": vector(1)[0],
             "s_CF": vector(8, 0)[:, None], "n_C": vector(4, 0)}  # fmt: skip
    second = {"delta_Q": vector(3), "head_H": vector(0, 1), "h_CF": vector(1, 0)[:, None], "v": vector(1)[0],
              "s_CF": vector(1, 6)[:, None], "n_C": vector(1, 2)}  # fmt: skip
    return {0: tuple(first.values()), 1: tuple((second | changes).values())}


def test_a_step_of_the_server_by_hand():
    """Bodies by samples (1, 3): 5 - (1 + 9)/4. Centroids by counts: (8 + 1)/5 and 6/2, not the mean of means 1.5."""
    method, server = small_server()
    after = answer(method, server, replies(), sizes=(1, 3))
    assert_close(after.body_Q, vector(2.5))
    assert_close(after.m_CF, vector(9 / 5, 3)[:, None])
    assert after.known_C.tolist() == [1, 1]
    assert_close(after.head_NH, torch.full((2, 2), 0.5, dtype=torch.float64), atol=1e-6, rtol=0)  # alike in all


def test_heads_go_to_the_clients_they_were_combined_for():
    """Far apart in h, each keeps its own."""
    method, server = small_server()
    after = answer(method, server, replies(h_CF=vector(500, 0)[:, None]))
    assert_close(after.head_NH, vector(1, 0, 0, 1).view(2, 2), atol=1e-3, rtol=0)
    assert torch.equal(method.broadcast(after, torch.tensor([1])).head_H, after.head_NH[1:])


def test_a_centroid_that_nobody_renews_stays_and_a_missing_one_has_no_pull():
    method, server = small_server()
    after = answer(method, server, {0: replies()[0]})
    assert after.known_C.tolist() == [1, 0]
    later = answer(method, after, {1: tuple(replies(n_C=vector(0, 2))[1])})
    assert_close(later.m_CF, vector(2, 3)[:, None])


def body_gradient(lam, known):
    problem = tiny(f"fedpac:lam={lam}")
    layout, start_P = problem.model.layout, problem.model.start_P
    x, y = problem.dataset.inputs(torch.arange(8), problem.dtype), problem.dataset.y[:8]
    m_CF = torch.arange(18, dtype=torch.float64).view(3, 6)
    down = Down(start_P[layout.body], start_P[layout.head], m_CF, vector(*known))
    ask = problem.ask(0, problem.model.start_R, 0).replace(phase=2)
    weight_B = torch.tensor([1.0] * 6 + [0.0] * 2, dtype=torch.float64)
    batch = Batch(x, y, weight_B, 0)
    g_P, _ = problem.method.direction(ask, start_P, batch, down, (), Scratch(None, None))

    def pull(y_P):
        z = ask.forward(y_P, batch).features_BF
        apart = ((z - m_CF[y]) ** 2).mean(1)
        return sum(apart[i] for i in range(6)) / 6

    return g_P, ask.grad(start_P, batch), ask.grad_of(pull, start_P)


def test_the_pull_is_lam_times_the_mean_squared_distance_to_the_centroid_of_the_own_class():
    g_P, plain_P, pull_P = body_gradient(3.0, (1, 1, 1))
    assert pull_P.norm() > 0.1
    assert_close(g_P, plain_P + 3 * pull_P)


def test_a_class_without_a_centroid_has_no_pull():
    g_P, plain_P, _ = body_gradient(3.0, (0, 0, 0))
    assert_close(g_P, plain_P)


def test_the_head_is_trained_first_and_two_passes_are_counted():
    phases = find_method("fedpac").phases(5)
    assert [(p.epochs, p.trains, p.mode) for p in phases] == [
        (1, (), "eval"), (1, ("head",), "still"), (4, ("body",), "train"), (1, (), "eval"),
    ]  # fmt: skip
    totals = train(tiny("fedpac", sizes=(20, 20), epochs=3)).totals
    assert (totals.gradients, totals.forwards) == (2 * 15 * 3, 2 * 15 * 2)


def test_the_start_gives_everybody_the_initial_head():
    problem = tiny("fedpac")
    heads = [a.down.head_H for a in arrivals(problem, start(problem), everyone(0, 3).ids)]
    assert all(torch.equal(head, problem.model.start_P[problem.model.layout.head]) for head in heads)


def test_bad_knobs_are_refused():
    with pytest.raises(ValueError, match="lam must be at least 0 and finite, not -1"):
        find_method("fedpac:lam=-1")
    with pytest.raises(ValueError, match="head_epochs must be at least 1, not 0"):
        find_method("fedpac:head_epochs=0")
