"""The one rule: with W = 1 1^T / N it is the server, to rounding, for every method; on a graph, what algebra says."""

import numpy as np
import pytest
import torch
from federations import everyone, quadratics, tiny
from parabolas import SAMPLES, WEIGHT, A, B, W_of, models, on
from torch.testing import assert_close

from fedncv.engine import evaluate
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, messages, start
from fedncv.engine.round import Draw
from fedncv.engine.sequential import run_round
from fedncv.methods import METHODS, find_method
from fedncv.methods.base import ServerAsk, Stepped, moved_by
from fedncv.methods.fedavg import fedavg
from fedncv.topology import rule
from fedncv.topology.network import find_topology
from fedncv.topology.rule import is_linear
from fedncv.tree import leaves

IN_SUMS = [name for name in METHODS if find_method(name).form == "sums" and find_method(name).graph == "any"]
CHAINS = [
    "fedavg+drift:memory=clients", "fedavg+prior+momentum+average+blend", "scaffold:option=I", "scaffold+even+momentum",
    "fedavg+samples+even", "fedprox:mu=0.3+drift:memory=clients+average", "fedavgm:nesterov=true,server_lr=0.7",
    "fedavg+momentum:beta=0.9,nesterov=true",
]  # fmt: skip
GRAPHS = ["ring", "chain", "tree", "star", "torus", "exponential", "one_peer_exponential", "matching",
          "random_regular:degree=3", "erdos_renyi:p=0.5", "complete"]  # fmt: skip
SIZES = (20, 13, 9, 18)


def graphs(*names):
    """A few of these graphs in the quick suite, all of them in the slow one."""
    few = ("star", "random_regular:degree=3", "matching", "epidemic")
    return pytest.mark.parametrize(
        "text", [name if name in few else pytest.param(name, marks=pytest.mark.slow) for name in names]
    )


some_graphs, some_graphs_and_epidemics = graphs(*GRAPHS), graphs(*GRAPHS, "epidemic", "epidemic:peers=3")


def trained(method, topology, rounds, **config):
    problem = tiny(method, sizes=SIZES, topology=topology, **config)
    state = start(problem)
    for _ in range(rounds):
        state, row = run_round(problem, state)
    return problem, state, row


# ---- the complete graph is the server ------------------------------------------------------------------


def test_there_are_methods_of_every_kind_to_be_tested():
    assert {"fedavg", "fedprox", "scaffold", "feddyn", "fedavgm", "fedadam", "fedncv-sums", "fedper", "fednova",
            "moon", "fedlc", "fedrep", "local", "quasi_global", "fat_clipping_pr"} <= set(IN_SUMS)  # fmt: skip


QUICK = ("fedavg", "scaffold", "fedncv-sums", "fedadam", "fedper", "feddyn")


@pytest.mark.parametrize(
    ("name", "buffers"),
    [
        *(pytest.param(n, "averaged", marks=[pytest.mark.slow] * (n not in QUICK)) for n in [*IN_SUMS, *CHAINS]),
        *(pytest.param(n, "personal", marks=pytest.mark.slow) for n in ("fedavg", "scaffold", "fedncv-sums")),
    ],
)
def test_on_the_complete_graph_every_client_has_what_the_server_has(name, buffers):
    """Unequal clients, BatchNorm, dropout layers; three rounds, so that memories matter. To 1e-10 in float64."""
    problem, state, row = trained(name, "server", 3, buffers=buffers)
    on_graph, nodes, graph_row = trained(name, "complete", 3, buffers=buffers)
    theirs = [leaf for _, leaf in leaves(state.server) if isinstance(leaf, torch.Tensor)]
    ours = [leaf for _, leaf in leaves(nodes.server) if isinstance(leaf, torch.Tensor)]
    assert len(theirs) == len(ours)
    for server, copies in zip(theirs, ours, strict=True):
        assert_close(copies, server.expand_as(copies), rtol=1e-10, atol=1e-10)
    ids = np.arange(len(SIZES))
    assert_close(messages(on_graph, nodes, ids), messages(problem, state, ids), rtol=1e-10, atol=1e-10)
    for u in range(len(SIZES)):
        assert_close(nodes.kept[u], state.kept[u], rtol=1e-9, atol=1e-9)
    for measure in (evaluate.before, evaluate.after):
        theirs, ours = measure(problem, state), measure(on_graph, nodes)
        assert ours == {key: value for key, value in theirs.items() if key != "pooled"}
    assert row["loss"] == pytest.approx(graph_row["loss"], abs=1e-10)
    assert set(row) <= set(graph_row)
    if "eta_g" in row:
        assert row["eta_g"] == pytest.approx(graph_row["eta_g"])


