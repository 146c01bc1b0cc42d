"""The four settings that all peers are timed on: data, partition, clients of each round, model and numbers.

    a   the CIFAR-10 study of this project: LeNet5 with BatchNorm, 5 local epochs
    b   the CIFAR-10 benchmark of pfl-research: 1,000 users of 50 samples, 50 a round, evaluation every ten rounds
    c   next character of Shakespeare, a client per speaker (some merged), LEAF's LSTM
    d   ResNet-18 with GroupNorm on CIFAR-10

``federate`` makes the same federation for every peer: our partition under the seed, our draw of clients per round, and
our initial model. A client whose last batch would be a single sample gives up that sample, because FL-bench skips such
batches and BatchNorm cannot train on them. So every peer trains the same number of samples.
"""

import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from study import images
from torch import Tensor, nn

from fedncv.config import RunConfig
from fedncv.data import Clients, Dataset, divide, load, split
from fedncv.data.owners import Indices
from fedncv.engine.problem import Problem, build, start
from fedncv.engine.sampling import draw_uniform
from fedncv.export import export
from fedncv.flat import Factory
from fedncv.keys import generator
from fedncv.models import MODELS

ROOT = Path(__file__).resolve().parents[2]
CARRIED = ROOT / ".carry" / "peers"
TOKENS, LENGTH = 80, 80  # of Shakespeare


class Setting(NamedTuple):
    title: str
    data: str
    partition: str
    clients: int
    per_round: int
    epochs: int
    batch_size: int
    lr: float
    model: Factory
    test_share: float = 0.25
    most: int = 0  # training samples of a client, at most; 0: all
    eval_every: int = 0  # rounds between evaluations that are timed; 0: none is

    def small(self) -> "Setting":
        """Return the setting with few and small clients: does it run?"""
        return self._replace(clients=12, per_round=5, epochs=min(2, self.epochs), batch_size=4, most=7)


