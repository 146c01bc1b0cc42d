"""The CIFAR-10 study for timing: its shapes, client sizes and model, with random pixels and labels.

The time of a step does not depend on the pixels, so no files are needed. The partition is that
of 60,000 balanced labels, Dirichlet 0.1 over the clients, a quarter of each client's samples for testing.
"""

from typing import Any

import numpy as np
import torch

from fedncv.config import RunConfig
from fedncv.data import Dataset
from fedncv.engine.problem import Problem, build


def images(num_samples: int = 60_000, shape: tuple[int, ...] = (3, 32, 32), num_classes: int = 10) -> Dataset:
    rng = np.random.default_rng(0)
    y = torch.arange(num_samples) % num_classes
    x = torch.from_numpy(rng.integers(0, 256, size=(num_samples, *shape), dtype=np.uint8))
    channels = shape[0]
    return Dataset("drawn", x, y, num_classes, mean=(0.5,) * channels, std=(0.25,) * channels)


def problems(seeds: int, *, data: Dataset | None = None, **settings: Any) -> list[Problem]:
    """Return one problem per seed; they share the samples on the device."""
    data = data or images()
    made = [build(RunConfig(**({"data": "custom"} | settings), seed=seed), data=data) for seed in range(seeds)]
    return [each._replace(dataset=made[0].dataset) for each in made]


def machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    return f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"