def test_d2_with_the_server_s_matrix_is_the_server_too(monkeypatch):
    """Its own matrix is (I + W) / 2; with W itself it is what it is with a server."""
    monkeypatch.setattr(rule, "halfway", lambda mixing: mixing)
    _, state, _ = trained("d2", "server", 4)
    _, nodes, _ = trained("d2", "complete", 4)
    assert_close(nodes.server.server.x_P, state.server.x_P.expand(4, -1), rtol=1e-10, atol=1e-10)


def test_relayed_sums_of_two_clients_are_the_server():
    """One link: everything has arrived in the first round."""

    def after_three_rounds(topology):
        problem = tiny("relaysgd", sizes=(20, 13), topology=topology)
        state = start(problem)
        for _ in range(3):
            state, _ = run_round(problem, state)
        return state.server

    server, nodes = after_three_rounds("server"), after_three_rounds("chain")
    assert_close(nodes.server.x_P, server.x_P.expand(2, -1), rtol=1e-10, atol=1e-10)


# ---- graphs, by hand -----------------------------------------------------------------------------------


START, LR = 0.5, 0.1


def path(problem, rounds):
    """The models of all clients after 0, 1, 2, … rounds."""
    state, found = start(problem), []
    for _ in range(rounds):
        found.append(models(state))
        state, _ = run_round(problem, state)
    return np.array([*found, models(state)])


def moved(x, steps):
    """How far gradient descent goes from x on every client's own parabola, and where it ends."""
    a, b = np.array(A), np.array(B)
    y = x.copy()
    for _ in range(steps):
        y = y - LR * a * (y - b)
    return x - y


@pytest.mark.parametrize("steps", [1, 3])
@some_graphs_and_epidemics
def test_fedavg_on_a_graph_is_d_psgd(text, steps):
    """x <- W (x - N p Delta), the matrix of every round in turn; epidemic learning with row-stochastic W."""
    found = path(on(text, sizes=SAMPLES, steps=steps), 4)
    x = np.full(6, START)
    for t in range(4):
        np.testing.assert_allclose(found[t], x, atol=1e-12)
        x = W_of(text, 6, t) @ (x - WEIGHT * moved(x, steps))
    np.testing.assert_allclose(found[4], x, atol=1e-12)


@some_graphs
def test_scaffold_on_a_graph_with_one_step_is_gradient_tracking(text):
    """x <- W (x - lr y),  y <- W y + g(x) - g(x before),  from y = g(x): DIGing's tracker."""
    found = path(on(text, "scaffold"), 6)
    a, b = np.array(A), np.array(B)
    x = np.full(6, START)
    y = a * (x - b)
    for t in range(6):
        np.testing.assert_allclose(found[t], x, atol=1e-12)
        g = a * (x - b)
        W = W_of(text, 6, t)
        x = W @ (x - LR * y)
        y = W @ y + a * (x - b) - g
    np.testing.assert_allclose(found[6], x, atol=1e-12)


