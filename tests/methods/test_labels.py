"""Label regression and calibrated weights: unbiased over every draw, exact where labels decide, nothing with all."""

from itertools import combinations

import numpy as np
import pytest
import torch
from federations import answer, federation, inside, model_of, quadratics, tiny, train, vector
from torch import nn
from torch.testing import assert_close

from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.methods import find_method
from fedncv.methods.switches.calibrated import Config as CalibratedConfig
from fedncv.methods.switches.labels import Config, memory
from fedncv.tree import leaves

UNEQUAL = (20, 8, 12, 31, 9)
SWITCHED = ("labels", "labels:at=client", "calibrated")


def linear(shape, num_classes):
    return nn.Linear(shape[0], num_classes)


def told(*counts, sizes=(1, 1)):
    """What a server knows of clients with these label counts."""
    known = federation(sizes)
    return known._replace(num_classes=len(counts[0]), label_counts=lambda: vector(*counts).reshape(len(counts), -1))


def test_with_horvitz_thompson_weights_the_update_is_unbiased_over_every_draw():
    problem = tiny("fedavg+labels+ht", sizes=UNEQUAL, per_round=2)
    state = train(problem, ids=[1, 3], state=train(problem, ids=[0, 1], rounds=2))  # 2 and 4 were never seen
    x_P = model_of(state)
    steps = torch.stack(
        [x_P - model_of(train(problem, ids=list(ids), state=state)) for ids in combinations(range(5), 2)]
    )
    whole = [train_client(problem, state.round, a).up.delta_P for a in arrivals(problem, state, np.arange(5))]
    p = problem.federation.sizes_N / problem.federation.sizes_N.sum()
    assert_close(steps.mean(dim=0), sum(p_u * delta for p_u, delta in zip(p, whole, strict=True)))
    plain = tiny("fedavg+ht", sizes=UNEQUAL, per_round=2)
    without = start(plain)._replace(server=plain.method.with_model(start(plain).server, x_P), round=state.round)
    other = x_P - model_of(train(plain, ids=[0, 2], state=without))
    assert not torch.allclose(steps[1], other)  # the predictions do something