class PflCNN(nn.Module):
    """The CNN of pfl-research's CIFAR-10 benchmark (``simple_cnn``): two convolutions, dropout, one hidden layer."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        flat = 64 * ((height - 4) // 2) * ((width - 4) // 2)
        self.body = nn.Sequential(
            nn.Conv2d(channels, 32, 3), nn.ReLU(),
            nn.Conv2d(32, 64, 3), nn.ReLU(),
            nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(),
            nn.Linear(flat, 128), nn.ReLU(), nn.Dropout(0.5),
        )  # fmt: skip
        self.head = nn.Linear(128, num_classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(part.weight)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.head(self.body(x))


study = partial(Setting, data="cifar10", partition="dirichlet:alpha=0.1", clients=100, per_round=10, batch_size=32)
SETTINGS: dict[str, Setting] = {
    "a": study("CIFAR-10, LeNet5 with BatchNorm, 5 epochs", epochs=5, lr=0.01, model=MODELS["lenet5"]),
    "b": Setting(
        "CIFAR-10, pfl's benchmark", data="cifar10", partition="iid", clients=1000, per_round=50, epochs=1,
        batch_size=10, lr=0.1, model=PflCNN, test_share=1 / 6, eval_every=10,
    ),
    "c": Setting(
        "Shakespeare, LEAF's LSTM", data="shakespeare", partition="natural", clients=100, per_round=10, epochs=1,
        batch_size=32, lr=0.5, model=MODELS["char_lstm"], most=200,
    ),
    "d": study("CIFAR-10, ResNet-18 with GroupNorm", clients=200, epochs=1, lr=0.01, model=MODELS["resnet18"]),
}  # fmt: skip


class Federation(NamedTuple):
    """A setting with its samples, in one partition."""

    setting: Setting
    dataset: Dataset
    clients: Clients
    seed: int

    @property
    def is_real(self) -> bool:
        """Whether these are the real data; otherwise they are random, of the same shape."""
        return self.dataset.name != "drawn"

    def ids(self, round: int) -> list[int]:
        """Return the clients of a round, counted from 0: those that fedncv draws."""
        rng = generator(self.seed, "clients", round)
        drawn: list[int] = draw_uniform(rng, self.setting.clients, self.setting.per_round).tolist()
        return drawn

    def samples(self, first: int, last: int) -> int:
        """Return the samples that are trained from round ``first`` to the one before ``last``."""
        sizes = self.clients.sizes
        return sum(int(sizes[self.ids(t)].sum()) for t in range(first, last)) * self.setting.epochs

    def module(self) -> nn.Module:
        return self.setting.model(self.dataset.input_shape, self.dataset.num_classes)

    def problem(self, *, rounds: int, device: str) -> Problem:
        setting = self.setting
        config = RunConfig(
            data="custom",
            clients=setting.clients,
            per_round=setting.per_round,
            rounds=rounds,
            epochs=setting.epochs,
            batch_size=setting.batch_size,
            lr=setting.lr,
            eval_every=setting.eval_every,
            seed=self.seed,
            device=device,
        )
        return build(config, data=self.dataset, clients=self.clients, model=setting.model)

    def initial(self) -> dict[str, Tensor]:
        """Return the initial model of fedncv under the seed, which all peers begin with."""
        problem = self.problem(rounds=1, device="cpu")
        return export(problem, start(problem))

    def tensors(self, device: str) -> tuple[Tensor, Tensor]:
        """Return all inputs, scaled, and all targets, on the device."""
        chunks = torch.split(torch.arange(len(self.dataset.x)), 10_000)
        x = torch.cat([self.dataset.inputs(chunk, torch.float32).to(device) for chunk in chunks])
        return x, self.dataset.y.to(device)

    @property
    def test(self) -> Tensor:
        """The test samples of all clients."""
        return torch.from_numpy(np.concatenate(self.clients.test))

    def accuracy(self, state_dict: dict[str, Tensor], device: str) -> float:
        """Return the accuracy of a model on the test samples of all clients."""
        module = self.module().to(device).eval()
        module.load_state_dict(state_dict)
        right = 0
        with torch.no_grad():
            for index in torch.split(self.test, 2_000):
                predicted = module(self.dataset.inputs(index, torch.float32).to(device)).argmax(dim=1)
                right += int((predicted == self.dataset.y[index].to(device)).sum())
        return right / len(self.test)


def find_data(name: str, data_dir: str) -> Dataset:
    """Return the dataset, or random samples of the same shape if its files are not there."""
    try:
        return load(name, data_dir or None)
    except (ValueError, OSError) as error:
        print(f"{name}: random samples instead ({str(error).splitlines()[0]})", file=sys.stderr)
    if name == "cifar10":
        return images()
    rng = np.random.default_rng(0)
    sizes = np.sort(rng.lognormal(np.log(500), 0.6, size=141).astype(np.int64).clip(100))
    x = torch.from_numpy(rng.integers(TOKENS, size=(int(sizes.sum()), LENGTH), dtype=np.int8))
    y = torch.from_numpy(rng.integers(TOKENS, size=len(x)))
    return Dataset("drawn", x, y, TOKENS, owners=torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)))


def federate(name: str, *, data_dir: str = "", small: bool = False, seed: int = 0) -> Federation:
    setting = SETTINGS[name].small() if small else SETTINGS[name]
    return of_setting(setting, find_data(setting.data, data_dir), seed)


def of_setting(setting: Setting, dataset: Dataset, seed: int = 0) -> Federation:
    parts = divide(dataset, setting.partition, num_clients=setting.clients, seed=seed)
    clients = split(parts, setting.test_share, seed)
    train = [trimmed(part[: setting.most or None], setting.batch_size) for part in clients.train]
    test = [part[: setting.most or None] for part in clients.test]
    return Federation(setting, dataset, Clients(train, test), seed)


def trimmed(part: Indices, batch_size: int) -> Indices:
    """Leave out the last sample if it would be a batch of its own."""
    return part[:-1] if len(part) > 1 and len(part) % batch_size == 1 else part


def use_carried() -> None:
    """Find the carried peers, and last of all the stand-ins; packages that are installed come first."""
    sys.path += [str(path) for path in (CARRIED, CARRIED / "standins") if path.is_dir()]
