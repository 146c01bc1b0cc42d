"""Small federations that tests share: two quadratics with everything known, and a tiny classifier."""

from collections import namedtuple

import numpy as np
import torch
from torch import nn

from fedncv.config import RunConfig
from fedncv.data import Clients, Dataset
from fedncv.engine.problem import build, start
from fedncv.engine.round import Draw
from fedncv.engine.sequential import run_round
from fedncv.keys import key_for
from fedncv.methods import find_method
from fedncv.methods.base import Federation, Replies, ServerAsk, aggregate
from fedncv.models import MODELS
from fedncv.tasks import Task


def full_fedncv(knobs="", more=""):
    """Return FedNCV with all that its server can keep: rows of h, c and alpha, their sums, the moments behind beta.

    Alpha and beta are 0 until clients have come back: a third round is the first to train and to step with them.
    """
    return ",".join(filter(None, ["fedncv:drift.alpha=learned", knobs])) + "+memory:beta=learned" + more


FULL_FEDNCV = full_fedncv()
ROBUST = (
    "scaffold+median",
    "fedncv:momentum=off+trimmed:share=0.3",
    "fednova+krum:share=0.3",
    "fedexp:epsilon=0.1+clipped",
)
"""A chain for every rule of robust combining, with fields of every kind: arrays, single numbers, memory."""


def bare_fedncv(
    *, memory="off", beta=1.0, weights="self_normalised", drift="off", alpha=1.0, rate=0.5, momentum=0.0, average=0.0
):
    """Return FedNCV with everything off but these."""
    text = "fedavg"
    if memory != "off":
        text += f"+memory:beta={'learned' if memory == 'adaptive' else beta}"
    if weights == "ht":
        text += "+ht"
    if drift != "off":
        text += f"+drift:alpha=learned,rate={rate}" if drift == "adaptive" else f"+drift:alpha={alpha}"
    return text + f"+momentum:beta={momentum}+average:share={average}"


def inside(server, name):
    """Return the field ``name`` of a server's state, or of the state that a switch has put around it."""
    while not hasattr(server, name):
        server = server.server
    return getattr(server, name)


def model_of(state):
    """Return the model that clients train from."""
    return inside(state.server, "x_P")


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
    settings = {"clients": len(a), "per_round": len(a), "rounds": 10**6, "batch_size": 10**6} | config
    config = RunConfig(dtype="float64", epochs=steps, lr=lr, **settings)
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


class Product(nn.Module):
    """f = head * body, a number each: what is trained first, and by whom it is kept, shows in the numbers."""

    def __init__(self, body, head):
        super().__init__()
        self.body = nn.Parameter(torch.tensor([float(body)]))
        self.head = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.head.weight, head)

    def forward(self, x):
        return self.head(self.body.expand(len(x), 1))


def products(method, *, targets=(0.0, 3.0), body=1.0, head=1.0, lr=0.1, epochs=1, **config):
    """Client u holds one sample of loss (head * body - target_u)^2 / 2."""
    y = torch.tensor([[1.0, t] for t in targets], dtype=torch.float64)
    dataset = Dataset("products", torch.zeros(len(targets), 1, dtype=torch.float64), y, 1)
    none = np.array([], dtype=np.int64)
    clients = Clients([np.array([u]) for u in range(len(targets))], [none] * len(targets))
    settings = {"clients": len(targets), "per_round": len(targets), "rounds": 10, "batch_size": 4} | config
    return build(
        RunConfig(dtype="float64", epochs=epochs, lr=lr, **settings),
        data=dataset,
        clients=clients,
        model=lambda _shape, _outputs: Product(body, head),
        method=find_method(method) if isinstance(method, str) else method,
        task=QUADRATIC,
    )


# ---- replies made by hand ------------------------------------------------------------------------------


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def federation(sizes=(1, 1), *, layout=None, rounds=10):
    """What a server knows of clients of these sizes."""
    return Federation(len(sizes), len(sizes), rounds, vector(*sizes), 1, layout, key_for(0, "test"))


def answer(method, server, replies, *, sizes=(1, 1), round=0, model=None):
    """The server after ``replies``: client -> the parts of its ``up``."""
    ids = sorted(replies)
    up = namedtuple("Up", method.reveals)
    ups = up(*(torch.stack(list(part)) for part in zip(*(replies[u] for u in ids), strict=True)))
    stacked = Replies(ups, torch.tensor(ids), vector(*(sizes[u] for u in ids)), torch.ones(len(ids)))
    return aggregate(method, ServerAsk(model, round, key_for(0, "test", round)), server, stacked).server


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


def tiny(method, *, sizes=(20, 13, 9, 18), model=Tiny, inputs=None, **config):
    """Sorted labels, cut in pieces: every client lacks a class. A quarter of each client's samples tests.

    ``inputs`` replaces the samples' inputs. A method that needs every client in every round has them.
    """
    method = find_method(method) if isinstance(method, str) else method
    if method.graph == "symmetric":
        config = {name: value for name, value in config.items() if name not in ("per_round", "dropout", "diverged")}
    dataset = tiny_dataset(sum(sizes))
    if inputs is not None:
        dataset = dataset._replace(x=inputs)
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


def frozen_mlp(shape, num_classes):
    """The model ``mlp`` with its first layer frozen, for a name such as --model federations:frozen_mlp."""
    module = MODELS["mlp"](shape, num_classes)
    module.body.requires_grad_(False)
    return module
