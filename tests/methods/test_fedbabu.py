"""FedBABU on loss (head * body - t_u)^2 / 2: the head keeps its start, and what "after" trains."""

import pytest
import torch
from federations import everyone, products, tiny, train, vector
from torch.testing import assert_close

from fedncv.engine import evaluate, stacked_scores
from fedncv.engine.problem import arrivals
from fedncv.engine.stacked import StackedEngine
from fedncv.methods import find_method


def test_a_round_by_hand_leaves_the_head():
    """head = 2, body = 1, lr 0.1: body - 0.1 * 2 (2 - t) is 0.6 for t = 0 and 1.2 for t = 3."""
    state = train(products("fedbabu", head=2.0))
    assert_close(state.server.x_P, vector(0.9, 2))


@pytest.mark.parametrize("rounds", [1, 4])
def test_the_head_is_that_of_the_start_to_the_last_bit_in_every_round(rounds):
    """The last round included; weight decay and momentum do not reach it."""
    problem = tiny("fedbabu", rounds=rounds, momentum=0.9, weight_decay=0.1)
    head = problem.model.layout.head
    server = train(problem, rounds=rounds).server
    assert torch.equal(server.x_P[head], problem.model.start_P[head])
    assert not torch.equal(server.x_P, problem.model.start_P)


@pytest.mark.parametrize(("tune", "moves"), [("all", ("body", "head")), ("head", ("head",)), ("body", ("body",))])
def test_after_trains_the_part_that_is_asked_for(tune, moves):
    problem = tiny(f"fedbabu:tune={tune}")
    (arrival,) = arrivals(problem, train(problem), everyone(1).ids)
    used = []
    method = problem.method._replace(predict=lambda *given: used.append(problem.method.predict(*given)) or used[0])
    evaluate.score_after(problem._replace(method=method), 1, arrival)
    for part in ("body", "head"):
        here = problem.model.layout.slice(part)
        assert torch.equal(used[0].x_P[here], arrival.down.x_P[here]) == (part not in moves)
    assert torch.equal(used[0].buffers_R, arrival.buffers_R) == (tune == "head")


def test_before_is_the_shared_model_itself():
    problem = tiny("fedbabu")
    row = evaluate.before(problem, train(problem))
    assert row["before"] == row["pooled"]


def test_fine_tuning_has_its_own_rate_and_epochs():
    """products, t = 3: two steps of 0.05 on head and body by hand; the training round keeps lr 0.1 and one epoch."""
    problem = products("fedavg+finetune:lr=0.05,epochs=2", targets=(3.0,))
    tuned = problem.tuning
    assert [phase.epochs for phase in tuned.method.phases(1)] == [2]
    (arrival,) = arrivals(problem, train(problem), everyone(0).ids)
    assert_close(arrival.down.x_P, vector(1.2, 1.2))  # one step of 0.1 from (1, 1)
    body = head = 1.2
    for _ in range(2):
        error = 3 - body * head
        body, head = body + 0.05 * head * error, head + 0.05 * body * error
    seen = []
    method = problem.method._replace(predict=lambda *given: seen.append(given[1]) or problem.method.predict(*given))
    evaluate.score_after(problem._replace(method=method), 1, arrival)
    assert_close(seen[0], vector(body, head))


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "fedbabu:tune=head", "scaffold+samples:kind=svrg", "fedrod"])
def test_stacked_clients_are_fine_tuned_like_single_ones(name):
    """Also after a round of ordinary training in the same engine, with a schedule that fine-tuning ignores."""
    problem = tiny(f"{name}+finetune:lr=0.03,epochs=3", per_round=2, schedule="exponential:decay=0.5")
    engine = StackedEngine([problem])
    state = train(problem)
    for _ in range(2):
        assert stacked_scores.after(engine, [state]) == [evaluate.after(problem, state)]
        ((state, _),) = engine.run_rounds([state])
    assert engine.config.lr == 0.1


def test_other_fine_tuning_changes_no_round():
    plain, tuned = tiny("fedavg", sizes=(40, 40)), tiny("fedavg+finetune:lr=1,epochs=9", sizes=(40, 40))
    a, b = train(plain, rounds=2), train(tuned, rounds=2)
    assert torch.equal(a.server.x_P, b.server.x_P)
    assert a.totals == b.totals
    assert evaluate.before(plain, a) == evaluate.before(tuned, b)


def test_nothing_to_change_leaves_the_method_and_bad_values_are_refused():
    assert find_method("fedavg+finetune").finetune is None
    with pytest.raises(ValueError, match="lr must be at least 0 and finite, not -1"):
        find_method("fedavg+finetune:lr=-1")
    with pytest.raises(ValueError, match="epochs must be at least 0, not -1"):
        find_method("fedavg+finetune:epochs=-1")
    with pytest.raises(ValueError, match="tune"):
        find_method("fedbabu:tune=tail")
