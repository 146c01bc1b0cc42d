"""Models by name. Any ``package.module:function`` that maps (input shape, outputs) to a module works as well."""

from math import prod

from torch import nn

from fedncv.flat import Factory
from fedncv.imports import import_object
from fedncv.spec import nearest


class LeNet5(nn.Module):
    """conv 5x5 -> BN -> ReLU -> pool, twice; two linear layers; and the head. For images of at least 16x16."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        if len(input_shape) != 3 or min(input_shape[1:]) < 16:
            raise ValueError(f"lenet5 needs images of at least 16x16, not inputs of shape {input_shape}; try mlp")
        channels, *sides = input_shape
        flat = 16 * prod(((side - 4) // 2 - 4) // 2 for side in sides)
        self.body = nn.Sequential(
            nn.Conv2d(channels, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(flat, 120), nn.ReLU(),
            nn.Linear(120, 84), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(84, num_classes)

    def forward(self, x):  # type: ignore[no-untyped-def]  # torch's own modules leave it untyped
        return self.head(self.body(x))


class MLP(nn.Module):
    """One hidden layer of 64 units on the flattened input: the quick model for tests and tables."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), 64), nn.ReLU())
        self.head = nn.Linear(64, num_classes)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.head(self.body(x))


MODELS: dict[str, Factory] = {"lenet5": LeNet5, "mlp": MLP}


def find_model(name: str) -> Factory:
    if name in MODELS:
        return MODELS[name]
    if ":" not in name:
        raise ValueError(nearest(name, MODELS, what="model") + "; or name your own as package.module:function")
    factory: Factory = import_object(name, what="model")
    return factory
