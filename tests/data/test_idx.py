"""IDX files: MNIST, Fashion-MNIST and EMNIST in their true format, whole and damaged."""

import gzip
import struct

import numpy as np
import pytest

from fedncv.data import load
from fedncv.data.idx import MNIST_FILES, emnist_files, read_emnist, read_images, read_labels, read_mnist


def idx(array):
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_family(folder, files, num_classes, *, first_label=0, n=(7, 3), packed=True):
    """Four small files; -> what a reader should give back (before any turning)."""
    folder.mkdir(parents=True)
    random, images, labels = np.random.default_rng(0), [], []
    for images_name, labels_name, count in zip(files[::2], files[1::2], n, strict=True):
        x, y = random.integers(0, 256, (count, 28, 28)), random.integers(0, num_classes, count)
        for name, array in ((images_name, x), (labels_name, y + first_label)):
            if packed:
                (folder / name).write_bytes(gzip.compress(idx(array)))
            else:
                (folder / name[: -len(".gz")]).write_bytes(idx(array))
        images.append(x)
        labels.append(y)
    return np.concatenate(images)[:, None], np.concatenate(labels)


def pooled(pieces):
    images, labels = zip(*pieces, strict=True)
    return np.concatenate(images), np.concatenate(labels)


@pytest.mark.parametrize("packed", [True, False])
def test_training_and_test_images_are_pooled_in_file_order(tmp_path, packed):
    x, y = write_family(tmp_path / "raw", MNIST_FILES, 10, packed=packed)
    images, labels = pooled(read_mnist(tmp_path / "raw"))
    assert np.array_equal(images, x)
    assert np.array_equal(labels, y)
    assert labels.dtype == np.int64


def test_emnist_is_turned_upright_and_its_letters_count_from_zero(tmp_path):
    x, y = write_family(tmp_path / "raw", emnist_files("letters"), 26, first_label=1)
    images, labels = pooled(read_emnist(tmp_path / "raw", subset="letters", first_label=1))
    assert np.array_equal(images, x.swapaxes(2, 3))
    assert np.array_equal(labels, y)


@pytest.mark.parametrize(
    ("name", "subset", "num_classes", "first"),
    [("emnist", "byclass", 62, 0), ("emnist_balanced", "balanced", 47, 0), ("emnist_letters", "letters", 26, 1)],
)
@pytest.mark.parametrize("folder", ["EMNIST/raw", "gzip", "."])
def test_each_emnist_subset_is_found_by_its_name(tmp_path, name, subset, num_classes, first, folder):
    x, y = write_family(tmp_path / "d" / folder, emnist_files(subset), num_classes, first_label=first)
    data = load(name, tmp_path / "d", verify=False, note=lambda _: None)
    assert np.array_equal(data.x.numpy(), x.swapaxes(2, 3))
    assert np.array_equal(data.y.numpy(), y)
    assert data.num_classes == num_classes


def test_many_images_are_read_a_piece_at_a_time(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (5_000, 2, 3))
    (tmp_path / "x").write_bytes(idx(array))
    pieces = list(read_images(tmp_path / "x"))
    assert [len(piece) for piece in pieces] == [4096, 904]
    assert np.array_equal(np.concatenate(pieces)[:, 0], array)


@pytest.mark.parametrize("keep", [0, 1, 3, 9, 12, 17, 18, 50, -9, -1])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_cut_at_any_byte_is_named(tmp_path, keep, suffix):
    whole = idx(np.random.default_rng(0).integers(0, 256, (5, 4, 4)))
    whole = gzip.compress(whole) if suffix else whole
    path = tmp_path / f"images{suffix}"
    path.write_bytes(whole[:keep])
    with pytest.raises(ValueError, match="fetch it again") as caught:
        list(read_images(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_changed_byte_in_a_packed_file_is_noticed(tmp_path):
    whole = bytearray(gzip.compress(idx(np.random.default_rng(0).integers(0, 256, (50, 4, 4)))))
    whole[len(whole) // 2] ^= 0xFF
    (tmp_path / "x.gz").write_bytes(bytes(whole))
    with pytest.raises(ValueError, match=r"truncated or damaged|truncated"):
        list(read_images(tmp_path / "x.gz"))


def test_other_files_are_recognised(tmp_path):
    (tmp_path / "long").write_bytes(idx(np.zeros(3)) + b"x")
    with pytest.raises(ValueError, match="longer than its header says"):
        read_labels(tmp_path / "long")
    (tmp_path / "html").write_text("<html>404 not found</html>")
    with pytest.raises(ValueError, match="not an IDX file"):
        read_labels(tmp_path / "html")


def test_a_header_that_asks_for_all_memory_is_refused(tmp_path):
    for sizes in ((2**32 - 1,), (2**32 - 1, 2**32 - 1, 2**32 - 1)):
        path = tmp_path / "huge"
        path.write_bytes(bytes([0, 0, 8, len(sizes)]) + b"".join(size.to_bytes(4, "big") for size in sizes))
        with pytest.raises(ValueError, match=r"says that it holds 4294967295.* bytes; it is damaged"):
            list(read_images(path) if len(sizes) == 3 else read_labels(path))


def test_images_without_their_labels_are_noticed(tmp_path):
    write_family(tmp_path / "raw", MNIST_FILES, 10)
    (tmp_path / "raw" / MNIST_FILES[1]).write_bytes(gzip.compress(idx(np.zeros(9))))
    with pytest.raises(ValueError, match=r"7 images, train-labels-idx1-ubyte.gz has 9 labels"):
        list(read_mnist(tmp_path / "raw"))


def test_a_label_out_of_range_is_named_and_leaves_no_cache(tmp_path, cache):
    write_family(tmp_path / "d" / "MNIST" / "raw", MNIST_FILES, 10, first_label=5)
    with pytest.raises(ValueError, match=r"mnist: label 1\d is out of range 0..9"):
        load("mnist", tmp_path / "d", verify=False, note=lambda _: None)
    assert list((cache / "decoded").iterdir()) == []


def test_a_wrong_checksum_is_named_with_the_file(tmp_path, cache):
    write_family(tmp_path / "d" / "MNIST" / "raw", MNIST_FILES, 10)
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz has the md5 checksum \w+, published is f68b3c2d"):
        load("mnist", tmp_path / "d", note=lambda _: None)
    assert list((cache / "decoded").iterdir()) == []
