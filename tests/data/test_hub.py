"""Downloads, from a local stand-in for the hub in the library's own format."""

import io
import socket

import numpy as np
import pytest
from PIL import Image

from fedncv.data import DATASETS, hub, load
from fedncv.data.idx import emnist_files

QUIET = {"note": lambda _: None}


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    library = pytest.importorskip("datasets", reason="the extra 'hub' (datasets) is not installed")
    monkeypatch.setenv("FEDNCV_HUB", str(tmp_path / "hub"))
    library.disable_progress_bars()
    return library


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return {"bytes": buffer.getvalue(), "path": None}


def stand_in(library, tmp_path, name, *, image="image", n=3, first_label=0, extra=()):
    """What ``save_to_disk`` writes for the entry; -> images, labels as they should be read."""
    entry = DATASETS[name]
    channels, height, width = entry.shape
    random, tables, images, labels = np.random.default_rng(0), {}, [], []
    for split in (*entry.hub.splits, *extra):
        x = random.integers(0, 256, (n, height, width, 3) if channels == 3 else (n, height, width), dtype=np.uint8)
        y = random.integers(0, entry.num_classes, n) + first_label
        features = library.Features(
            {image: library.Image(), "other": library.Value("int64"), entry.hub.label: library.Value("int64")}
        )
        columns = {image: [png(pixels) for pixels in x], "other": [0] * n, entry.hub.label: y.tolist()}
        tables[split] = library.Dataset.from_dict(columns, features=features)
        if split in entry.hub.splits:
            images.append(x.transpose(0, 3, 1, 2) if channels == 3 else x[:, None])
            labels.append(y)
    library.DatasetDict(tables).save_to_disk(tmp_path / "hub" / entry.hub.id)
    return np.concatenate(images), np.concatenate(labels)


@pytest.mark.parametrize("name", [name for name, entry in DATASETS.items() if entry.hub and not entry.hub.files])
def test_every_dataset_is_downloaded_by_its_id_once(datasets, tmp_path, monkeypatch, name):
    """An unused split (the paper's SVHN without extra) is left out, other columns are ignored."""
    image = "img" if name == "cifar10" else "image"
    x, y = stand_in(datasets, tmp_path, name, image=image, extra=("leftover",))
    said = []
    data = load(name, tmp_path, verify=False, note=said.append)
    assert np.array_equal(data.x.numpy(), x)
    assert np.array_equal(data.y.numpy(), y)
    assert f"downloading {DATASETS[name].hub.id}" in said[0]
    monkeypatch.setenv("FEDNCV_HUB", str(tmp_path / "gone"))
    again = load(name, tmp_path, verify=False, note=said.append)
    assert np.array_equal(again.x.numpy(), x)
    assert len(said) == 1


def test_where_the_hub_keeps_the_original_files_these_are_read(tmp_path, monkeypatch):
    import gzip
    import struct

    monkeypatch.setenv("FEDNCV_HUB", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "Royc30ne" / "emnist-letters"
    folder.mkdir(parents=True)
    for number, name in enumerate(emnist_files("letters")):
        array = np.full((2, 28, 28) if "images" in name else 2, number + 1, np.uint8)
        head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        (folder / name).write_bytes(gzip.compress(head + array.tobytes()))
    data = load("emnist_letters", tmp_path, verify=False, **QUIET)
    assert data.y.tolist() == [1, 1, 3, 3]  # files 2 and 4, counted from zero


def test_a_download_of_the_wrong_size_is_refused(datasets, tmp_path, cache):
    stand_in(datasets, tmp_path, "svhn")
    with pytest.raises(ValueError, match=r"svhn: 6 images, there must be 99289.*; or put train_32x32.mat"):
        load("svhn", tmp_path, **QUIET)
    assert list((cache / "decoded").iterdir()) == []


def test_labels_of_another_dataset_are_refused(datasets, tmp_path):
    stand_in(datasets, tmp_path, "svhn", first_label=10)
    with pytest.raises(ValueError, match=r"label 1\d is out of range 0..9"):
        load("svhn", tmp_path, verify=False, **QUIET)


def test_other_columns_are_named(datasets, tmp_path):
    table = datasets.Dataset.from_dict({"text": ["a"], "label": [0]})
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "hub" / "ufldl-stanford" / "svhn")
    with pytest.raises(ValueError, match=r"has the columns \['text', 'label'\], but needs a picture and 'label'"):
        load("svhn", tmp_path, verify=False, **QUIET)


def test_a_corrupt_picture_is_named_by_its_row(datasets, tmp_path):
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {
        "image": [png(np.zeros((32, 32, 3), np.uint8)), {"bytes": b"\x89PNG broken", "path": None}],
        "label": [0, 1],
    }
    table = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "hub" / "ufldl-stanford" / "svhn")
    with pytest.raises(ValueError, match="ufldl-stanford/svhn row 1 is not a complete picture"):
        load("svhn", tmp_path, verify=False, **QUIET)


def test_an_id_that_is_not_there_is_one_line(datasets, tmp_path):
    with pytest.raises(ValueError, match="svhn is not in the folder that replaces the hub") as caught:
        load("svhn", tmp_path, **QUIET)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["svhn", "emnist"])
def test_without_a_network_there_is_one_line_at_once(tmp_path, monkeypatch, name):
    def unreachable(*_, **__):
        raise OSError("no route to host")

    for variable in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "HF_ENDPOINT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(hub, "import_module", lambda _: None)
    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(ValueError, match=r"huggingface.co is not reachable \(no route to host\); or put ") as caught:
        load(name, tmp_path, **QUIET)
    assert "\n" not in str(caught.value)


def test_whatever_the_library_raises_becomes_one_line():
    with pytest.raises(ValueError, match=r"cannot download ylecun/mnist \(first second\)"):  # noqa: SIM117
        with hub.plain_errors(DATASETS["mnist"].hub):
            raise RuntimeError("first\nsecond")