@some_graphs
@pytest.mark.parametrize("server_lr", [1.0, 0.6])
def test_scaffold_on_a_graph_with_local_steps_is_k_gt(text, server_lr):
    """K steps along g + c;  z = (x - y) / (K lr);  c <- c - z + W z;  x <- W (x - server_lr K lr z), from c = 0."""
    steps = 3
    found = path(on(text, f"scaffold:server_lr={server_lr}", steps=steps), 6)
    a, b = np.array(A), np.array(B)
    x, c = np.full(6, START), np.zeros(6)
    for t in range(6):
        np.testing.assert_allclose(found[t], x, atol=1e-12)
        y = x.copy()
        for _ in range(steps):
            y = y - LR * (a * (y - b) + c)
        z = (x - y) / (steps * LR)
        W = W_of(text, 6, t)
        c = c - z + W @ z
        x = W @ (x - server_lr * steps * LR * z)
    np.testing.assert_allclose(found[6], x, atol=1e-12)


@some_graphs
def test_fedncv_s_drift_correction_is_k_gt_for_clients_of_one_size(text):
    """fedavg+drift:memory=clients, the control variate of fedncv-sums, is tracked like SCAFFOLD's."""
    ours, theirs = on(text, "fedavg+drift:memory=clients", steps=3), on(text, "scaffold", steps=3)
    np.testing.assert_allclose(path(ours, 6), path(theirs, 6), atol=1e-12)


@pytest.mark.parametrize("text", ["ring", "chain", "star", "torus", "exponential", "random_regular:degree=3"])
def test_d2_is_its_recursion(text):
    """x <- W' (2 x - x before - lr (g - g before)) with W' = (I + W) / 2, from x <- W' (x - lr g)."""
    found = path(on(text, "d2", sizes=SAMPLES), 7)  # sizes do not count
    a, b, W = np.array(A), np.array(B), (np.eye(6) + W_of(text, 6)) / 2
    before = np.full(6, START)
    x = W @ (before - LR * a * (before - b))
    np.testing.assert_allclose(found[1], x, atol=1e-12)
    for t in range(2, 8):
        before, x = x, W @ (2 * x - before - LR * a * (x - before))
        np.testing.assert_allclose(found[t], x, atol=1e-12)


@pytest.mark.parametrize("text", ["ring", "exponential", "matching", "epidemic", "server"])
@pytest.mark.parametrize("steps", [1, 3])
def test_quasi_global_momentum_is_its_recursion(text, steps):
    beta, mu = 0.7, 0.4
    problem = on(text, f"quasi_global:beta={beta},mu={mu}", steps=steps)
    a, b = np.array(A), np.array(B)
    x, m, state = np.full(6, START), np.zeros(6), start(problem)
    for t in range(5):
        y = x.copy()
        for _ in range(steps):
            y = y - LR * (a * (y - b) + beta * m)
        W = np.full((6, 6), 1 / 6) if text == "server" else W_of(text, 6, t)
        new = W @ y
        m = mu * m + (1 - mu) * (x - new) / (steps * LR)
        x = new
        state, _ = run_round(problem, state)
        found = np.full(6, state.server.x_P.item()) if text == "server" else models(state)
        np.testing.assert_allclose(found, x, atol=1e-12)


@pytest.mark.parametrize("text", ["chain", "tree", "star"])
@pytest.mark.parametrize("steps", [1, 2])
def test_relaysgd_is_message_passing_along_the_edges(text, steps):
    """Algorithm 1 with dictionaries: a message is one's own model and what the other neighbours sent last time."""
    found = path(on(text, "relaysgd", sizes=SAMPLES, steps=steps), 9)
    links = [tuple(link) for link in find_topology(text, 6, 0).links().tolist()]
    neighbours = {u: [v for w, v in links if w == u] for u in range(6)}
    m, c, x = dict.fromkeys(links, 0.0), dict.fromkeys(links, 0), np.full(6, START)
    for t in range(9):
        np.testing.assert_allclose(found[t], x, atol=1e-12)
        half = x - WEIGHT * moved(x, steps)
        sent = {(u, v): half[v] + sum(m[v, k] for k in neighbours[v] if k != u) for u, v in links}
        count = {(u, v): 1 + sum(c[v, k] for k in neighbours[v] if k != u) for u, v in links}
        m, c = sent, count
        x = np.array([
            (half[u] + sum(m[u, v] for v in neighbours[u])) / (1 + sum(c[u, v] for v in neighbours[u]))
            for u in range(6)
        ])  # fmt: skip
    np.testing.assert_allclose(found[9], x, atol=1e-12)
    assert all(1 + sum(c[u, v] for v in neighbours[u]) == 6 for u in range(6))  # everything has arrived


