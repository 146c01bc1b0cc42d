"""Pictures from a folder, with a ResNet of your own.

The folder has one subfolder per class, as most picture collections have. Here it is made from the built-in digits;
put your own path in its place. `size=32` scales every picture to 32 x 32, `channels=1` reads it in grey.
"""

import tempfile
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedncv


def write_pictures(folder: Path, most: int = 300) -> None:
    digits = load_digits()
    for i in range(most):
        path = folder / str(digits.target[i]) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[i] * 15.9).astype("uint8")).save(path)


class Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.GroupNorm(4, width),
        )  # fmt: skip
        self.short = nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.path(x) + self.short(x)).relu()  # type: ignore[no-any-return]


class SmallResNet(nn.Module):
    """Three blocks; `--model resnet18` is the full one."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            Block(shape[0], 8, 2), Block(8, 16, 2), Block(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Linear(32, classes)  # methods such as FedRep keep the part called head at the client

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(Path(folder))
        result = fedncv.simulate(
            method="fedncv",
            data=f"folder:path={folder},size=32,channels=1",
            model=SmallResNet,
            clients=6,
            per_round=3,
            rounds=6,
            epochs=2,
            batch_size=16,
            lr=0.1,
        )
    for row in result.rows:
        if "before" in row:
            print(f"round {row['round']:3}  before {row['before']:.3f}")
