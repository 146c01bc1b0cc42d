"""kNN-Per: FedAvg's model, and at prediction a vote of the nearest of the client's own training samples.

    train    as FedAvg
    predict  log( lam_u * p_kNN(. | z) + (1 - lam_u) * softmax(logits) ),    z = body(x), in eval mode
             p_kNN(c | z) ~ sum over the k nearest training samples with label c of exp(-|z - z_i|^2 / (scale * F))
    lam_u    of 0, 1/10, ..., 1 that with the smallest cross-entropy of the mixture on held-out training samples: a
             share ``holdout`` of them votes for nothing while lam_u is chosen, and joins the others afterwards

Marfoq et al., ICML 2022, https://arxiv.org/abs/2111.09360, Algorithm 1.
Departures from the paper: distances are squared and divided by the number F of features, as in the authors' code.
lam_u is chosen by cross-entropy, because the accuracy of few samples has many ties; of equal ones the smallest is
taken. The model has been trained on the held-out samples (the paper keeps a validation set from training), so lam_u can
be too small where it fits them well, in particular after local training. The features of all training samples vote: the
paper's limit on the size of the store is left out.

Letters: M = places of training samples, F = features, K = neighbours, L = candidates for lam.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedncv.flat import Model, Output
from fedncv.methods.base import Ask, Method, Prediction
from fedncv.methods.fedavg import fedavg
from fedncv.methods.gathered import SURVEY, Gathered, members

CANDIDATES = 11  # of lam, from 0 to 1


@dataclass(frozen=True, kw_only=True)
class Config:
    k: int = 10
    """Nearest training samples that vote, at least 1; a client with fewer uses all it has."""
    scale: float = 1.0
    """Squared distance per feature at which a vote falls to 1/e, above 0."""
    holdout: float = 0.2
    """Share of the training samples by which lam is chosen, above 0 and below 1."""

    def __post_init__(self) -> None:
        if not self.k >= 1:
            raise ValueError(f"k must be at least 1, not {self.k}")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale must be above 0 and finite, not {self.scale}")
        if not 0 < self.holdout < 1:
            raise ValueError(f"holdout must be above 0 and below 1, not {self.holdout}")


class Store(NamedTuple):
    """The client's training samples, and the weight of their vote."""

    gathered: Gathered
    lam: Tensor


def vote(z_BF: Tensor, store: Gathered, num_classes: int, config: Config) -> Tensor:
    """Return p_kNN of each sample; even probabilities if nobody can vote."""
    squared_BM = torch.cdist(z_BF, store.z_MF, compute_mode="donot_use_mm_for_euclid_dist").square()
    squared_BM = torch.where(store.real_M > 0, squared_BM, math.inf)
    near_BK, place_BK = squared_BM.topk(min(config.k, len(store.real_M)), largest=False)
    nearest_B1 = torch.where(near_BK[:, :1].isfinite(), near_BK[:, :1], 0.0)  # the largest vote is 1: no 0 / 0
    weight_BK = torch.exp(-(near_BK - nearest_B1) / (config.scale * z_BF.shape[1]))
    of_class_BKC = store.label_M[place_BK][:, :, None] == torch.arange(num_classes, device=z_BF.device)
    votes_BC = (weight_BK[:, :, None] * of_class_BKC).sum(dim=1)
    total_B1 = votes_BC.sum(dim=1, keepdim=True)
    return torch.where(total_B1 > 0, votes_BC / torch.where(total_B1 > 0, total_B1, 1.0), 1 / num_classes)


def mixture(lam: Tensor, knn_BC: Tensor, logits_BC: Tensor) -> Tensor:
    """Return log( lam p_kNN + (1 - lam) softmax(logits) ); a probability of 0 counts as the smallest number."""
    p_BC = lam * knn_BC + (1 - lam) * torch.softmax(logits_BC, dim=1)
    return p_BC.clamp(min=torch.finfo(p_BC.dtype).tiny).log()


def held_out(real_M: Tensor, share: float) -> Tensor:
    """Return 1 for the first places, a share of the samples rounded up: the pass is in random order."""
    rank_M = real_M.cumsum(0)
    return real_M * (rank_M <= (share * real_M.sum()).ceil())


def chosen(gathered: Gathered, logits_MC: Tensor, config: Config) -> Tensor:
    """Return lam_u."""
    held_M = held_out(gathered.real_M, config.holdout)
    others = gathered._replace(real_M=gathered.real_M - held_M)
    knn_MC = vote(gathered.z_MF, others, logits_MC.shape[1], config)
    candidates_L = torch.linspace(0, 1, CANDIDATES, dtype=logits_MC.dtype, device=logits_MC.device)
    target_MC = members(gathered.label_M, held_M, logits_MC.shape[1])
    loss_L = torch.stack([-(target_MC * mixture(lam, knn_MC, logits_MC)).sum() for lam in candidates_L])
    lam = candidates_L[loss_L.argmin()]  # the first of equal ones
    return torch.where(others.real_M.sum() > 0, lam, 0.0)  # one sample: nobody votes for it


def knnper(config: Config = Config()) -> Method:
    def predict(ask: Ask, y_P: Tensor, _down: Any, _own: Any) -> Prediction:
        gathered: Gathered = ask.survey
        logits_MC = ask.head(y_P, gathered.z_MF.reshape(-1, *ask.layout.features))
        if ask.prior_C is not None:
            logits_MC = logits_MC + ask.prior_C
        return Prediction(y_P, ask.buffers_R, given=Store(gathered, chosen(gathered, logits_MC, config)))

    def decide(_model: Model, _x_P: Tensor, output: Output, store: Store) -> Tensor:
        logits_BC, z_BF = output
        return mixture(store.lam, vote(z_BF.flatten(1), store.gathered, logits_BC.shape[1], config), logits_BC)

    return fedavg()._replace(
        predict=predict,
        decide=decide,
        survey=SURVEY,
        refuses={"blend": "knnper looks at its samples with the trained model, not with a blended one"},
    )