def test_running_statistics_are_means_of_the_neighbourhood_by_samples():
    """They stay between the smallest and the largest of what was sent, however unequal the clients are."""
    problem = tiny("fedavg", sizes=(60, 9, 9, 9), topology="ring")
    state = start(problem)
    before = messages(problem, state, np.arange(4))[1]
    sent = {}
    for arrival in arrivals(problem, state, np.arange(4)):
        sent[arrival.client] = train_client(problem, 0, arrival).buffers_R
    state, _ = run_round(problem, state)
    after = messages(problem, state, np.arange(4))[1]
    n, W = problem.federation.sizes_N, torch.from_numpy(W_of("ring", 4))
    b_NR = torch.stack([sent[u] for u in range(4)])
    assert_close(after, (W * n) @ b_NR / (W @ n)[:, None], rtol=1e-12, atol=1e-12)
    assert not torch.equal(after, before)


# ---- clients that fall away ----------------------------------------------------------------------------


def draw(ids, answers):
    return Draw(np.array(ids), list(answers), [1.0] * len(ids))


def test_a_client_that_is_away_keeps_its_state_and_is_in_nobody_s_sum():
    problem = on("complete", sizes=SAMPLES)
    state, _ = run_round(problem, start(problem), draw(range(6), [True, True, False, True, False, True]))
    x = np.full(6, START)
    trained = x - WEIGHT * moved(x, 1)
    expected = np.where(np.isin(range(6), (2, 4)), START, trained[[0, 1, 3, 5]].mean())
    np.testing.assert_allclose(models(state), expected, atol=1e-12)
    assert set(state.kept) == {0, 1, 3, 5}


def test_a_client_that_is_away_takes_no_step_of_its_own_either():
    """Momentum would carry it on: its whole copy of the state stays, to the last bit."""
    problem = on("ring", "fedavgm")
    state, _ = run_round(problem, start(problem))
    after, _ = run_round(problem, state, draw(range(6), [True, True, False, True, True, True]))
    for (_, now), (_, before) in zip(leaves(after.server), leaves(state.server), strict=True):
        assert torch.equal(now[2], before[2])
        assert not torch.equal(now[3], before[3])


@pytest.mark.parametrize("method", ["scaffold", "fedavg+drift:memory=clients"])
def test_trackers_keep_the_mean_of_the_control_variates_when_clients_come_and_go(method):
    """sum_u c_bar_u = sum_u c_u, at every moment: what tracking means."""
    problem = on("ring", method, dropout=0.4, seed=3)
    state = start(problem)
    for t in range(12):
        state, row = run_round(problem, state)
        assert row["replies"] < 6 or t > 0
    kept = [state.kept[u].own for u in range(6)]
    if method == "scaffold":
        tracked, c = state.server.server.c_P, torch.stack(kept)
    else:
        tracked, c = state.server.server.sum_c.total_P / 6, torch.stack([own.c_P for own in kept])
    assert_close(tracked.sum(0), c.sum(0), rtol=1e-12, atol=1e-12)
    assert c.abs().sum() > 1


def test_a_client_without_a_reply_passes_on_what_it_has():
    """Client 1 of a chain of three has one sample, too few for BatchNorm: it still stands between the others."""
    problem = tiny("fedavg", sizes=(20, 1, 18), topology="chain")
    here = arrivals(problem, start(problem), np.arange(3))
    delta = [0 if (done := train_client(problem, 0, a)) is None else done.up.delta_P for a in here]
    state, row = run_round(problem, start(problem))
    assert (row["asked"], row["replies"]) == (3, 2)
    n = problem.federation.sizes_N
    sent = torch.stack([problem.model.start_P - 3 * n[u] / n.sum() * delta[u] for u in range(3)])
    assert_close(state.server.server.x_P, torch.from_numpy(W_of("chain", 3)) @ sent, rtol=1e-12, atol=1e-12)
    assert not torch.equal(state.server.server.x_P[1], problem.model.start_P)


