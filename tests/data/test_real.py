"""The real files of MNIST, Fashion-MNIST and CIFAR-10, where FEDNCV_DATA says they are."""

import gzip
import os
import time

import numpy as np
import pytest
import torch

from fedncv.data import DATASETS, divide, load, prior_accuracy, split
from fedncv.data.load import find

DATA = os.environ.get("FEDNCV_DATA", "")


@pytest.fixture
def folder(request):
    from pathlib import Path

    name = request.param
    if not DATA or find(DATASETS[name], Path(DATA)) is None:
        pytest.skip(f"no {name} in FEDNCV_DATA ({DATA or 'not set'})")
    return name


@pytest.mark.parametrize(
    ("folder", "counts", "first"),
    [
        ("mnist", [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958], [5, 0, 4, 1, 9]),
        ("fashion_mnist", [7000] * 10, [9, 0, 0, 3, 0]),
        ("cifar10", [6000] * 10, [6, 9, 9, 4, 1]),
    ],
    indirect=["folder"],
)
def test_the_original_files_are_read_whole(folder, counts, first):
    """Class counts and first labels as published; checksums and the number of images are verified by load."""
    data = load(folder, DATA, note=lambda _: None)
    assert data.y.bincount().tolist() == counts
    assert data.y[:5].tolist() == first
    started = time.perf_counter()
    again = load(folder, DATA, note=lambda _: None)
    assert time.perf_counter() - started < 1
    assert torch.equal(again.x[::999], data.x[::999])


@pytest.mark.parametrize("folder", ["mnist"], indirect=True)
def test_decompressed_files_are_taken_too_but_not_for_fashion_mnist(folder, tmp_path):
    raw = tmp_path / "d" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    (tmp_path / "d" / "MNIST").symlink_to(tmp_path / "d" / "FashionMNIST")
    for name in DATASETS[folder].files:
        with gzip.open(f"{DATA}/MNIST/raw/{name}") as packed:
            (raw / name[: -len(".gz")]).write_bytes(packed.read())
    assert len(load("mnist", tmp_path / "d", note=lambda _: None).y) == 70_000
    with pytest.raises(ValueError, match="md5 checksum"):
        load("fashion_mnist", tmp_path / "d", note=lambda _: None)


@pytest.mark.parametrize("folder", ["cifar10"], indirect=True)
def test_the_label_prior_alone_reaches_what_the_protocol_says(folder):
    """62 to 69 % over partitions of CIFAR-10 at alpha = 0.1 over 100 clients."""
    data = load(folder, DATA, note=lambda _: None)
    accuracy = []
    for seed in range(10):
        parts = divide(data, "dirichlet:alpha=0.1", num_clients=100, seed=seed)
        accuracy.append(prior_accuracy(data.labels.numpy(), split(parts, 0.25, seed), 10))
    assert 0.60 < min(accuracy) <= max(accuracy) < 0.72
    assert 0.63 < np.mean(accuracy) < 0.69
