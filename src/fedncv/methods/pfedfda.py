"""pFedFDA: a generative classifier of features, interpolated between the client's statistics and everybody's.

    classifier of (mu, Sigma):   logits_c = z' A mu_c - mu_c' A mu_c / 2 + log pi_{u,c},     A = regularised(Sigma)^-1
             regularised(Sigma) = (1 - eps) Sigma + eps * trace(Sigma) / F * identity
             pi_{u,c} = (n_{u,c} / n_u + eps) / (1 + C eps)
    client   body <- body - lr * gradient of CE, the classifier of the global (mu, Sigma) held fixed
             one more pass: features z_i in eval mode, their class means mu_u, and around them
             Sigma_u = sum_i (z_i - mu_{u,y_i}) (z_i - mu_{u,y_i})' / (n_u - 1) + ridge * identity
             mu_u' = beta mu_u + (1 - beta) mu,   Sigma_u' = beta Sigma_u + (1 - beta) Sigma
             sends  Delta_u of the body, mu_u', Sigma_u'
    server   body, mu, Sigma <- means over the clients, weighted by samples
    predict  with the classifier of (mu_u', Sigma_u'), from a pass over the own training samples at that model
    beta     of 0, 1/10, ..., 1 that with the smallest cross-entropy of two-fold cross-validation on the client's
             training samples, each class split in halves
    A class with at most two samples, or none, takes the global mean, and its samples count around that in Sigma_u.

McLaughlin and Su, NeurIPS 2024, https://arxiv.org/abs/2411.00329, Algorithm 1.
Departures from the paper: beta is searched on a grid instead of by ten steps of L-BFGS, and is one number for means and
covariance. The ridge of 1 is that of the authors' code, which also adds 1e-4 to every entry. Without it the classifier
grows as the clusters of features tighten, and training becomes unstable. Their code takes the features from all batches
of the training epochs, at as many different models; here one pass at the trained model gives them.

Letters: M = places of training samples, F = features, Q = parameters of the body.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedncv.flat import Model, Output
from fedncv.keys import uniform
from fedncv.methods.base import (
    Ask,
    Batch,
    Federation,
    Method,
    Phase,
    Prediction,
    ServerAsk,
    Stepped,
    Sums,
    Work,
    for_all,
)
from fedncv.methods.fedavg import fedavg
from fedncv.methods.gathered import SURVEY, Gathered, members, see, start

CANDIDATES = 11  # of beta, from 0 to 1
FEW = 2  # samples of a class up to which it takes the global mean: the number of folds
TINY = 1e-12  # on the diagonal: a single sample, or features that are all zero, have no covariance


@dataclass(frozen=True, kw_only=True)
class Config:
    eps: float = 1e-4
    """Share of the mean variance in the covariance, and frequency added to each class, above 0 and below 1."""

    ridge: float = 1.0
    """Added to the diagonal of a client's covariance, at least 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.ridge < math.inf:
            raise ValueError(f"ridge must be at least 0 and finite, not {self.ridge}")
        if not 0 < self.eps < 1:
            raise ValueError(f"eps must be above 0 and below 1, not {self.eps}")


class Gaussians(NamedTuple):
    """Class means and their shared covariance."""

    mu_CF: Tensor
    sigma_FF: Tensor


class Server(NamedTuple):
    body_Q: Tensor
    gaussians: Gaussians


class Down(NamedTuple):
    body_Q: Tensor
    gaussians: Gaussians


class Up(NamedTuple):
    delta_Q: Tensor
    mu: Tensor  # C F numbers
    sigma: Tensor  # F F numbers


class Classifier(NamedTuple):
    W_CF: Tensor
    b_C: Tensor


class Scratch(NamedTuple):
    classifier: Classifier  # of the global statistics
    gathered: Gathered


def log_prior(counts_C: Tensor, eps: float) -> Tensor:
    pi_C = counts_C / counts_C.sum().clamp(min=1) + eps
    return (pi_C / pi_C.sum()).log()


