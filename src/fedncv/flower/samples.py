"""A client's data folder: one safetensors file with only its own samples.

    x      (n, ...)  inputs: bytes for pictures, or floats, or token ids
    y      (n, ...)  targets
    train  (m,)      numbers of the training samples, in order
    test   (k,)      numbers of the test samples
    metadata         name, number of outputs, mean and std of the inputs per channel, as JSON

The server holds no sample. It knows the form of one (``Form``), which is enough to make a model.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedncv.data import Clients, Dataset, check_samples
from fedncv.flower.private import private_files, private_folder
from fedncv.keys import key_for, normal
from fedncv.store import write_atomically

FILE = "samples.safetensors"


class SamplesError(ValueError):
    """The file of samples cannot be used."""


class Samples(NamedTuple):
    dataset: Dataset
    train: NDArray[np.int64]
    test: NDArray[np.int64]


class Form(NamedTuple):
    """The form of a sample, which everyone in a federation may know."""

    input_shape: tuple[int, ...]
    input_dtype: str  # as stored: uint8, float32, int64
    target_shape: tuple[int, ...]
    target_dtype: str
    outputs: int  # classes, or numbers that a regression predicts

    def placeholder(self, num_samples: int) -> Dataset:
        """Return artificial samples of this form: noise of a fixed key, targets of zero."""
        dtype = getattr(torch, self.input_dtype)
        size = (num_samples, *self.input_shape)
        if dtype == torch.uint8 or dtype.is_floating_point:  # bytes are scaled to floats before use
            flat = normal(key_for(0, "placeholder"), int(np.prod(size)), dtype=torch.float64)
            x = flat.reshape(size).to(dtype if dtype.is_floating_point else torch.float32)
        else:
            x = torch.zeros(size, dtype=dtype)
        y = torch.zeros(num_samples, *self.target_shape, dtype=getattr(torch, self.target_dtype))
        return Dataset("placeholder", x, y, self.outputs)


def form_of(dataset: Dataset) -> Form:
    return Form(
        tuple(dataset.x.shape[1:]),
        str(dataset.x.dtype).removeprefix("torch."),
        tuple(dataset.y.shape[1:]),
        str(dataset.y.dtype).removeprefix("torch."),
        dataset.num_classes,
    )


def part(dataset: Dataset, clients: Clients, u: int) -> Samples:
    """Return only client u's samples: training samples first, in the order of training."""
    train, test = clients.train[u], clients.test[u]
    index = torch.from_numpy(np.concatenate([train, test]))
    mine = dataset._replace(x=dataset.x[index], y=dataset.y[index], groups=None, owners=None)
    return Samples(mine, np.arange(len(train)), np.arange(len(train), len(index)))


def write(folder: Path, samples: Samples) -> Path:
    """Write the file that ``read`` reads; for your own data make ``Samples`` of ``fedncv.data.from_arrays(...)``."""
    dataset = samples.dataset
    about = {"name": dataset.name, "outputs": dataset.num_classes, "mean": dataset.mean, "std": dataset.std}
    tensors = {
        "x": dataset.x.contiguous(),
        "y": dataset.y.contiguous(),
        "train": torch.from_numpy(np.asarray(samples.train, dtype=np.int64)),
        "test": torch.from_numpy(np.asarray(samples.test, dtype=np.int64)),
    }
    with private_files():
        private_folder(folder)
        write_atomically(folder / FILE, save(tensors, {"fedncv": json.dumps(about)}), name="samples")
    return folder / FILE


def read(folder: Path) -> Samples:
    path = folder / FILE
    try:
        with safe_open(path, framework="pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})["fedncv"])
            x, y, train, test = (file.get_tensor(name) for name in ("x", "y", "train", "test"))
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise SamplesError(
            f"{path} cannot be used ({error}); write it with fedncv.flower.samples.write(folder, samples)"
        ) from None
    for name, index in (("train", train), ("test", test)):
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < len(x):
            raise SamplesError(f"{path}: {name} names samples outside 0..{len(x) - 1}; write the file again")
    dataset = Dataset(about["name"], x, y, about["outputs"], tuple(about["mean"]), tuple(about["std"]))
    try:
        check_samples(dataset)
    except ValueError as error:
        raise SamplesError(f"{path}: {error}") from None
    return Samples(dataset, _numbers(train), _numbers(test))


def _numbers(index: Tensor) -> NDArray[np.int64]:
    return np.asarray(index.numpy(), dtype=np.int64)
