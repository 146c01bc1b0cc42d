"""The average that is handed out: its weights by hand, training untouched by it, and who gets which model."""

import numpy as np
import pytest
import torch
from federations import everyone, model_of, tiny, train
from torch import nn
from torch.testing import assert_close

from fedncv.engine import evaluate, stacked_scores
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, messages
from fedncv.engine.processes import ProcessesEngine
from fedncv.engine.round import Draw
from fedncv.engine.sequential import run_round
from fedncv.engine.stacked_scores import ScoringEngine
from fedncv.export import export
from fedncv.methods import find_method
from fedncv.methods.base import Replies, ServerAsk, weighted_sum
from fedncv.methods.switches.server_average import averaged_statistics
from fedncv.methods.switches.server_momentum import with_momentum
from fedncv.tasks import TASKS

SHARE = 0.5


def normalised(shape, num_classes):
    return nn.Sequential(nn.Linear(shape[0], 5), nn.BatchNorm1d(5), nn.Linear(5, num_classes))


def by_hand(models):
    """Weights w_t = 1 / (1 + share * t), each on top of what the earlier ones left: they add up to one."""
    shares = [1 / (1 + SHARE * t) for t in range(len(models))]
    left = np.cumprod([1.0] + [1 - w for w in reversed(shares)])
    weights = [w * rest for w, rest in zip(shares, reversed(left[:-1]), strict=True)]
    assert sum(weights) == pytest.approx(1)
    return sum(w * x for w, x in zip(weights, models, strict=True))


def path(problem, rounds=4):
    states = [train(problem, rounds=1)]
    for _ in range(rounds - 1):
        states.append(train(problem, state=states[-1]))
    return states


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedavg+momentum"])
def test_training_goes_on_from_the_last_model_and_the_average_is_handed_out(method):
    plain, ours = tiny(method, per_round=2), tiny(f"{method}+average:share={SHARE}", per_round=2)
    models = [plain.method.shared(state.server) for state in path(plain)]
    state = path(ours)[-1]
    ids = everyone(0, 1).ids
    trained_from, used = (messages(p, state, ids)[0][0] for p in (ours, ours.in_use))
    assert_close(trained_from, models[-1].expand(2, -1), rtol=0, atol=0)
    assert_close(used, by_hand(models).expand(2, -1), rtol=1e-12, atol=1e-14)
    assert_close(ours.method.shared(state.server), used[0], rtol=0, atol=0)


def test_fedncv_averages_the_same_way():
    plain, ours = tiny("fedncv:average=0", per_round=2), tiny(f"fedncv:average={SHARE}", per_round=2)
    models = [model_of(state) for state in path(plain)]
    state = path(ours)[-1]
    assert_close(model_of(state), models[-1], rtol=0, atol=0)
    down, _ = messages(ours.in_use, state, everyone(0).ids)
    assert_close(down.down.x_P[0], by_hand(models), rtol=1e-12, atol=1e-14)
    assert_close(down.e_P, messages(ours, state, everyone(0).ids)[0].e_P, rtol=0, atol=0)