def classifier(gaussians: Gaussians, log_pi_C: Tensor, eps: float) -> Classifier:
    """Return the linear classifier of these statistics."""
    mu_CF, sigma_FF = gaussians
    width = sigma_FF.shape[0]
    eye_FF = torch.eye(width, dtype=sigma_FF.dtype, device=sigma_FF.device)
    regular_FF = (1 - eps) * sigma_FF + (eps * sigma_FF.diagonal().sum() / width + TINY) * eye_FF
    W_CF = torch.linalg.solve(regular_FF, mu_CF.T).T
    return Classifier(W_CF, log_pi_C - (W_CF * mu_CF).sum(dim=1) / 2)


def logits(found: Classifier, z_BF: Tensor) -> Tensor:
    return z_BF @ found.W_CF.T + found.b_C


def estimated(gathered: Gathered, weight_M: Tensor, shared: Gaussians, ridge: float) -> Gaussians:
    """Return means and covariance of the samples with weight 1."""
    of_class_MC = members(gathered.label_M, weight_M, len(shared.mu_CF))
    n_C = of_class_MC.sum(dim=0)
    mu_CF = of_class_MC.T @ gathered.z_MF / n_C.clamp(min=1)[:, None]
    mu_CF = torch.where((n_C > FEW)[:, None], mu_CF, shared.mu_CF)
    centred_MF = (gathered.z_MF - mu_CF[gathered.label_M]) * weight_M[:, None]
    scatter_FF = centred_MF.T @ centred_MF / (n_C.sum() - 1).clamp(min=1)
    return Gaussians(mu_CF, scatter_FF + ridge * torch.eye(len(scatter_FF), dtype=mu_CF.dtype, device=mu_CF.device))


def between(mine: Gaussians, shared: Gaussians, beta: Tensor) -> Gaussians:
    return Gaussians(*(beta * a + (1 - beta) * b for a, b in zip(mine, shared, strict=True)))


def folds(gathered: Gathered, num_classes: int) -> Tensor:
    """Return 0 or 1 for every place: the samples of each class in turn, in the pass's random order."""
    of_class_MC = members(gathered.label_M, gathered.real_M, num_classes)
    rank_M = (of_class_MC.cumsum(dim=0) * of_class_MC).sum(dim=1)
    return rank_M % 2


def chosen(gathered: Gathered, shared: Gaussians, log_pi_C: Tensor, config: Config) -> Tensor:
    """Return beta; 0 for a client with a single sample, which has nothing to compare."""
    fold_M = folds(gathered, len(log_pi_C))
    candidates_L = torch.linspace(0, 1, CANDIDATES, dtype=log_pi_C.dtype, device=log_pi_C.device)
    target_MC = members(gathered.label_M, gathered.real_M, len(log_pi_C))
    parts = []
    for fold in (0, 1):
        mine = estimated(gathered, gathered.real_M * (fold_M != fold), shared, config.ridge)
        held_MC = target_MC * (fold_M == fold)[:, None]
        parts.append((mine, held_MC, held_MC.sum().clamp(min=1)))
    losses = []
    for beta in candidates_L:
        loss = torch.zeros_like(beta)
        for mine, held_MC, size in parts:
            found = classifier(between(mine, shared, beta), log_pi_C, config.eps)
            loss = loss - (held_MC * torch.log_softmax(logits(found, gathered.z_MF), dim=1)).sum() / size
        losses.append(loss)
    beta = candidates_L[torch.stack(losses).argmin()]
    return torch.where(gathered.real_M.sum() > 1, beta, 0.0)


def adapted(gathered: Gathered, shared: Gaussians, log_pi_C: Tensor, config: Config) -> Gaussians:
    """Return the client's own statistics, interpolated with the shared ones."""
    beta = chosen(gathered, shared, log_pi_C, config)
    return between(estimated(gathered, gathered.real_M, shared, config.ridge), shared, beta)


