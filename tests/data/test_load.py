"""Loading by name: the registry, the digits, and what is said when nothing is found."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.io import savemat

from fedncv.data import DATASETS, check_name, hub, load
from fedncv.data.load import data_folder, find, fingerprint

QUIET = {"note": lambda _: None}


def test_digits_are_whole_and_fit_lenet5():
    from sklearn.datasets import load_digits

    data = load("digits")
    small, labels = load_digits(return_X_y=True)
    assert data.x.shape == (1797, 1, 28, 28)
    assert data.x.dtype == torch.uint8
    assert data.y.tolist() == labels.tolist()
    assert data.x[:, :, :2].sum() == data.x[:, :, :, -2:].sum() == 0
    inner = data.x[:, 0, 2:26, 2:26].numpy()
    assert np.array_equal(inner, inner[:, ::3, ::3].repeat(3, axis=1).repeat(3, axis=2))
    assert np.array_equal(np.rint(inner[:, ::3, ::3] * (16 / 255)).reshape(-1, 64), small)
    scaled = data.inputs(torch.arange(1797), torch.float64)
    assert scaled.mean().item() == pytest.approx(0, abs=1e-12)
    assert scaled.std(correction=0).item() == pytest.approx(1)


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_every_entry_says_what_it_is(name):
    entry = DATASETS[name]
    assert len(entry.shape) == (1 if entry.make else 3)
    assert entry.description
    assert entry.home
    assert entry.checked
    assert all(len(md5) == 32 for md5 in entry.md5.values())
    if entry.files:
        assert entry.folders
        assert (entry.hub is None) == (entry.make is not None)
    packed = {path.rpartition("/")[2] for path in entry.archives}
    assert packed <= set(entry.md5)  # every archive has a published checksum


def test_a_misspelt_name_gets_the_nearest():
    with pytest.raises(ValueError, match="unknown dataset 'cifar_10'; did you mean 'cifar10'"):
        load("cifar_10")


@pytest.mark.parametrize("name", ["folder", "folder:", "folder:size=3"])
def test_a_folder_without_a_path_is_refused(name):
    with pytest.raises(ValueError, match="write folder:path="):
        load(name)


def test_names_can_be_checked_before_anything_is_loaded():
    check_name("cifar10")
    check_name("folder:path=/x,size=3")
    with pytest.raises(ValueError, match="unknown dataset ''"):
        check_name("")


def test_a_data_folder_that_does_not_exist_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="nowhere does not exist; set another one in --data-dir"):
        load("mnist", tmp_path / "nowhere")
    monkeypatch.setenv("FEDNCV_DATA", str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="gone does not exist; set another one in FEDNCV_DATA"):
        load("mnist")


def test_the_data_folder_is_the_given_one_then_the_variable_then_the_cache(tmp_path, monkeypatch, cache):
    assert data_folder(None) == cache / "data"
    monkeypatch.setenv("FEDNCV_DATA", str(tmp_path))
    assert data_folder(None) == tmp_path
    (tmp_path / "other").mkdir()
    assert data_folder(tmp_path / "other") == tmp_path / "other"


@pytest.mark.parametrize("name", [name for name, entry in DATASETS.items() if entry.files])
def test_an_absent_dataset_says_in_one_line_which_files_to_put_where(name, tmp_path, monkeypatch):
    def no_extra(*_):
        raise ImportError

    monkeypatch.setattr(hub, "import_module", no_extra)
    with pytest.raises(ValueError, match=r"pip install 'fedncv\[hub\]'; or put |; put shakes") as caught:
        load(name, tmp_path, **QUIET)
    words = str(caught.value)
    assert "\n" not in words
    assert all(file in words for file in DATASETS[name].files)
    assert str(tmp_path / DATASETS[name].folders[0]) in words


def svhn(folder, seed, n=4):
    folder.mkdir(exist_ok=True)
    for part in ("train", "test"):
        x = np.random.default_rng(seed).integers(0, 256, (32, 32, 3, n), dtype=np.uint8)
        savemat(folder / f"{part}_32x32.mat", {"X": x, "y": np.ones((n, 1), np.uint8)})


def test_the_second_load_reads_no_original_file_and_says_nothing(tmp_path):
    said = []
    svhn(tmp_path / "SVHN", 0)
    first = load("svhn", tmp_path, verify=False, note=said.append)
    assert len(said) == 1
    assert "decoding svhn" in said[0]
    again = load("svhn", tmp_path, verify=False, note=said.append)
    assert len(said) == 1
    assert torch.equal(first.x, again.x)


def test_changed_files_are_decoded_anew(tmp_path):
    svhn(tmp_path / "SVHN", 0)
    first = load("svhn", tmp_path, verify=False, **QUIET).x.clone()
    svhn(tmp_path / "SVHN", 1)
    assert not torch.equal(load("svhn", tmp_path, verify=False, **QUIET).x, first)


def test_what_was_not_verified_is_never_served_as_verified(tmp_path):
    svhn(tmp_path / "SVHN", 0)
    load("svhn", tmp_path, verify=False, **QUIET)
    with pytest.raises(ValueError, match="md5 checksum"):
        load("svhn", tmp_path, **QUIET)


def test_a_fingerprint_changes_with_any_file(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text("1")
    files = [tmp_path / "a", tmp_path / "b"]
    before = fingerprint(files, "")
    assert before == fingerprint(files, "")
    assert before != fingerprint(files, "other")
    (tmp_path / "b").write_text("22")
    assert before != fingerprint(files, "")


def test_files_are_preferred_to_archives_and_nothing_is_invented(tmp_path):
    entry = DATASETS["cifar10"]
    assert find(entry, tmp_path) is None
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
    assert find(entry, tmp_path) == tmp_path / "cifar-10-python.tar.gz"
    (tmp_path / "cifar-10-batches-py").mkdir()
    for name in entry.files[:-1]:
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(b"")
    assert find(entry, tmp_path) == tmp_path / "cifar-10-python.tar.gz"
    (tmp_path / "cifar-10-batches-py" / entry.files[-1]).write_bytes(b"")
    assert find(entry, tmp_path) == tmp_path / "cifar-10-batches-py"


def test_reading_data_imports_nothing_but_torch_numpy_and_scipy_until_it_must():
    extras = "{'sklearn', 'PIL', 'datasets', 'huggingface_hub', 'matplotlib', 'rich', 'tyro', 'pandas'}"
    code = f"import sys, fedncv.data; print(sorted({extras} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
