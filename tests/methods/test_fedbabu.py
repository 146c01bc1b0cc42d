"""FedBABU on loss (head * body - t_u)^2 / 2: the head keeps its start, and what "after" trains."""

import pytest
import torch
from federations import everyone, products, quadratics, tiny, train, vector
from torch.testing import assert_close

from fedncv.engine import evaluate
from fedncv.engine.problem import arrivals
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


def test_the_noise_of_dp_leaves_the_head():
    problem = tiny("fedbabu+dp:noise=1")
    server = train(problem).server.server
    head, body = problem.model.layout.head, problem.model.layout.body
    assert torch.equal(server.x_P[head], problem.model.start_P[head])
    assert not torch.equal(server.x_P[body], problem.model.start_P[body])


def test_before_is_the_shared_model_itself():
    problem = tiny("fedbabu")
    row = evaluate.before(problem, train(problem))
    assert row["before"] == row["pooled"]


def test_a_model_without_a_body_is_refused():
    with pytest.raises(ValueError, match="this model is a head alone, which fedbabu never trains"):
        train(quadratics("fedbabu"))


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match="tune"):
        find_method("fedbabu:tune=tail")
