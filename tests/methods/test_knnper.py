"""kNN-Per: the vote and the mixture by hand, whose samples choose lam, and in which mode features are taken."""

import math

import pytest
import torch
from federations import everyone, tiny, train, vector
from torch.testing import assert_close

from fedncv.engine import evaluate, stacked_scores
from fedncv.engine.problem import arrivals, start
from fedncv.engine.stacked import StackedEngine
from fedncv.flat import Output
from fedncv.methods import find_method
from fedncv.methods.gathered import Gathered
from fedncv.methods.knnper import Config, Store, chosen, held_out, mixture, vote


def gathered(features, labels, real=None):
    z = torch.tensor(features, dtype=torch.float64)
    return Gathered(z, torch.tensor(labels), vector(*(real or [1] * len(labels))))


def test_the_vote_by_hand():
    """z = 0, F = 2: neighbours at squared distances 2, 4 and 8 vote with e^-1, e^-2, e^-4 of the nearest's scale."""
    store = gathered([[1, 1], [2, 0], [-2, 2]], [0, 1, 0])
    p = vote(torch.zeros(1, 2, dtype=torch.float64), store, 3, Config(k=3))
    weights = vector(math.exp(-1), math.exp(-2), math.exp(-4))
    assert_close(p[0], vector(weights[0] + weights[2], weights[1], 0) / weights.sum())
    p = vote(torch.zeros(1, 2, dtype=torch.float64), store, 3, Config(k=2, scale=0.5))
    assert_close(p[0], vector(math.exp(-2), math.exp(-4), 0) / (math.exp(-2) + math.exp(-4)))


def test_places_without_a_sample_do_not_vote_and_nobody_gives_even_odds():
    """A place left empty lies at the origin, nearer than every sample."""
    store = gathered([[0, 0], [5, 0]], [0, 1], real=[0, 1])
    at = torch.zeros(1, 2, dtype=torch.float64)
    assert_close(vote(at, store, 2, Config(k=5))[0], vector(0, 1))
    assert_close(vote(at, store._replace(real_M=vector(0, 0)), 2, Config())[0], vector(0.5, 0.5))


def test_far_features_give_numbers():
    store = gathered([[1e4, 0], [1.1e4, 0]], [0, 1])
    assert_close(vote(torch.zeros(1, 2, dtype=torch.float64), store, 2, Config())[0], vector(1, 0))


def test_the_mixture_is_of_probabilities_not_of_logits():
    mixed = mixture(vector(0.25)[0], vector(1, 0)[None], vector(2, 2)[None])
    assert_close(mixed.exp()[0], vector(0.25 + 0.75 / 2, 0.75 / 2))
    assert mixture(vector(1)[0], vector(1, 0)[None], vector(2, 2)[None]).isfinite().all()


def test_a_fifth_of_the_samples_rounded_up_is_held_out():
    assert held_out(vector(1, 0, 1, 1, 1, 1, 1), 0.2).tolist() == [1, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(("right", "lam"), [("vote", 1.0), ("model", 0.0)])
def test_lam_goes_to_whom_the_held_out_samples_agree_with(right, lam):
    """Two groups of features; the first sample is held out. Its neighbours say 0, the model says 1, or the reverse."""
    store = gathered([[0.0], [0.1], [-0.1], [9], [9.1], [8.9]], [0 if right == "vote" else 1, 0, 0, 1, 1, 1])
    logits = torch.tensor([[0.0, 9.0]], dtype=torch.float64).expand(6, 2)
    assert chosen(store, logits, Config(k=2, holdout=0.1)) == lam


def test_the_samples_that_vote_do_not_choose():
    """Another label of a held-out sample changes lam; another prediction for the others does not."""
    store = gathered([[0.0], [0.1], [-0.1], [9], [9.1], [8.9]], [0, 0, 0, 1, 1, 1])
    logits = torch.tensor([[0.0, 9.0]] * 6, dtype=torch.float64)
    other = logits.clone()
    other[1:] *= -1
    knobs = Config(k=2, holdout=0.1)
    assert chosen(store, logits, knobs) == chosen(store, other, knobs) == 1
    assert chosen(store._replace(label_M=torch.tensor([1, 0, 0, 1, 1, 1])), logits, knobs) == 0


def test_a_client_with_one_sample_uses_the_model():
    assert chosen(gathered([[0.0]], [0]), vector(0, 9)[None], Config()) == 0


def test_test_samples_do_not_matter_before_they_are_scored():
    problem = tiny("knnper")
    (arrival,) = arrivals(problem, train(problem), everyone(2).ids)
    y = problem.dataset.y.clone()
    y[problem.clients.test[2]] = 0
    other = problem._replace(dataset=problem.dataset._replace(y=y))
    ours, theirs = (evaluate.received(each, 1, arrival).given for each in (problem, other))
    assert torch.equal(ours.lam, theirs.lam)
    assert torch.equal(ours.gathered.z_MF, theirs.gathered.z_MF)


def test_training_is_fedavgs_and_measuring_is_no_work():
    ours, theirs = (train(tiny(name), rounds=2) for name in ("knnper", "fedavg"))
    assert torch.equal(ours.server.x_P, theirs.server.x_P)
    assert ours.totals == theirs.totals


def test_a_label_prior_is_part_of_the_models_probabilities():
    """decide gets the logits with the offset, and lam was chosen with it."""
    store = Store(gathered([[0.0]], [0]), vector(0.5)[0])
    method = find_method("knnper")
    logits = method.decide(None, None, Output(vector(1, 3)[None], vector(0)[None]), store)
    assert_close(logits.exp()[0], 0.5 * vector(1, 0) + 0.5 * torch.softmax(vector(1, 3), 0))
    problem = tiny("knnper+prior:tau=50")  # so strong that the model's class is the client's own
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    assert evaluate.received(problem, 0, arrival).given.lam == 0


def test_a_stack_measures_more_clients_than_it_trains():
    """Ten clients, of whom two train at a time; some with a single sample."""
    problem = tiny("knnper", sizes=(20, 1, 9, 1, 12, 5, 7, 8, 3, 2), per_round=2)
    state = train(problem, rounds=2)
    engine = StackedEngine([problem])
    for ours, theirs in ((stacked_scores.before, evaluate.before), (stacked_scores.after, evaluate.after)):
        assert ours(engine, [state]) == [theirs(problem, state)]


def test_bad_knobs_and_a_blend_are_refused():
    for knob, text in (("k=0", "k must be"), ("scale=0", "scale must be"), ("holdout=1", "holdout must be")):
        with pytest.raises(ValueError, match=text):
            find_method(f"knnper:{knob}")
    with pytest.raises(ValueError, match=r"leave .blend out: knnper looks"):
        find_method("knnper+blend")
