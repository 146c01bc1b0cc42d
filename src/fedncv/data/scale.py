"""Standardise inputs by the training samples of all clients: (x - mean) / std per feature.

    mean_f, std_f   over the union of all clients' training samples; never over a test sample
    a feature that has only one value there stays as it is (mean 0, std 1)

A real federation would compute these two vectors by a secure sum before training. Here they are computed where the
samples are divided: in a simulation for each seed's split, in `fedncv federation init` once.
"""

import numpy as np

from fedncv.data.dataset import Dataset
from fedncv.data.owners import grouped
from fedncv.data.split import Clients


def standardised(dataset: Dataset, clients: Clients) -> Dataset:
    """Return the dataset with the training samples' mean and std, if it asks for it; otherwise the dataset itself."""
    if not dataset.standardise:
        return dataset
    if not dataset.x.is_floating_point() or dataset.x.dim() < 2:
        raise ValueError(
            f"{dataset.name}: inputs are {dataset.x.dtype} of shape {tuple(dataset.x.shape)}; "
            "standardise works on floats with a feature axis, (n, features, ...)"
        )
    train = np.sort(grouped(clients.train).flat)
    x_nF = dataset.x.cpu().numpy()[train].astype(np.float64)
    x_nF = np.moveaxis(x_nF, 1, -1).reshape(-1, dataset.x.shape[1])
    flat_F = x_nF.min(axis=0) == x_nF.max(axis=0)
    mean_F = np.where(flat_F, 0.0, x_nF.mean(axis=0))
    std_F = np.where(flat_F, 1.0, x_nF.std(axis=0))
    return dataset._replace(mean=tuple(mean_F.tolist()), std=tuple(std_F.tolist()), standardise=False)