def pfedfda(config: Config = Config()) -> Method:
    def init(x_P: Tensor, federation: Federation) -> Server:
        width, classes = federation.layout.features.numel(), federation.num_classes
        mu_CF = uniform(federation.key, classes * width, dtype=x_P.dtype).to(x_P.device).reshape(classes, width)
        return Server(x_P[federation.layout.body], Gaussians(mu_CF, torch.eye(width).to(x_P)))

    def phases(epochs: int) -> tuple[Phase, ...]:
        return Phase(epochs, trains=("body",)), Phase(1, trains=(), mode="eval")

    def broadcast(server: Server, ids_S: Tensor) -> Down:
        gaussians = Gaussians(*(for_all(each, ids_S) for each in server.gaussians))
        return Down(for_all(server.body_Q, ids_S), gaussians)

    def prior_of(ask: Ask) -> Tensor:
        return log_prior(ask.client.label_counts_C, config.eps)

    def begin(ask: Ask, down: Down, _own: Any) -> tuple[Tensor, Scratch]:
        head_H = down.body_Q.new_zeros(ask.layout.num_parameters - len(down.body_Q))  # the model's head has no part
        y_P = torch.cat([down.body_Q, head_H])
        return y_P, Scratch(classifier(down.gaussians, prior_of(ask), config.eps), start(ask, y_P))

    def direction(
        ask: Ask, y_P: Tensor, batch: Batch, _down: Down, _own: Any, scratch: Scratch
    ) -> tuple[Tensor, Scratch]:
        if ask.phase == 1:
            return torch.zeros_like(y_P), scratch._replace(gathered=see(ask, y_P, batch, scratch.gathered))

        def loss(y_P: Tensor) -> Tensor:
            z_BF = ask.forward(y_P, batch).features_BF.flatten(1)
            losses_B = ask.losses(logits(scratch.classifier, z_BF), batch)
            return (batch.weight_B * losses_B).sum() / batch.size

        return ask.grad_of(loss, y_P), scratch

    def finish(ask: Ask, y_P: Tensor, _work: Work, down: Down, own: Any, scratch: Scratch) -> tuple[Up, Any]:
        mine = adapted(scratch.gathered, down.gaussians, prior_of(ask), config)
        return Up(down.body_Q - y_P[ask.layout.body], mine.mu_CF.flatten(), mine.sigma_FF.flatten()), own

    def step(_ask: ServerAsk, server: Server, sums: Sums) -> Stepped:
        mu_CF, sigma_FF = server.gaussians
        gaussians = Gaussians(sums.mean("mu").view_as(mu_CF), sums.mean("sigma").view_as(sigma_FF))
        return Stepped(Server(server.body_Q - sums.mean("delta_Q"), gaussians))

    def predict(ask: Ask, y_P: Tensor, down: Down, _own: Any) -> Prediction:
        mine = adapted(ask.survey, down.gaussians, prior_of(ask), config)
        return Prediction(y_P, ask.buffers_R, given=classifier(mine, prior_of(ask), config.eps))

    def decide(_model: Model, _x_P: Tensor, output: Output, found: Classifier) -> Tensor:
        return logits(found, output.features_BF.flatten(1))

    return fedavg()._replace(
        init=init,
        phases=phases,
        broadcast=broadcast,
        begin=begin,
        direction=direction,
        finish=finish,
        step=step,
        predict=predict,
        shared=lambda _server: None,
        model=None,
        with_model=None,
        decide=decide,
        survey=SURVEY,
        reveals={
            "delta_Q": "the client's update of the body",
            "mu": "the mean features of each of its classes, mixed with the shared ones, and so which classes it holds",
            "sigma": "the covariance of its features, mixed with the shared one",
        },
        bounds={"mu": 1024.0, "sigma": 65536.0},  # features, and their squares
        refuses={
            "prior": "the classifier of pfedfda contains the client's label frequencies already",
            "samples": "pfedfda looks at its samples in a phase of its own",
            **dict.fromkeys(
                ("median", "trimmed", "krum", "clipped"),
                "pfedfda averages class means and a covariance that belong together, and a rule for each field alone "
                "would make them disagree",
            ),
            "topology": "the server replaces its class means and its covariance by those of the replies, whose weights "
            "sum to one over all clients and not over a neighbourhood",
        },
    )