@pytest.mark.parametrize("text", ["labels", "calibrated"])
def test_with_everybody_in_every_round_nothing_changes(text):
    """m = N: the labels of the round are those of all clients."""
    ours, theirs = (train(tiny(f"fedavg{s}", sizes=UNEQUAL), rounds=3) for s in (f"+{text}", ""))
    assert_close(model_of(ours), model_of(theirs), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("text", SWITCHED)
def test_a_huge_ridge_is_the_method(text):
    word = text if ":" in text else f"{text}:"
    ridge = f"{word}{',' if word[-1] != ':' else ''}ridge=1e12"
    ours, theirs = (train(tiny(f"fedavg{s}", per_round=2), rounds=4) for s in (f"+{ridge}", ""))
    assert_close(model_of(ours), model_of(theirs), rtol=1e-8, atol=1e-9)
    used = train(tiny(f"fedavg+{text}", per_round=2), rounds=4)
    assert not torch.allclose(model_of(used), model_of(theirs), rtol=1e-8, atol=1e-9)


def test_the_regression_of_two_rounds_by_hand():
    """Equal sizes, pure classes: pi = e_0, e_1, pi_bar = (1/2, 1/2), and Delta = 2 and -4.

    First round, everybody: x - y = -1, A = [[1, -1], [-1, 1]] / 4, D = (3/2, -3/2), so with ridge 1/2 the matrix
    A + 1/2 has the inverse [[3/2, 1/2], [1/2, 3/2]] and B = (3/2, -3/2). Then client 0 alone with Delta = 2:
    h_0 = (1/2, -1/2) B = 3/2, and the step is 2 - 3/2.
    """
    method = find_method("fedavg+labels:ridge=0.5")
    server = method.init(vector(0.0), told([1, 0], [0, 1]))
    server = answer(method, server, {0: (vector(2.0),), 1: (vector(-4.0),)})
    assert_close(server.server.x_P, vector(1.0))
    assert_close(server.sums.D_CP, vector(1.5, -1.5)[:, None])
    assert_close(answer(method, server, {0: (vector(2.0),)}).server.x_P, vector(0.5))


def test_earlier_rounds_are_forgotten_by_hand():
    method = find_method("fedavg+labels:forget=0.25")
    server = method.init(vector(0.0), told([1, 0], [0, 1]))
    for delta, expected in ((2.0, 0.5), (4.0, 1.125)):  # 2/4, then 0.5/4 + 4/4
        server = answer(method, server, {0: (vector(delta),), 1: (vector(0.0),)})
        assert_close(server.sums.D_CP, vector(expected, -expected)[:, None])


def test_calibrated_weights_by_hand():
    """Three clients of one size, labels (1, 0), (0, 1), (0, 1): the first two have gap (-1/6, 1/6).

    X = (1/2, -1/2), (-1/2, 1/2) and X'WX = [[1, -1], [-1, 1]] / 4; on the gap it acts as 1/2, so with ridge 1/2 the
    solution is the gap, and omega = 1/2 + (1/2)(-1/6), 1/2 + (1/2)(1/6).
    """
    method = find_method("fedavg+calibrated:ridge=0.5")
    server = method.init(vector(0.0), told([1, 0], [0, 1], [0, 1], sizes=(1, 1, 1)))
    after = answer(method, server, {0: (vector(12.0),), 1: (vector(0.0),)}, sizes=(1, 1, 1))
    assert_close(after.server.x_P, vector(-5.0))
    after = answer(method, server, {0: (vector(0.0),), 1: (vector(12.0),)}, sizes=(1, 1, 1))
    assert_close(after.server.x_P, vector(-7.0))


def test_calibrated_weights_never_touch_running_statistics():
    """Clients of a tiny federation with BatchNorm: the statistics are the plain mean by samples, the model is not."""
    ours, theirs = (train(tiny(f"fedavg{s}", sizes=UNEQUAL), ids=[0, 3]) for s in ("+calibrated:ridge=0.01", ""))
    assert torch.equal(ours.buffers, theirs.buffers)
    assert not torch.allclose(model_of(ours), model_of(theirs))


def test_a_client_that_does_not_tell_counts_as_the_mean_of_the_others():
    """It gets h = 0, and its plain share of calibrated weights: pi_bar is over the two that told."""
    counts = ([1, 0], [0, 3], [0, 0])
    method = find_method("fedavg+labels")
    server = method.init(vector(0.0), told(*counts, sizes=(1, 3, 4)))
    assert_close(server.shares.pi_NC[2], vector(0.25, 0.75))
    assert_close(server.shares.mean_C, vector(0.25, 0.75))
    server = answer(method, server, {0: (vector(2.0),), 1: (vector(-4.0),)}, sizes=(1, 3, 4))
    x_P = server.server.x_P
    assert_close(x_P - answer(method, server, {2: (vector(8.0),)}, sizes=(1, 3, 4)).server.x_P, vector(8.0))
    weighted = find_method("fedavg+calibrated")
    start_x = weighted.init(vector(0.0), told(*counts, sizes=(1, 3, 4)))
    after = answer(weighted, start_x, {2: (vector(8.0),)}, sizes=(1, 3, 4))
    assert_close(after.server.x_P, vector(-8.0))


def test_corrections_at_the_client_sum_to_zero_over_all_clients():
    problem = tiny("fedavg+labels:at=client", sizes=UNEQUAL, per_round=3)
    state = train(problem, rounds=3)
    e_NP = torch.stack([a.down.e_P for a in arrivals(problem, state, np.arange(5))])
    p_N = problem.federation.sizes_N / problem.federation.sizes_N.sum()
    assert e_NP.abs().max() > 1e-3
    assert_close(p_N @ e_NP, torch.zeros_like(e_NP[0]), rtol=0, atol=1e-12)


def test_at_the_client_the_raw_gradient_is_regressed():
    """One full-batch step: Delta / (lr K) + e is the client's gradient at x, whatever e was."""
    problem = tiny("fedavg+labels:at=client,forget=0", model=linear, sizes=UNEQUAL, batch_size=100, epochs=1)
    state = train(problem, rounds=2)
    x_P = model_of(state)
    after = train(problem, state=state)
    bare = tiny("fedavg", model=linear, sizes=UNEQUAL, batch_size=100, epochs=1)
    at_x = start(bare)._replace(server=bare.method.with_model(start(bare).server, x_P), round=2)
    g_NP = torch.stack([train_client(bare, 2, a).up.delta_P / 0.1 for a in arrivals(bare, at_x, np.arange(5))])
    n_N, pi_NC = problem.federation.sizes_N, inside(after.server, "shares").pi_NC
    w_N = n_N / n_N.sum()
    assert_close(after.server.sums.D_CP, (w_N[:, None] * (pi_NC - w_N @ pi_NC)).T @ g_NP, rtol=1e-9, atol=1e-11)


def test_labels_are_told_once_and_never_sent():
    for text in SWITCHED:
        problem = tiny(f"fedavg+{text}")
        assert list(problem.method.joining) == ["label_counts_C"]
        (arrival, *_) = arrivals(problem, start(problem), np.array([0]))
        sent = [path.rpartition(".")[2] for path, _ in leaves(train_client(problem, 0, arrival).up)]
        assert sent == (["delta_P", "total_step"] if "client" in text else ["delta_P"])
    counts_NC = tiny("fedavg+labels").federation.label_counts()
    assert counts_NC.sum(dim=1).tolist() == tiny("fedavg").federation.sizes_N.tolist()


@pytest.mark.parametrize(
    "text",
    [
        "fedncv:drift=off+labels:at=client",
        "fedncv+calibrated",
        "fedavg+memory+calibrated",
        "fedprox+labels+drift",
        "fedavg+labels:at=client+ht",
    ],
)
def test_they_go_together_with_other_parts(text):
    assert torch.isfinite(model_of(train(tiny(text, per_round=2), rounds=4))).all()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fedavg+memory+labels", "sums form"),
        ("scaffold+labels", "averaged by samples"),
        ("fedper+calibrated", "averages updates by samples"),
        ("fedavg+calibrated+ht", "both set the weights"),
        ("fedavg+labels:at=client+drift", "both correct client drift"),
        ("fedncv-sums+labels", "sums form|single replies"),
        ("fedavg+labels:ridge=0", "ridge must be above 0"),
        ("fedavg+labels:forget=2", "forget must be from 0 to 1"),
        ("fedavg+calibrated:ridge=-1", "ridge must be above 0"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(text, why):
    with pytest.raises(ValueError, match=why):
        find_method(text)


@pytest.mark.parametrize("text", SWITCHED)
def test_data_without_classes_and_streams_are_refused(text):
    with pytest.raises(ValueError, match="needs clients with classes"):
        start(quadratics(f"fedavg+{text}"))
    with pytest.raises(ValueError, match="number of samples does not change"):
        tiny(f"fedavg+{text}", stream="arrivals:start=0.3,rate=0.1")


def test_a_memory_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="which do not fit"):
        memory(10**9, torch.zeros(10**7))


@pytest.mark.parametrize("config", [Config, CalibratedConfig])
def test_an_infinite_ridge_is_refused(config):
    with pytest.raises(ValueError, match="ridge must be above 0 and finite"):
        config(ridge=float("inf"))
