"""Gather the features of a client's training samples in one pass, for methods that fit something to them.

Letters of shapes: M places, at least as many as training samples; F features; B samples of a batch; C classes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedncv.methods.ask import Ask, Batch
from fedncv.methods.base import Survey


class Gathered(NamedTuple):
    """Features and labels of the samples seen; places that no sample took have ``real`` 0."""

    z_MF: Tensor
    label_M: Tensor
    real_M: Tensor


def start(ask: Ask, y_P: Tensor) -> Gathered:
    """Return empty places for all training samples of the client."""
    places, width = ask.num_batches * ask.batch_size, ask.layout.features.numel()
    real_M = y_P.new_zeros(places)
    return Gathered(y_P.new_zeros(places, width), real_M.to(torch.int64), real_M)


def see(ask: Ask, y_P: Tensor, batch: Batch, gathered: Gathered) -> Gathered:
    """Return ``gathered`` with a batch's features at ``y_P``; the batch's number says which places it takes."""
    if batch.y.is_floating_point() or batch.y.dim() > 1:
        raise ValueError("the method sorts features by class: the targets must be one label per sample")
    z_BF = ask.forward(y_P[: ask.layout.num_parameters], batch).features_BF.flatten(1)
    first = torch.as_tensor(batch.number, device=y_P.device) * ask.batch_size
    place_B = first + torch.arange(len(z_BF), device=y_P.device)
    return Gathered(
        gathered.z_MF.index_copy(0, place_B, z_BF),
        gathered.label_M.index_copy(0, place_B, batch.y.to(torch.int64)),
        gathered.real_M.index_copy(0, place_B, batch.weight_B.to(y_P.dtype)),
    )


SURVEY = Survey(start, see)


def members(label_M: Tensor, weight_M: Tensor, num_classes: int) -> Tensor:
    """Return M x C: the weight of each sample at its class."""
    return (label_M[:, None] == torch.arange(num_classes, device=label_M.device)) * weight_M[:, None]
