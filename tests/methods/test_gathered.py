"""The features that a client gathers of its training samples: of all of them, once, and in eval mode."""

import pytest
import torch
from federations import everyone, quadratics, tiny, train, vector
from torch.testing import assert_close

from fedncv.engine.local import train as train_client
from fedncv.engine.looking import looking, surveyed
from fedncv.engine.problem import arrivals, start
from fedncv.methods import find_method
from fedncv.methods.gathered import members


def test_the_store_is_the_clients_training_samples_in_eval_mode():
    """The tests' samples are not in it, dropout is off, running statistics are used, and none is left out."""
    problem = tiny("knnper")
    (arrival,) = arrivals(problem, train(problem), everyone(2).ids)
    found = surveyed(problem, 1, arrival, arrival.down.x_P)
    index = torch.from_numpy(problem.clients.train[2])
    inputs = problem.dataset.inputs(index, problem.dtype)
    output, _ = problem.model.forward(arrival.down.x_P, arrival.buffers_R, inputs, mode="eval")
    ours, theirs = found.z_MF[found.real_M > 0], output.features_BF
    order, other = ours.sum(1).argsort(), theirs.sum(1).argsort()
    assert_close(ours[order], theirs[other])
    assert found.label_M[found.real_M > 0][order].tolist() == problem.dataset.y[index][other].tolist()


def test_a_last_batch_of_one_sample_is_in_the_store_too():
    """Nine training samples in batches of four: training leaves the last one out, because BatchNorm needs two."""
    problem = tiny("knnper", sizes=(12, 12))
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    assert problem.model.smallest_batch == 2
    assert surveyed(problem, 0, arrival, arrival.down.x_P).real_M.sum() == 9


def test_members_weigh_each_sample_at_its_class():
    assert members(torch.tensor([1, 0, 1]), vector(1, 2, 0), 3).tolist() == [[0, 1, 0], [2, 0, 0], [0, 0, 0]]


def test_a_look_moves_nothing_and_is_not_a_round():
    problem = tiny("knnper", momentum=0.9, weight_decay=0.5)
    (arrival,) = arrivals(problem, train(problem), everyone(1).ids)
    looks = problem._replace(method=looking(problem.method, problem.method.survey))
    trained = train_client(looks, 1, arrival._replace(down=arrival.down.x_P), smallest=1)
    assert torch.equal(trained.y_P, arrival.down.x_P)
    assert torch.equal(trained.buffers_R, arrival.buffers_R)
    assert trained.gradients == 0
    assert trained.forwards == len(problem.clients.train[1])


def test_targets_that_are_not_labels_are_refused():
    problem = quadratics(find_method("fedavg")._replace(survey=find_method("knnper").survey))
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    with pytest.raises(ValueError, match="the targets must be one label per sample"):
        surveyed(problem, 0, arrival, arrival.down.x_P)
