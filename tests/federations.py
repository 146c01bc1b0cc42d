"""Small federations that tests share: two quadratics with everything known, and a tiny classifier."""

import numpy as np
import torch
from torch import nn

from fedncv.config import RunConfig
from fedncv.data import Clients, Dataset
from fedncv.engine.problem import build, start
from fedncv.engine.sequential import Draw, run_round
from fedncv.methods import find_method
from fedncv.tasks import Task


def everyone(*ids):
    """A draw of just these clients, all of whom answer in full."""
    return Draw(np.array(ids), [True] * len(ids), [1.0] * len(ids))


# ---- two quadratics ------------------------------------------------------------------------------------


class Point(nn.Module):
    """One parameter, the same output for every sample."""

    def __init__(self, start):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([float(start)]))

    def forward(self, x):
        return self.theta.expand(len(x), 1)


QUADRATIC = Task(
    loss=lambda out, ab: ab[:, 0] / 2 * (out[:, 0] - ab[:, 1]) ** 2,
    score=lambda out, ab: -(ab[:, 0] / 2) * (out[:, 0] - ab[:, 1]) ** 2,
    score_name="minus loss",
)


def quadratics(method, *, a=(1.0, 4.0), b=(0.0, 1.0), sizes=None, x=5.0, lr=0.05, steps=10, **config):
    """Client u holds n_u copies of f_u(x) = a_u/2 (x - b_u)^2 and makes ``steps`` full-batch steps a round."""
    sizes = sizes or [1] * len(a)
    owner = np.repeat(np.arange(len(a)), sizes)
    y = torch.tensor([[a[u], b[u]] for u in owner], dtype=torch.float64)
    dataset = Dataset("quadratics", torch.zeros(len(owner), 1, dtype=torch.float64), y, 1)
    none = np.array([], dtype=np.int64)
    clients = Clients([np.flatnonzero(owner == u) for u in range(len(a))], [none] * len(a))
    settings = {"clients": len(a), "per_round": len(a), "rounds": 10**6} | config
    config = RunConfig(dtype="float64", epochs=steps, batch_size=10**6, lr=lr, **settings)
    return build(
        config,
        data=dataset,
        clients=clients,
        model=lambda _shape, _outputs: Point(x),
        method=find_method(method) if isinstance(method, str) else method,
        task=QUADRATIC,
    )


def train(problem, *, rounds=1, ids=None, state=None):
    """The state after some rounds, of the clients ``ids`` (or the keyed draw)."""
    state = state or start(problem)
    for _ in range(rounds):
        state, _ = run_round(problem, state, everyone(*ids) if ids else None)
    return state


# ---- a tiny classifier ---------------------------------------------------------------------------------


class Tiny(nn.Module):
    """With BatchNorm (which needs two samples here) and dropout: all that can go wrong in an engine."""

    def __init__(self, shape, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(shape[0], 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(6, num_classes)

    def forward(self, x):
        return self.head(self.body(x))


def tiny_dataset(num_samples=60, num_classes=3, seed=0):
    rng = np.random.default_rng(seed)
    y = torch.from_numpy(np.sort(rng.integers(num_classes, size=num_samples)))
    x = torch.from_numpy(rng.normal(size=(num_samples, 4))) + y[:, None]
    return Dataset("tiny", x, y, num_classes)


def tiny(method, *, sizes=(20, 13, 9, 18), model=Tiny, **config):
    """Sorted labels, cut in pieces: every client lacks a class. A quarter of each client's samples tests."""
    dataset = tiny_dataset(sum(sizes))
    ends = np.cumsum(sizes)
    parts = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    clients = Clients([p[len(p) // 4 :] for p in parts], [p[: len(p) // 4] for p in parts])
    settings = {
        "per_round": len(sizes),
        "rounds": 10,
        "batch_size": 4,
        "epochs": 2,
        "lr": 0.1,
        "dtype": "float64",
    }
    return build(
        RunConfig(clients=len(sizes), **(settings | config)),
        data=dataset,
        clients=clients,
        model=model,
        method=find_method(method) if isinstance(method, str) else method,
    )
