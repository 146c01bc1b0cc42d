"""CIFAR's pickles: read as Python 2 wrote them, and never trusted."""

import contextlib
import os
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedncv.data import load
from fedncv.data.cifar import CIFAR10_FILES, CIFAR100_FILES, read_batch, safe_unpickle


def text(value):
    """A byte string as Python 2's protocol 2 writes it."""
    if len(value) < 256:
        return b"U" + bytes([len(value)]) + value
    return b"T" + struct.pack("<i", len(value)) + value


def number(value):
    return b"J" + struct.pack("<i", value)


def array(rows, dtype=b"u1"):
    """numpy.core.multiarray._reconstruct(ndarray, (0,), 'b') with its state, opcode by opcode."""
    shape = b"".join(map(number, rows.shape))
    return (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + number(0) + b"t" + text(b"b") + b"tR"
        b"(" + number(1) + b"(" + shape + b"t"
        b"cnumpy\ndtype\n(" + text(dtype) + number(0) + number(1) + b"tR(" + number(3) + text(b"|") + b"NNN"
        + number(-1) + number(-1) + number(0) + b"tb"
        b"\x89" + text(rows.tobytes()) + b"tb"
    )  # fmt: skip


def batch(rows, labels, key=b"labels", dtype=b"u1"):
    listed = b"](" + b"".join(map(number, labels)) + b"e"
    return (
        b"\x80\x02}(" + text(b"batch_label") + text(b"training batch 1 of 5") + text(key) + listed
        + text(b"data") + array(rows, dtype) + b"u."
    )  # fmt: skip


def write_cifar(folder, files, num_classes, key):
    folder.mkdir(parents=True)
    random, images, labels = np.random.default_rng(0), [], []
    for name in files:
        x = random.integers(0, 256, (4, 3072), dtype=np.uint8)
        y = random.integers(0, num_classes, 4)
        (folder / name).write_bytes(batch(x, y.tolist(), key))
        images.append(x.reshape(-1, 3, 32, 32))
        labels.append(y)
    return np.concatenate(images), np.concatenate(labels)


@pytest.mark.parametrize(
    ("name", "folder", "files", "num_classes", "key"),
    [
        ("cifar10", "cifar-10-batches-py", CIFAR10_FILES, 10, b"labels"),
        ("cifar10", "CIFAR10/cifar-10-batches-py", CIFAR10_FILES, 10, b"labels"),
        ("cifar100", "cifar-100-python", CIFAR100_FILES, 100, b"fine_labels"),
    ],
)
def test_batches_are_pooled_in_order(tmp_path, name, folder, files, num_classes, key):
    x, y = write_cifar(tmp_path / "d" / folder, files, num_classes, key)
    data = load(name, tmp_path / "d", verify=False, note=lambda _: None)
    assert np.array_equal(data.x.numpy(), x)
    assert np.array_equal(data.y.numpy(), y)


class Hostile:
    def __reduce__(self):
        return os.system, ("touch /tmp/fedncv-was-here",)


@pytest.mark.parametrize(
    "attack",
    [
        pickle.dumps(Hostile(), protocol=0),
        pickle.dumps(Hostile(), protocol=2),
        pickle.dumps(Hostile(), protocol=5),
        b"cbuiltins\neval\n(U\x0a__import__t R.",
        b"c__builtin__\neval\n(U\x011tR.",
        b"cnumpy\nload\n(U\x08evil.npytR.",
        b"cnumpy.core.multiarray\nscalar\n.",
        b"cnumpy\nndarray.tofile\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.",  # protocol 4 walks dotted names
        b"cfedncv.data.cifar\n_Name\n.",
        b"cposix\nsystem\n(U\x02idtR.",
        b"(U\x02idiposix\nsystem\n.",  # INST
        b"cnumpy\nndarray\n(tR.",  # admitted as a name, not as a call
        b"cnumpy\ndtype\n}U\x08__call__I1\nsb.",  # BUILD on an admitted name
        b"Pan outside object\n.",
    ],
)
def test_a_hostile_pickle_is_refused_and_does_nothing(attack, tmp_path):
    (tmp_path / "data_batch_1").write_bytes(attack)
    with pytest.raises(ValueError, match=r"which no CIFAR file needs; it is unsafe, delete it|is truncated or damaged"):
        read_batch(tmp_path / "data_batch_1", b"labels")
    assert not os.path.exists("/tmp/fedncv-was-here")


def test_the_refused_name_is_said():
    with pytest.raises(ValueError, match=r"f asks for (posix|nt)\.system, which no CIFAR file needs"):
        safe_unpickle(pickle.dumps(Hostile(), protocol=2), "f")


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60))
def test_any_bytes_give_a_value_or_a_value_error(data):
    with contextlib.suppress(ValueError):  # and nothing else
        safe_unpickle(data, "f")


GOOD = batch(np.random.default_rng(0).integers(0, 256, (2, 3072), dtype=np.uint8), [3, 7])


@pytest.mark.parametrize("keep", [0, 1, 2, 10, 60, 120, 200, 1000, len(GOOD) - 2, len(GOOD) - 1])
def test_a_batch_cut_at_any_byte_is_named(tmp_path, keep):
    (tmp_path / "test_batch").write_bytes(GOOD[:keep])
    with pytest.raises(ValueError, match=r"test_batch is (truncated or damaged|not a CIFAR batch).*fetch it again"):
        read_batch(tmp_path / "test_batch", b"labels")


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}.",
        b"\x80\x02]N.",
        batch(np.zeros((2, 3071), np.uint8), [1, 2]),
        batch(np.zeros((2, 3072), np.uint8), [1, 2], dtype=b"O8"),
        batch(np.zeros((2, 3072), np.uint8), [1, 2], key=b"coarse_labels"),
    ],
)
def test_a_pickle_that_is_no_batch_is_named(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ValueError, match="fetch it again"):
        read_batch(tmp_path / "f", b"labels")


def test_more_images_than_labels_are_noticed(tmp_path):
    folder = tmp_path / "d" / "cifar-10-batches-py"
    write_cifar(folder, CIFAR10_FILES, 10, b"labels")
    (folder / "test_batch").write_bytes(batch(np.zeros((3, 3072), np.uint8), [1, 2]))
    with pytest.raises(ValueError, match="cifar10: 3 images but 2 labels"):
        load("cifar10", tmp_path / "d", verify=False, note=lambda _: None)
