"""The reference engine: sampling, replies that do not come, work that is counted, buffers under their own rule."""

import numpy as np
import pytest
import torch
from federations import everyone, quadratics, tiny, train
from torch.testing import assert_close

from fedncv.engine import evaluate
from fedncv.engine.choose import engine_for
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import DivergedError, arrivals, start
from fedncv.engine.round import draw
from fedncv.engine.sequential import run_round
from fedncv.methods import find_method
from fedncv.methods.base import BufferRule, Prediction


def test_fedavg_stops_where_algebra_says():
    """K steps shrink client u's distance to b_u by (1 - lr a_u)^K; the mean of the two rests at r2 / (r1 + r2)."""
    r1, r2 = 1 - 0.95**10, 1 - 0.8**10
    assert float(train(quadratics("fedavg"), rounds=60).server.x_P) == pytest.approx(r2 / (r1 + r2), abs=1e-9)


def test_unequal_sizes_weigh_the_average():
    """One step from 5 with sizes 1 and 3: x - lr (1/4 * 1 * 5 + 3/4 * 4 * 4)."""
    state = train(quadratics("fedavg", sizes=[1, 3], steps=1))
    assert float(state.server.x_P) == pytest.approx(5 - 0.05 * (5 / 4 + 12))


def test_work_is_counted_sample_by_sample_and_byte_by_byte():
    problem = tiny("scaffold:option=I", sizes=(20, 13))  # 15 and 10 training samples, batches of 4
    state, row = run_round(problem, start(problem))
    p, r = len(problem.model.start_P), len(problem.model.start_R)
    samples = 3 * (15 + 10)  # one pass and two epochs; no batch of one among them
    assert row["samples"] == row["gradients"] == samples
    assert row["forwards"] == 0
    assert row["bytes_down"] == row["bytes_up"] == 2 * 8 * (2 * p + r)
    state, row = run_round(problem, state, everyone(0))
    assert row["samples"] == samples + 3 * 15
    assert row["bytes_up"] == 3 * 8 * (2 * p + r)


def test_forward_passes_are_counted_apart_from_gradients():
    base = find_method("fedavg")

    def direction(ask, y_P, batch, down, own, scratch):
        ask.forward(down.x_P, batch, mode="still")
        ask.forward(down.x_P, batch, mode="still")
        return base.direction(ask, y_P, batch, down, own, scratch)

    _, row = run_round(problem := tiny(base._replace(direction=direction)), start(problem))
    assert row["forwards"] == 2 * row["gradients"] == 2 * row["samples"]


def test_a_lost_reply_costs_the_way_down_only():
    problem = tiny("fedavg", sizes=(20, 13))
    _, both = run_round(problem, start(problem), everyone(0, 1))
    drawn = everyone(0, 1)._replace(answers=[True, False])
    state, row = run_round(problem, start(problem), drawn)
    alone = train(problem, ids=[0])
    assert torch.equal(state.server.x_P, alone.server.x_P)
    assert row["bytes_down"] == both["bytes_down"]
    assert row["bytes_up"] == both["bytes_up"] / 2
    assert (row["asked"], row["replies"]) == (2, 1)


def test_dropouts_and_stragglers_come_as_often_as_they_should():
    problem = tiny("fedavg", per_round=4, dropout=0.3, stragglers=0.5)
    draws = [draw(problem, t) for t in range(500)]
    answers = np.array([d.answers for d in draws])
    shares = np.array([d.shares for d in draws])
    assert abs(answers.mean() - 0.7) < 5 * (0.3 * 0.7 / answers.size) ** 0.5
    slow = shares < 1
    assert abs(slow.mean() - 0.5) < 5 * (0.25 / slow.size) ** 0.5
    assert abs(shares[slow].mean() - 0.5) < 5 * (1 / 12 / slow.sum()) ** 0.5
    again = draw(problem, 3)
    assert (again.ids.tolist(), again.answers, again.shares) == (draws[3].ids.tolist(), *draws[3][1:])


def test_a_client_too_small_for_a_step_does_not_answer():
    problem = tiny("fedavg", sizes=(20, 1))
    _, row = run_round(problem, start(problem))
    assert (row["asked"], row["replies"]) == (2, 1)


def test_a_diverged_client_is_named():
    problem = quadratics("fedavg", lr=1e200)
    with pytest.raises(DivergedError, match=r"client 0 diverged in round 1: .*at lr 1e\+200; try a lower lr"):
        train(problem, rounds=3)