def test_running_statistics_are_averaged_alike():
    rule, start_R = averaged_statistics(SHARE), torch.zeros(3, dtype=torch.float64)
    ids_S, sizes_S = torch.arange(2), torch.tensor([3.0, 1.0], dtype=torch.float64)
    told = torch.rand(4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    b_R = rule.init(start_R, None)
    for t, b_SR in enumerate(told):
        mean_R = weighted_sum(Replies((), ids_S, sizes_S, sizes_S).weight_S, b_SR)
        b_R = rule.step(ServerAsk(None, t, None), b_R, None, mean_R)
    means = [(3 * b_SR[0] + b_SR[1]) / 4 for b_SR in told]
    assert_close(rule.broadcast(b_R, None, ids_S), by_hand(means).expand(2, -1), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("method", [f"fedavg+average:share={SHARE}", f"fedncv:average={SHARE}"])
def test_a_round_without_a_reply_is_a_round_for_the_model_and_for_its_statistics(method):
    """Replies in rounds 0 and 2 alone: a = x_0 + (x_2 - x_0) / (1 + 2 share), and so for the statistics."""
    plain = method.split("+")[0] if "+" in method else "fedncv:average=0"
    nobody = Draw(everyone(0, 1).ids, [False, False], [1.0, 1.0])

    def rounds(problem):
        states = [train(problem, ids=[0, 1])]
        states.append(run_round(problem, states[0], nobody)[0])
        return [*states, train(problem, state=states[1], ids=[0, 1])]

    first, _, last = rounds(tiny(plain, model=normalised))
    ours = tiny(method, model=normalised)
    state = rounds(ours)[-1]
    x_0, x_2 = model_of(first), model_of(last)
    assert_close(ours.method.shared(state.server), x_0 + (x_2 - x_0) / (1 + 2 * SHARE), rtol=1e-12, atol=1e-14)
    b_0, b_2 = first.buffers, last.buffers
    assert_close(state.buffers, b_0 + (b_2 - b_0) / (1 + 2 * SHARE), rtol=1e-10, atol=1e-12)


def test_the_average_is_what_is_scored_and_exported():
    ours = tiny("fedavg+average:share=3", model=normalised, per_round=2)
    plain = tiny("fedavg", model=normalised, per_round=2)
    state = train(ours, rounds=4)
    same = state._replace(server=state.server.server._replace(x_P=state.server.a_P), buffers=state.buffers)
    assert evaluate.before(ours, state) == evaluate.before(plain, same)
    assert evaluate.after(ours, state) == evaluate.after(plain, same)
    theirs = export(plain, same)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in export(ours, state).items())
    last = same._replace(server=state.server.server)
    assert not torch.equal(export(plain, last)["0.weight"], theirs["0.weight"])


@pytest.mark.parametrize("method", ["fedncv", "fedavg+average", "fedncv:blend=2,average=2"])
def test_every_engine_scores_the_same_models(method):
    """By the loss, which tells models apart where the accuracy of a few samples does not."""
    task = TASKS["classification"]
    task = task._replace(score=lambda logits, target: -task.loss(logits, target).double())
    problem = tiny(method, model=normalised, per_round=2)._replace(task=task)
    state = train(problem, rounds=3)
    before, after, engine = evaluate.before(problem, state), evaluate.after(problem, state), ScoringEngine([problem])
    for alone, (together,) in ((before, engine.before([state])), (after, engine.after([state]))):
        assert alone.keys() == together.keys()
        for name, value in alone.items():
            assert together[name] == pytest.approx(value), name
    with ProcessesEngine([problem], workers=1) as processes:
        assert processes.before([state]) == [before]
        assert processes.after([state]) == [after]


def test_a_client_predicts_with_a_share_of_its_trained_statistics_too():
    problem = tiny("fedncv:blend=1.5", model=normalised, per_round=2)  # 1 / (1 + 1.5 * 2) after two rounds
    state = train(problem, rounds=2)
    (arrival,) = arrivals(problem.in_use, state, everyone(1).ids)
    trained = train_client(problem, 2, arrival)
    ask = problem.ask(1, trained.buffers_R, 2, received_R=arrival.buffers_R)
    used_R = problem.method.predict(ask, trained.y_P, arrival.down, trained.kept.own).buffers_R
    assert_close(used_R, 0.75 * arrival.buffers_R + 0.25 * trained.buffers_R, rtol=1e-12, atol=1e-14)
    assert not torch.equal(trained.buffers_R, arrival.buffers_R)


def test_after_training_every_engine_scores_with_that_share(monkeypatch):
    problem = tiny("fedncv:blend=1.5", model=normalised, per_round=2)
    state = train(problem, rounds=2)
    expected = []
    for arrival in arrivals(problem.in_use, state, everyone(0, 1, 2, 3).ids):
        trained_R = train_client(problem, 2, arrival).buffers_R
        expected.append(0.75 * arrival.buffers_R + 0.25 * trained_R)
    one_by_one, together = [], []
    monkeypatch.setattr(
        evaluate, "score", lambda problem, u, used: one_by_one.append(used.buffers_R) or evaluate.Scored(0.0)
    )
    evaluate.after(problem, state)
    assert_close(torch.stack(one_by_one), torch.stack(expected), rtol=1e-12, atol=1e-14)
    scores, engine = stacked_scores.scores, ScoringEngine([problem])  # its trial scores too
    monkeypatch.setattr(stacked_scores, "scores", lambda *given: together.append(given[2].buffers_R) or scores(*given))
    engine.after([state])
    assert_close(torch.cat(together), torch.stack(expected), rtol=1e-10, atol=1e-12)


def test_a_study_with_personal_statistics_keeps_them_personal():
    problem = tiny("fedncv", model=normalised, buffers="personal")
    assert problem.buffer_rule == "personal"
    assert tiny("pfedsim", model=normalised, buffers="personal").buffer_rule != "personal"  # has rules of its own
    state = train(problem, rounds=2)
    assert "pooled" not in evaluate.before(problem, state)


def test_no_share_is_the_method_itself():
    assert find_method("fedavg+average:share=0").hand_out is None
    assert find_method("fedncv:average=0").hand_out is None


@pytest.mark.parametrize(
    "text", ["fedavg+average:share=-1", "fedavg+average:share=nan", "fedavg+average:share=inf", "fedncv:average=-0.1"]
)
def test_a_share_below_zero_is_refused(text):
    with pytest.raises(ValueError, match="at least 0"):
        find_method(text)


def test_momentum_keeps_what_a_rule_says_of_itself():
    method = find_method("fedavg")._replace(buffers=averaged_statistics(SHARE))
    assert with_momentum(method).buffers.shared


def test_momentum_is_refused_on_any_method_that_hands_out_another_model():
    method = find_method("fedavg")
    with pytest.raises(ValueError, match="\\+momentum before \\+average"):
        with_momentum(method._replace(hand_out=method.broadcast))


def test_switches_that_cannot_work_say_so():
    find_method("fedavg+average+momentum")  # put right
    with pytest.raises(ValueError, match="already"):
        find_method("fedncv+average")
    for method in ("fedper", "pfedsim", "local"):
        with pytest.raises(ValueError, match="all clients share"):
            train(tiny(f"{method}+average"))
