"""pFedFDA: the classifier is Bayes' rule, statistics by hand, and beta by who explains held-out samples better."""

import pytest
import torch
from federations import answer, everyone, tiny, train, vector
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

from fedncv.engine import evaluate
from fedncv.engine.local import train as train_client
from fedncv.engine.looking import surveyed
from fedncv.engine.problem import arrivals, start
from fedncv.export import export
from fedncv.methods import find_method
from fedncv.methods.gathered import Gathered
from fedncv.methods.pfedfda import Config, Gaussians, between, chosen, classifier, estimated, folds, log_prior, logits
from fedncv.secure.fixed_point import outside

BARE = Config(ridge=0)
ANYWHERE = Gaussians(torch.zeros(2, 1, dtype=torch.float64), torch.eye(1, dtype=torch.float64))


def gathered(features, labels, real=None):
    z = torch.tensor(features, dtype=torch.float64).view(len(labels), -1)
    return Gathered(z, torch.tensor(labels), vector(*(real or [1] * len(labels))))


def ones(found):
    return torch.ones_like(found.real_M)


def test_the_classifier_is_the_posterior_of_gaussians_with_these_priors():
    """softmax(logits) = pi_c N(z; mu_c, Sigma) / sum, with torch's density."""
    torch.manual_seed(0)
    root = torch.randn(3, 3, dtype=torch.float64)
    sigma, mu, eps = root @ root.T + 0.1 * torch.eye(3), torch.randn(4, 3, dtype=torch.float64), 0.01
    log_pi = log_prior(vector(1, 5, 0, 2), eps)
    z = torch.randn(6, 3, dtype=torch.float64)
    found = torch.softmax(logits(classifier(Gaussians(mu, sigma), log_pi, eps), z), 1)
    regular = (1 - eps) * sigma + eps * sigma.trace() / 3 * torch.eye(3)
    joint = torch.stack([MultivariateNormal(m, regular).log_prob(z) for m in mu], 1) + log_pi
    assert_close(found, torch.softmax(joint, 1))


def test_the_prior_gives_absent_classes_a_little():
    """(n_c / n + eps) / (1 + C eps)"""
    assert_close(log_prior(vector(3, 1, 0), 0.1).exp(), vector(0.85, 0.35, 0.1) / 1.3)


def test_means_and_covariance_by_hand():
    """Class 0: 1, 2, 6 around 3. Class 1 has two samples: around the global mean 10. (4 + 1 + 9 + 4 + 1) / (5 - 1)."""
    found = gathered([1.0, 2, 6, 12, 9], [0, 0, 0, 1, 1])
    mine = estimated(found, ones(found), Gaussians(vector(0, 10)[:, None], ANYWHERE.sigma_FF), 0)
    assert_close(mine.mu_CF, vector(3, 10)[:, None])
    assert_close(mine.sigma_FF, vector(19 / 4)[:, None])


def test_only_samples_with_weight_count():
    found = gathered([1.0, 2, 6, 12, 9, 77], [0, 0, 0, 1, 1, 0])
    mine = estimated(found, vector(1, 1, 1, 1, 1, 0), Gaussians(vector(0, 10)[:, None], ANYWHERE.sigma_FF), 2)
    assert_close(mine.sigma_FF, vector(19 / 4 + 2)[:, None])


def test_absent_classes_and_single_samples_give_numbers():
    for found in (gathered([1.0], [0]), gathered([0.0, 0, 0], [1, 1, 1]), gathered([5.0], [0], real=[0])):
        mine = between(estimated(found, found.real_M, ANYWHERE, 0), ANYWHERE, chosen_beta(found))
        assert logits(classifier(mine, log_prior(vector(1, 0), 1e-4), 1e-4), found.z_MF).isfinite().all()


def chosen_beta(found, shared=ANYWHERE):
    return chosen(found, shared, log_prior(vector(1, 1), 1e-4), BARE)


def test_the_halves_split_each_class():
    found = gathered([0.0] * 8, [0, 1, 1, 0, 0, 1, 0, 1], real=[1, 1, 1, 1, 1, 1, 1, 0])
    fold = folds(found, 2)
    for label, size in ((0, 4), (1, 3)):
        here = (found.label_M == label) & (found.real_M > 0)
        assert abs(int((fold[here] == 0).sum()) - size / 2) <= 0.5