def test_a_diverged_client_can_be_left_out():
    problem = quadratics("fedavg", a=(1.0, 1e200), diverged="skip", steps=3)
    state, row = run_round(problem, start(problem))
    assert row["skipped"] == [1]
    assert row["replies"] == 1
    assert float(state.server.x_P) == pytest.approx(5 * 0.95**3)
    assert 1 not in state.kept


# ---- running statistics --------------------------------------------------------------------------------


def test_running_statistics_are_averaged_with_the_weights_of_the_replies():
    problem = tiny("fedavg", sizes=(20, 13))
    state = start(problem)
    trained = [train_client(problem, 0, a) for a in arrivals(problem, state, everyone(0, 1).ids)]
    after = train(problem)
    assert_close(after.buffers, (15 * trained[0].buffers_R + 10 * trained[1].buffers_R) / 25)


def test_a_server_step_larger_than_one_leaves_running_variances_positive():
    """x overshoots with server_lr 3; the statistics must not: they are averaged, never extrapolated."""
    state = train(tiny("fedavg:server_lr=3"), rounds=3)
    variances = state.buffers[6:]
    assert (variances > 0).all()


def test_personal_statistics_never_leave_and_are_each_clients_own():
    problem = tiny("fedavg", sizes=(20, 13), buffers="personal")
    state, row = run_round(problem, start(problem))
    assert torch.equal(state.buffers, problem.model.start_R)
    assert not torch.equal(state.kept[0].buffers_R, state.kept[1].buffers_R)
    assert row["bytes_up"] == row["bytes_down"] == 2 * 8 * len(problem.model.start_P)
    assert "pooled" not in evaluate.before(problem, state)
    kept = state.kept[1]
    later, _ = run_round(problem, state, everyone(0))
    assert later.kept[1] is kept


def test_a_method_can_bring_a_rule_of_its_own():
    """The server keeps every client's statistics and sends them back: personal, but at the server."""
    rule = BufferRule(
        init=lambda b_R, federation: b_R.repeat(federation.num_clients, 1),
        broadcast=lambda b_NR, _server, ids_S: b_NR[ids_S],
        combine=lambda b_SR, replies: (b_SR, replies.ids_S),
        step=lambda _ask, b_NR, _server, combined: b_NR.index_copy(0, combined[1], combined[0]),
    )
    at_server = train(tiny(find_method("fedavg")._replace(buffers=rule)), rounds=3)
    at_client = train(tiny("fedavg", buffers="personal"), rounds=3)
    assert torch.equal(at_server.server.x_P, at_client.server.x_P)
    for u in range(4):
        assert torch.equal(at_server.buffers[u], at_client.kept[u].buffers_R)


# ---- measuring -----------------------------------------------------------------------------------------


def test_scores_are_weighted_as_they_say():
    scores = evaluate.Scores(np.array([1.0, 5.0, 0.0, 3.0]), np.array([2, 10, 0, 3]), np.arange(4))
    summary = scores.summary("before")
    assert summary["before"] == 9 / 15
    assert summary["before_client_mean"] == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert summary["before_worst_decile"] == 0.5
    assert summary["before_clients"] == [0.5, 0.5, None, 1.0]
    assert evaluate.Scores(np.zeros(2), np.zeros(2, dtype=int), np.arange(2)).summary("before") == {}


def test_the_worst_decile_is_the_mean_of_the_worst_tenth_of_clients():
    accuracies = np.arange(20) / 20
    scores = evaluate.Scores(accuracies, np.ones(20, dtype=int), np.arange(20))
    assert scores.summary("x")["x_worst_decile"] == pytest.approx(0.025)


def test_before_and_after_are_the_clients_own_models():
    """Computed by hand for each client: on arrival, and after the training it would do next."""
    problem = tiny("fedper")
    state = train(problem, rounds=2)
    before, after = evaluate.before(problem, state), evaluate.after(problem, state)
    for arrival in arrivals(problem, state, everyone(0, 1, 2, 3).ids):
        u = arrival.client
        test = torch.from_numpy(problem.clients.test[u])
        trained = train_client(problem, 2, arrival)
        start_P = torch.cat([state.server.body_Q, state.kept[u].own])
        for x_P, b_R, measured in [(start_P, state.buffers, before["before_clients"]),
                                   (trained.y_P, trained.buffers_R, after["after_clients"])]:  # fmt: skip
            output, _ = problem.model.forward(x_P, b_R, problem.dataset.x[test], mode="eval")
            right = (output.logits_BC.argmax(1) == problem.dataset.y[test]).double().mean()
            assert measured[u] == pytest.approx(float(right))
    assert "pooled" not in before