def test_a_round_that_nobody_joins_changes_nothing():
    problem = on("ring")
    state, _ = run_round(problem, start(problem))
    after, row = run_round(problem, state, everyone(*range(6))._replace(answers=[False] * 6))
    np.testing.assert_array_equal(models(after), models(state))
    assert (after.round, row["replies"]) == (2, 0)


def test_d2_says_who_is_missing():
    problem = on("ring", "d2")
    with pytest.raises(ValueError, match="needs a reply of every client in every round, but client 2 has none in rou"):
        run_round(problem, start(problem), draw(range(6), [True, True, False, True, True, True]))


# ---- what a row says -----------------------------------------------------------------------------------


def test_consensus_distance_and_the_variance_of_the_mixed_update_by_hand():
    problem = on("ring", sizes=SAMPLES)
    state, _ = run_round(problem, start(problem))
    x = models(state)
    state, row = run_round(problem, state)
    update = WEIGHT * moved(x, 1)
    away = W_of("ring", 6) @ update - update.mean()
    assert row["mixed_update_variance"] == pytest.approx((away**2).mean(), rel=1e-12)
    assert row["consensus_distance"] == pytest.approx(models(state).std(), rel=1e-12)
    assert row["spectral_gap"] == pytest.approx(1 / 3)


def test_with_everyone_s_mean_nothing_is_left_of_either():
    _, row = run_round(on("complete", sizes=SAMPLES), start(on("complete", sizes=SAMPLES)))
    assert row["consensus_distance"] == pytest.approx(0, abs=1e-15)
    assert row["mixed_update_variance"] == pytest.approx(0, abs=1e-15)


LINEAR = {
    "fedavg": True, "scaffold": True, "feddyn": True, "fedavgm": True, "fedncv-sums": True, "fedper": True,
    "fedprox": True, "quasi_global": True, "fedavg+momentum+average": True, "local": True,
    "fednova": False, "fedexp": False, "fedadam": False, "fedyogi": False, "fedadagrad": False,
}  # fmt: skip


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_step_needs_one_copy_of_the_state_on_a_link_and_others_the_reply_too(name):
    problem, state, row = trained(name, "ring", 1)
    size = sum(leaf[0].numel() * leaf.element_size() for _, leaf in leaves(state.server) if torch.is_tensor(leaf))
    statistics = 0 if name == "local" else problem.model.start_R.numel() * 8
    if LINEAR[name]:
        assert row["edge_bytes"] == size + statistics
    else:
        assert row["edge_bytes"] > size + statistics
    assert row["messages"] == 8
    assert row["bytes_up"] == row["bytes_down"] == 8 * row["edge_bytes"]


def test_linear_is_what_the_step_of_a_mean_says():
    model = tiny("fedavg").model
    ask = ServerAsk(model, 0, torch.zeros(2, dtype=torch.int64))
    for name, linear in LINEAR.items():
        problem = tiny(name)
        server = problem.method.init(model.start_P, problem.federation)
        (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
        up = train_client(problem, 0, arrival).up
        assert is_linear(problem.method, ask, server, up) == linear, name


def test_bytes_of_a_round_are_those_of_the_links_between_clients_that_are_there():
    problem = on("ring")
    _, row = run_round(problem, start(problem), draw(range(6), [True, True, True, False, False, True]))
    assert row["messages"] == 6  # 5-0, 0-1, 1-2, both ways
    assert row["bytes_up"] == 6 * 8


def test_a_step_that_branches_on_a_tensor_is_refused_with_the_reason():
    def step(_ask, server, sums):
        return Stepped(server) if sums.mean("delta_P").sum() > 0 else moved_by(server, sums.mean("delta_P"))

    problem = quadratics(fedavg()._replace(step=step), topology="chain")
    with pytest.raises(ValueError, match=r"decides by the value of a tensor.*torch\.where"):
        run_round(problem, start(problem))
