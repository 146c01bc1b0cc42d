"""Synthetic(alpha, beta): as many clients as wanted, each with its own labelling and its own inputs.

    client k   u_k ~ alpha N(0, 1),   W_k, b_k ~ N(u_k, 1)     its linear classifier, which sets the labels
               B_k ~ beta N(0, 1),    v_k ~ N(B_k, 1)          the centre of its inputs
    sample     x ~ N(v_k, diag(j^-1.2)),   y = argmax(W_k x + b_k)

Large ``alpha``: clients label differently. Large ``beta``: their inputs differ. All clients have equally many samples,
and client k has the same ones in a population of any size: clients are drawn in blocks, each with its own key.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, https://arxiv.org/abs/1812.06127, sec. 5.1.
Departures from the paper: ``samples`` per client instead of a power law. As in the authors' code, alpha and beta are
standard deviations.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedncv.data.dataset import Dataset
from fedncv.keys import key_for
from fedncv.machine import memory

BLOCK = 256  # clients that are drawn together


def load_synthetic(
    _folder: Path,
    *,
    clients: int = 100,
    samples: int = 100,
    alpha: float = 1.0,
    beta: float = 1.0,
    features: int = 60,
    classes: int = 10,
    seed: int = 0,
) -> Dataset:
    """Draw the samples of all clients, who are their owners; no file is needed.

    ``samples`` are those of each client. ``seed`` is that of the samples: runs with different seeds of their own share
    them.
    """
    least_of = {"clients": (clients, 1), "samples": (samples, 1), "features": (features, 1), "classes": (classes, 2)}
    least_of |= {"seed": (seed, 0)}
    spread_of = {"alpha": (alpha, 0), "beta": (beta, 0)}
    for name, (value, least) in (least_of | spread_of).items():
        if not least <= value < 2**63:
            raise ValueError(f"synthetic: {name} is {value}; it must be at least {least} and finite")
    _check_size(clients, samples, features, classes)
    x_NSF = np.empty((clients, samples, features), dtype=np.float32)
    y_NS = np.empty((clients, samples), dtype=np.int64)
    for first in range(0, clients, BLOCK):
        key = key_for(seed, "synthetic", 0, first // BLOCK).tolist()
        rng = np.random.Generator(np.random.SFC64(key))  # twice as fast as Philox
        x_KSF, y_KS = _block(rng, samples, alpha, beta, features, classes)
        held = min(BLOCK, clients - first)
        x_NSF[first : first + held], y_NS[first : first + held] = x_KSF[:held], y_KS[:held]
    x_nF, y_n = torch.from_numpy(x_NSF).flatten(0, 1), torch.from_numpy(y_NS).flatten()
    return Dataset("synthetic", x_nF, y_n, classes, owners=torch.arange(clients).repeat_interleave(samples))


def _check_size(clients: int, samples: int, features: int, classes: int) -> None:
    """Raise ValueError if the samples do not fit into this machine's memory."""
    of_client = samples * (4 * features + 8) + 4 * features * (classes + 1)  # the latter only while it is drawn
    held, most = max(clients, BLOCK) * of_client, memory() // 2
    if held > most:
        fits = of_client * BLOCK <= most
        remedy = f"use at most {most // of_client:,} clients of this size" if fits else "use smaller numbers"
        raise ValueError(
            f"synthetic: {clients:,} clients of {samples:,} samples with {features:,} features and {classes:,} classes "
            f"take more than half of this machine's memory ({most / 5e8:,.0f} GB); {remedy}"
        )


def _block(
    rng: np.random.Generator, samples: int, alpha: float, beta: float, features: int, classes: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return inputs (K, S, F) and labels (K, S) of a block of clients."""

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, dtype=np.float32)

    u_K, B_K = np.float32(alpha) * normal(BLOCK), np.float32(beta) * normal(BLOCK)
    W_KFC, b_KC = u_K[:, None, None] + normal(BLOCK, features, classes), u_K[:, None] + normal(BLOCK, classes)
    v_KF = B_K[:, None] + normal(BLOCK, features)
    deviation_F = np.arange(1, features + 1, dtype=np.float32) ** np.float32(-0.6)
    x_KSF = v_KF[:, None] + deviation_F * normal(BLOCK, samples, features)
    return x_KSF, (x_KSF @ W_KFC + b_KC[:, None]).argmax(axis=2)