def test_pooled_is_the_shared_model_without_anything_personal():
    base = find_method("fedavg")
    offset = torch.tensor([100.0, 0.0, 0.0], dtype=torch.float64)  # everybody predicts class 0
    problem = tiny(base._replace(predict=lambda ask, y_P, _down, _own: Prediction(y_P, ask.buffers_R, offset)))
    plain = tiny("fedavg")
    state = train(plain, rounds=2)
    with_offset, without = evaluate.before(problem, state), evaluate.before(plain, state)
    assert with_offset["pooled"] == without["pooled"] == without["before"]
    test = np.concatenate(plain.clients.test)
    assert with_offset["before"] == pytest.approx(float((plain.dataset.y[test] == 0).double().mean()))


# ---- streams -------------------------------------------------------------------------------------------


def test_with_a_stream_clients_train_on_what_has_arrived():
    """start 0.2 and a quarter more each round: n_u(t) = floor((0.2 + 0.25 t) n_u) samples, counted once an epoch."""
    problem = tiny("fedavg", sizes=(40, 20), epochs=1, batch_size=1000, stream="arrivals:start=0.2,rate=0.25")
    held, state = [], start(problem)
    for t in range(5):
        now = problem.at(t)
        held.append([len(part) for part in now.clients.train])
        assert now.federation.sizes_N.tolist() == held[-1]
        assert float(now.client(0).label_counts_C.sum()) == held[-1][0]
        state, row = run_round(problem, state)
        assert row["samples"] == sum(map(sum, held))
    assert held == [[6, 3], [13, 6], [21, 10], [28, 14], [30, 15]]  # of 30 and 15
    test = [len(part) for part in problem.at(0).clients.test]
    assert test == [len(part) for part in problem.at(9).clients.test]


def test_a_stream_that_starts_full_is_the_static_federation():
    static, streamed = tiny("fedavg"), tiny("fedavg", stream="arrivals:start=1")
    assert torch.equal(train(static, rounds=2).server.x_P, train(streamed, rounds=2).server.x_P)


def test_weights_follow_the_stream():
    """Quadratics with 1 and 10 samples, of which a fifth is there at first: weights 1/3 and 2/3 in one step from 5."""
    problem = quadratics("fedavg", sizes=[1, 10], steps=1, stream="arrivals:start=0.2,rate=0")
    assert float(train(problem).server.x_P) == pytest.approx(5 - 0.05 * (5 / 3 + 16 * 2 / 3))


@pytest.mark.parametrize("engine", ["processes", "stacked"])
def test_every_engine_follows_the_stream(engine, capsys):
    """Processes do; stacked clients cannot, say so, and run one after the other instead."""
    settings = {"stream": "arrivals:start=0.2,rate=0.25", "epochs": 1, "per_round": 2}
    made = engine_for([tiny("fedavg", engine=engine, **settings)])
    states = [start(tiny("fedavg", **settings))]
    try:
        for _ in range(3):
            states = [state for state, _ in made.run_rounds(states)]
    finally:
        made.close()
    assert torch.equal(states[0].server.x_P, train(tiny("fedavg", **settings), rounds=3).server.x_P)
    assert ("running one client after the other" in capsys.readouterr().err) == (engine == "stacked")


def test_a_method_that_counts_on_fixed_sizes_refuses_a_stream():
    with pytest.raises(ValueError, match="does not change; leave stream empty"):
        tiny("fedncv-sums", stream="arrivals:start=0.2,rate=0.25")


def test_a_server_that_diverges_is_named():
    with pytest.raises(DivergedError, match="the server diverged in round 1"):
        train(quadratics("fedavg:server_lr=1e308", lr=0.5))


def test_a_score_that_is_not_finite_is_named():
    for ids, of in ((np.arange(2), None), (np.array([3, 71]), 100)):  # all clients, or a sample of them
        scores = evaluate.Scores(np.array([1.0, np.inf]), np.array([2, 3]), ids, of)
        with pytest.raises(DivergedError, match=f"client {ids[1]} scores inf before training"):
            scores.summary("before")