def clusters(num, width):
    """Two classes at -1 and 1 in the first of ``width`` features, each with deviation 0.5."""
    labels = torch.tensor([0, 1] * (num // 2))
    z = 0.5 * torch.randn(num, width, dtype=torch.float64)
    z[:, 0] += 2.0 * labels - 1
    means = torch.zeros(2, width, dtype=torch.float64)
    means[:, 0] = vector(-1, 1)
    return Gathered(z, labels, ones_of(num)), Gaussians(means, 0.25 * torch.eye(width, dtype=torch.float64))


def ones_of(num):
    return torch.ones(num, dtype=torch.float64)


def test_beta_is_large_where_the_global_means_are_wrong_and_small_where_samples_are_few():
    torch.manual_seed(1)
    many, right = clusters(80, 1)
    assert chosen_beta(many, Gaussians(-right.mu_CF, right.sigma_FF)) >= 0.8
    few, right = clusters(16, 6)  # fewer than the numbers of a covariance
    assert chosen_beta(few, right) <= 0.3


def test_beta_minimises_the_cross_validated_loss_written_out():
    """Two folds, each fitted without the other: torch's own density again, on a grid of eleven."""
    torch.manual_seed(2)
    found = gathered(torch.randn(14, 2).tolist(), [0, 1, 0, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0, 1])
    shared = Gaussians(torch.randn(2, 2).double() / 2, torch.eye(2, dtype=torch.float64) * 0.7)
    fold, eps = folds(found, 2), 1e-4
    losses = []
    for beta in torch.linspace(0, 1, 11, dtype=torch.float64):
        loss = 0.0
        for held in (0, 1):
            z, y = found.z_MF[fold != held], found.label_M[fold != held]
            mu = torch.stack([z[y == c].mean(0) for c in (0, 1)])
            centred = z - mu[y]
            sigma = centred.T @ centred / (len(z) - 1)
            mu, sigma = beta * mu + (1 - beta) * shared.mu_CF, beta * sigma + (1 - beta) * shared.sigma_FF
            regular = (1 - eps) * sigma + eps * sigma.trace() / 2 * torch.eye(2)
            z, y = found.z_MF[fold == held], found.label_M[fold == held]
            log_p = torch.stack([MultivariateNormal(m, regular).log_prob(z) for m in mu], 1)
            loss += torch.nn.functional.cross_entropy(log_p, y)
        losses.append(float(loss))
    best = losses.index(min(losses))
    assert 0 < best < 10 or min(losses) < sorted(losses)[1] - 1e-6
    assert float(chosen_beta(found, shared)) == pytest.approx(best / 10)


def test_features_are_those_of_the_trained_body_in_eval_mode_and_one_pass_is_counted():
    problem = tiny("pfedfda", sizes=(20, 13, 9, 18))
    (arrival,) = arrivals(problem, train(problem), everyone(0).ids)
    trained = train_client(problem, 1, arrival)
    found = surveyed(problem, 1, arrival._replace(buffers_R=trained.buffers_R), trained.y_P)
    ask = problem.ask(0, trained.buffers_R, 1, survey=found)
    down, own = arrival.down, arrival.kept.own
    predicted = problem.method.predict(ask, trained.y_P, down, own).given
    sent = Gaussians(trained.up.mu.view(3, 6), trained.up.sigma.view(6, 6))
    eps, counts = 1e-4, problem.client(0).label_counts_C
    mine = estimated(found, found.real_M, down.gaussians, 1)
    betas = [
        b for b in torch.linspace(0, 1, 11).double() if torch.allclose(between(mine, down.gaussians, b)[0], sent[0])
    ]
    assert betas  # what is sent is such an interpolation, of the trained body's features
    assert_close(between(mine, down.gaussians, betas[0]).sigma_FF, sent.sigma_FF)
    assert predicted.W_CF.shape == (3, 6)
    assert logits(predicted, found.z_MF).isfinite().all()
    assert counts.sum() == found.real_M.sum()
    assert classifier(sent, log_prior(counts, eps), eps).b_C.isfinite().all()
    totals = train(tiny("pfedfda", sizes=(20, 20), epochs=3)).totals
    assert (totals.gradients, totals.forwards) == (2 * 15 * 3, 2 * 15)


def test_the_server_weights_by_samples():
    method = find_method("pfedfda")
    problem = tiny("pfedfda", sizes=(12, 24))
    server = start(problem).server
    one, two = torch.ones(18, dtype=torch.float64), torch.ones(36, dtype=torch.float64)
    after = answer(
        method, server, {0: (server.body_Q, one, two), 1: (0 * server.body_Q, 5 * one, 9 * two)}, sizes=(1, 3)
    )
    assert_close(after.gaussians.mu_CF, torch.full((3, 6), 4.0, dtype=torch.float64))
    assert_close(after.gaussians.sigma_FF, torch.full((6, 6), 7.0, dtype=torch.float64))
    assert_close(after.body_Q, server.body_Q * 0.75)


def test_the_model_s_head_has_no_part():
    """Predictions and messages do not depend on its initial values, and it is not sent."""
    problem = tiny("pfedfda")
    (arrival,) = arrivals(problem, start(problem), everyone(1).ids)
    trained = train_client(problem, 0, arrival)
    assert (trained.y_P[problem.model.layout.head] == 0).all()
    assert trained.up.delta_Q.shape == (problem.model.layout.body.stop,)


def test_labels_of_test_samples_do_not_matter_before_they_are_scored():
    problem = tiny("pfedfda")
    (arrival,) = arrivals(problem, train(problem), everyone(2).ids)
    y = problem.dataset.y.clone()
    y[problem.clients.test[2]] = 0
    other = problem._replace(dataset=problem.dataset._replace(y=y))
    ours, theirs = (evaluate.received(each, 1, arrival).given for each in (problem, other))
    assert torch.equal(ours.W_CF, theirs.W_CF)
    assert torch.equal(ours.b_C, theirs.b_C)


def test_bad_knobs_and_what_it_contains_are_refused():
    with pytest.raises(ValueError, match="eps must be above 0 and below 1, not 0"):
        find_method("pfedfda:eps=0")
    with pytest.raises(ValueError, match="ridge must be at least 0 and finite, not -1"):
        find_method("pfedfda:ridge=-1")
    with pytest.raises(ValueError, match=r"leave .prior out: the classifier of pfedfda"):
        find_method("pfedfda+prior")


def test_neither_a_shared_model_nor_a_clients_own_is_exported():
    problem = tiny("pfedfda")
    state = train(problem)
    with pytest.raises(ValueError, match="no model that all clients share; name a client"):
        export(problem, state)
    with pytest.raises(ValueError, match="there is no shared model either"):
        export(problem, state, client=1)


def test_a_fixed_point_has_room_for_features_and_their_squares():
    """A covariance of 5000 is far above the default bound; nothing is clipped up to 2^16."""
    grid = find_method("pfedfda+fixed_point").grid
    assert outside(grid, "sigma", vector(5000.0, -1000.0)) == 0
    assert outside(grid, "mu", vector(500.0)) == 0
    assert outside(grid, "delta_Q", vector(500.0)) == 1
