"""Server momentum: v <- beta v + move, x <- x - v, on any method with one model."""

import pytest
import torch
from federations import answer, federation, inside, model_of, tiny, train, vector
from torch.testing import assert_close

from fedncv.methods import find_method
from fedncv.methods.base import Stepped
from fedncv.methods.fedavg import fedavg
from fedncv.methods.switches.server_momentum import Config, with_momentum


def path(text, *updates):
    """How far x has moved after each update of a single client."""
    method = find_method(text)
    server, xs = method.init(vector(7.0), federation((1,))), []
    for delta in updates:
        server = answer(method, server, {0: (vector(delta),)}, sizes=(1,))
        xs.append(inside(server, "x_P").item() - 7)
    return xs


def test_three_rounds_by_hand():
    """beta 0.9, move 1, 1, 0: v = 1, 1.9, 1.71."""
    assert path("fedavg+momentum:beta=0.9", 1.0, 1.0, 0.0) == pytest.approx([-1, -2.9, -4.61])


def test_nesterov_by_hand():
    """Steps move + 0.9 v with the new v: 1 + 0.9, then 1 + 0.9 * 1.9."""
    assert path("fedavg+momentum:beta=0.9,nesterov=true", 1.0, 1.0) == pytest.approx([-1.9, -1.9 - 2.71])


def test_a_method_that_does_not_say_how_far_it_moved_is_asked_for_its_models():
    """FedDyn, alpha 1, one client: h <- h + Delta, x <- x - Delta - h. Delta = 1: move 2. Delta = 0: h = 1, move 1.
    With momentum 1/2: v = 2, then 1 + 1.
    """
    assert path("feddyn:alpha=1", 1.0, 0.0) == pytest.approx([-2, -3])
    assert path("feddyn:alpha=1+momentum", 1.0, 0.0) == pytest.approx([-2, -4])


def test_what_was_moved_is_handed_on():
    """The move of momentum, not of the method inside, is what a switch around it would build on."""
    method = find_method("fedavg+momentum")
    server = method.init(vector(7.0), federation((1,)))._replace(v_P=vector(4.0))
    stepped = method.step(None, server, type("Sums", (), {"mean": staticmethod(lambda _name: vector(1.0))}))
    assert_close(stepped.move_P, vector(3.0))
    assert_close(inside(stepped.server, "x_P"), vector(4.0))


def test_without_momentum_it_is_the_method_itself():
    assert find_method("fedavg+momentum:beta=0").switches == ()


def test_the_numbers_of_the_method_stay():
    def step(ask, server, sums):
        return fedavg().step(ask, server, sums)._replace(numbers={"length": 2.0})

    problem = tiny(with_momentum(fedavg()._replace(step=step)))
    assert torch.isfinite(model_of(train(problem))).all()
    from fedncv.engine.problem import start
    from fedncv.engine.sequential import run_round

    assert run_round(problem, start(problem))[1]["length"] == 2.0


@pytest.mark.parametrize("missing", ["model", "with_model"])
def test_it_is_refused_where_no_model_is_shared(missing):
    with pytest.raises(ValueError, match="needs a model that all clients share"):
        with_momentum(fedavg()._replace(**{missing: None}))


def test_it_builds_on_the_move_that_the_method_reports():
    """Not on x - x', whose rounding differs: here the method reports ten times as much."""

    def step(_ask, server, _sums):
        return Stepped(server._replace(x_P=server.x_P - 1), vector(10.0))

    method = with_momentum(fedavg()._replace(step=step))
    stepped = method.step(None, method.init(vector(7.0), federation((1,))), None)
    assert_close(stepped.server.v_P, vector(10.0))


@pytest.mark.parametrize("beta", [-0.1, 1.0, 1.5])
def test_momentum_is_below_one(beta):
    with pytest.raises(ValueError, match=f"beta must be at least 0 and below 1, not {beta}"):
        Config(beta=beta)
