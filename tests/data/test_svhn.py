"""SVHN's MATLAB files, whole and damaged."""

import numpy as np
import pytest
from scipy.io import savemat

from fedncv.data import load
from fedncv.data.svhn import read_mat


def write_mat(path, n, seed):
    random = np.random.default_rng(seed)
    x, y = random.integers(0, 256, (32, 32, 3, n), dtype=np.uint8), random.integers(1, 11, (n, 1))
    savemat(path, {"X": x, "y": y.astype(np.uint8)}, do_compression=True)
    return x.transpose(3, 2, 0, 1), y.ravel() % 10


def test_digit_zero_is_class_zero_and_extra_is_optional(tmp_path):
    (tmp_path / "SVHN").mkdir()
    parts = [
        write_mat(tmp_path / "SVHN" / f"{p}_32x32.mat", n, n) for p, n in (("train", 9), ("test", 5), ("extra", 4))
    ]
    plain = load("svhn", tmp_path, verify=False, note=lambda _: None)
    extra = load("svhn_extra", tmp_path, verify=False, note=lambda _: None)
    assert np.array_equal(plain.x.numpy(), np.concatenate([x for x, _ in parts[:2]]))
    assert np.array_equal(plain.y.numpy(), np.concatenate([y for _, y in parts[:2]]))
    assert np.array_equal(extra.x.numpy(), np.concatenate([x for x, _ in parts]))
    assert np.array_equal(extra.y.numpy(), np.concatenate([y for _, y in parts]))


def test_a_file_cut_anywhere_is_named(tmp_path):
    path = tmp_path / "train_32x32.mat"
    write_mat(path, 6, 0)
    whole = path.read_bytes()
    for keep in (0, 50, 127, 130, len(whole) // 3, len(whole) // 2, len(whole) - 60):
        path.write_bytes(whole[:keep])
        with pytest.raises(ValueError, match=r"train_32x32.mat is truncated, damaged or not SVHN"):
            list(read_mat(path))


@pytest.mark.parametrize("label", [0, 11])
def test_a_label_out_of_range_is_named(tmp_path, label):
    savemat(tmp_path / "f.mat", {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1], [label]], np.uint8)})
    with pytest.raises(ValueError, match=f"label {label} is out of range 1..10"):
        list(read_mat(tmp_path / "f.mat"))


def test_other_contents_are_named(tmp_path):
    savemat(tmp_path / "f.mat", {"X": np.zeros((32, 32, 3, 2)), "y": np.ones((2, 1), np.uint8)})
    with pytest.raises(ValueError, match="X is float64"):
        list(read_mat(tmp_path / "f.mat"))
    savemat(tmp_path / "g.mat", {"Z": 1})
    with pytest.raises(ValueError, match="not SVHN"):
        list(read_mat(tmp_path / "g.mat"))
