"""Models by name. Any ``package.module:function`` that maps (input shape, outputs) to a module works as well."""

from collections.abc import Callable
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from fedncv.flat import Factory
from fedncv.imports import import_object
from fedncv.spec import nearest


class LeNet5(nn.Module):
    """conv 5x5 -> BN -> ReLU -> pool, twice; two linear layers; and the head. For images of at least 16x16."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        if len(input_shape) != 3 or min(input_shape[1:]) < 16:
            other = "mlp, or char_lstm for token ids" if len(input_shape) == 1 else "mlp"
            raise ValueError(f"lenet5 needs images of at least 16x16, not inputs of shape {input_shape}; try {other}")
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


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut; the first may halve the picture."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), norm(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), norm(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x):  # type: ignore[no-untyped-def]
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2016) for small pictures: a 3x3 stem without pooling, then as published.

    GroupNorm with two groups stands for BatchNorm, as in Reddi et al., "Adaptive federated optimization", 2021: it
    has no running statistics, which clients with different labels do not share.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        norm: Callable[[int], nn.Module] = partial(nn.GroupNorm, 2),
    ) -> None:
        super().__init__()
        if len(input_shape) != 3:
            raise ValueError(
                f"resnet18 needs pictures (channels, height, width), not inputs of shape {input_shape}; try mlp"
            )
        self.stem = nn.Sequential(nn.Conv2d(input_shape[0], 64, 3, padding=1, bias=False), norm(64), nn.ReLU())
        widths = (64, 64, 128, 256, 512)
        self.body = nn.Sequential(
            *(
                block
                for i in range(4)
                for block in (
                    Residual(widths[i], widths[i + 1], 1 if i == 0 else 2, norm),
                    Residual(widths[i + 1], widths[i + 1], 1, norm),
                )
            ),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(512, num_classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.head(self.body(self.stem(x)))


def resnet18_bn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """ResNet-18 with BatchNorm, as published but for the stem."""
    return ResNet18(input_shape, num_classes, nn.BatchNorm2d)


class CharLSTM(nn.Module):
    """LEAF's model of Shakespeare: embedding of 8, two LSTM layers of 256, the last output into the head.

    Inputs are token ids (sequence,). The tokens that it reads are those that it predicts, so the number of outputs is
    the size of the alphabet. (Caldas et al., "LEAF", 2018; torch's LSTM has a second bias in each gate.)
    """

    def __init__(self, input_shape: tuple[int, ...], num_tokens: int) -> None:
        super().__init__()
        check_tokens("char_lstm", input_shape)
        self.embedding = nn.Embedding(num_tokens, 8)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, num_tokens)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.head(self.lstm(self.embedding(token_ids("char_lstm", x)))[0][:, -1])


class CharTransformer(nn.Module):
    """A small causal transformer: width 128, 4 layers of 4 heads, feed-forward 512, learned positions, no dropout.

    It has about as many parameters as char_lstm, and the same inputs and outputs.
    """

    def __init__(self, input_shape: tuple[int, ...], num_tokens: int) -> None:
        super().__init__()
        check_tokens("char_transformer", input_shape)
        self.embedding, self.positions = nn.Embedding(num_tokens, 128), nn.Embedding(input_shape[0], 128)
        self.body = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, num_tokens)

    def forward(self, x):  # type: ignore[no-untyped-def]
        length = x.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        h = self.embedding(token_ids("char_transformer", x)) + self.positions.weight[:length]
        for layer in self.body:
            h = layer(h, src_mask=later, is_causal=True)
        return self.head(self.norm(h[:, -1]))


class Logits(nn.Module):
    """A module of the library transformers, from token ids (or other inputs) to its logits, one row per sample.

    ``last`` takes those after the last token: the next token's, of a causal model.
    """

    def __init__(self, model: nn.Module, *, last: bool = False) -> None:
        super().__init__()
        self.model, self.last = model, last

    def forward(self, x):  # type: ignore[no-untyped-def]
        logits = self.model(x).logits
        return logits[:, -1] if self.last else logits


def check_tokens(name: str, input_shape: tuple[int, ...]) -> None:
    if len(input_shape) != 1:
        raise ValueError(f"{name} needs sequences of token ids (length,), not inputs of shape {input_shape}")


def token_ids(name: str, x: Tensor) -> Tensor:
    if x.is_floating_point():
        raise ValueError(f"{name} needs token ids, whole numbers, not {x.dtype}; give inputs as integers")
    return x.long()


MODELS: dict[str, Factory] = {
    "lenet5": LeNet5,
    "mlp": MLP,
    "resnet18": ResNet18,
    "resnet18_bn": resnet18_bn,
    "char_lstm": CharLSTM,
    "char_transformer": CharTransformer,
}


def find_model(name: str) -> Factory:
    if name in MODELS:
        return MODELS[name]
    if ":" not in name:
        raise ValueError(nearest(name, MODELS, what="model") + "; or name your own as package.module:function")
    factory: Factory = import_object(name, what="model")
    return factory
