"""The decoded cache: mapped without a copy, whole or not at all."""

import errno
import json
import os
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import torch

from fedncv.data import cache as module
from fedncv.data import load
from fedncv.data.cache import cache_folder, open_entry, write_entry
from fedncv.data.raw import Raw

SHAPE = (2, 3, 4)


def pieces(*sizes):
    random = np.random.default_rng(0)
    return [Raw(random.integers(0, 256, (n, *SHAPE), dtype=np.uint8), random.integers(0, 5, n)) for n in sizes]


def write(entry, items, num_images=None):
    write_entry(entry, iter(items), shape=SHAPE, num_classes=5, num_images=num_images)


def test_what_was_written_is_read_back_with_its_moments(cache):
    items = pieces(3, 0, 5)
    write(cache / "name-1", items, 8)
    data = open_entry(cache / "name-1", "name")
    images = np.concatenate([images for images, _ in items])
    assert np.array_equal(data.x.numpy(), images)
    assert np.array_equal(data.y.numpy(), np.concatenate([labels for _, labels in items]))
    scaled = images.astype(np.float64) / 255
    assert data.mean == pytest.approx(scaled.mean(axis=(0, 2, 3)))
    assert data.std == pytest.approx(scaled.std(axis=(0, 2, 3)))
    assert data.num_classes == 5


def test_the_tensor_is_the_file_without_a_copy_or_a_warning(cache):
    write(cache / "name-1", pieces(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, other = open_entry(cache / "name-1", "name"), open_entry(cache / "name-1", "name")
    if os.path.exists("/proc/self/maps"):
        with open("/proc/self/maps") as maps:
            assert str(cache / "name-1" / "images.u8") in maps.read()
    one.x[0] = 7  # a private page: neither the file nor another reader sees it
    assert not (other.x[0] == 7).all()
    assert not (open_entry(cache / "name-1", "name").x[0] == 7).all()
    assert one.x.dtype == torch.uint8


def test_a_constant_channel_has_deviation_one(cache):
    write(cache / "name-1", [Raw(np.full((4, *SHAPE), 51, np.uint8), np.zeros(4, np.int64))])
    data = open_entry(cache / "name-1", "name")
    assert data.mean == pytest.approx((0.2, 0.2))
    assert data.std == (1.0, 1.0)


@pytest.mark.parametrize("file", ["images.u8", "labels.i64", "about.json"])
def test_a_file_that_was_cut_or_lost_makes_the_entry_void_and_it_is_written_anew(cache, file):
    entry = cache / "name-1"
    write(entry, pieces(8))
    whole = (entry / file).read_bytes()
    for content in (whole[:-1], whole + b"x", b"", None):
        (entry / file).unlink()
        if content is not None:
            (entry / file).write_bytes(content)
        assert open_entry(entry, "name") is None
        write(entry, pieces(8))
        assert len(open_entry(entry, "name").y) == 8


@pytest.mark.parametrize("file", ["images.u8", "labels.i64", "about.json"])
def test_a_changed_bit_makes_the_entry_void(cache, file):
    """Also one that a length, a type or a range would not tell: it would be another dataset, and another model."""
    entry = cache / "name-1"
    write(entry, pieces(8))
    whole = (entry / file).read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 20)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        (entry / file).write_bytes(damaged)
        module._checked.clear()  # the clock of files may be too coarse for a change so soon
        assert open_entry(entry, "name") is None, place
    (entry / file).write_bytes(whole)
    module._checked.clear()
    assert len(open_entry(entry, "name").y) == 8


def test_about_json_that_is_nested_without_end_makes_the_entry_void(cache):
    write(cache / "name-1", pieces(8))
    (cache / "name-1" / "about.json").write_text("[" * 100_000)
    assert open_entry(cache / "name-1", "name") is None


def test_a_damaged_entry_is_decoded_again(tmp_path, cache):
    from PIL import Image

    for kind in ("cat", "dog"):
        (tmp_path / "pets" / kind).mkdir(parents=True)
        for i in range(4):
            pixels = np.full((5, 4), 10 * i + len(kind), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / kind / f"{i}.png")
    notes = []
    name = f"folder:path={tmp_path / 'pets'},size=6"
    first = load(name, note=notes.append).x.clone()
    (images,) = cache.glob("decoded/*/images.u8")
    damaged = bytearray(images.read_bytes())
    damaged[20] ^= 64
    images.write_bytes(damaged)
    module._checked.clear()  # the clock of files may be too coarse for a change so soon
    assert torch.equal(load(name, note=notes.append).x, first)
    assert len(notes) == 2
    assert torch.equal(load(name, note=notes.append).x, first)
    assert len(notes) == 2


def test_another_format_is_not_read(cache):
    write(cache / "name-1", pieces(8))
    about = json.loads((cache / "name-1" / "about.json").read_text())
    (cache / "name-1" / "about.json").write_text(json.dumps(about | {"format": 99}))
    assert open_entry(cache / "name-1", "name") is None


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this platform")
@pytest.mark.parametrize("file", ["images.u8", "labels.i64", "about.json"])
def test_a_disk_that_fills_up_is_one_line_and_leaves_no_entry(cache, monkeypatch, file):
    real = module.Path.open
    monkeypatch.setattr(
        module.Path,
        "open",
        lambda path, *a, **k: real(module.Path("/dev/full") if path.name == file else path, *a, **k),
    )
    with pytest.raises(ValueError, match=r"cannot write the decoded cache .*name-1: No space left .*FEDNCV_CACHE"):
        write(cache / "name-1", pieces(8))
    assert list(cache.iterdir()) == []


def test_a_disk_that_is_full_only_when_flushed_is_noticed_too(cache, monkeypatch):
    monkeypatch.setattr(module.os, "fsync", full_disk)
    with pytest.raises(ValueError, match="No space left"):
        write(cache / "name-1", pieces(8))
    assert list(cache.iterdir()) == []


def test_a_cache_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="cannot write the decoded cache"):
        write(tmp_path / "file" / "name-1", pieces(1))


def test_a_reader_that_fails_halfway_leaves_nothing(cache):
    def broken():
        yield from pieces(3)
        raise ValueError("the second file is damaged")

    with pytest.raises(ValueError, match="the second file is damaged"):
        write(cache / "name-1", broken())
    assert list(cache.iterdir()) == []


SLOW_WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from fedncv.data.cache import write_entry
from fedncv.data.raw import Raw

def pieces():
    while True:
        yield Raw(np.zeros((8, 2, 3, 4), np.uint8), np.zeros(8, np.int64))
        print("wrote", flush=True)
        time.sleep(0.01)

write_entry(Path(sys.argv[1]), pieces(), shape=(2, 3, 4), num_classes=5, num_images=None)
"""


def test_a_writer_killed_at_work_leaves_no_entry(cache):
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITER, str(cache / "name-1")], stdout=subprocess.PIPE, text=True
    ) as writer:
        for _ in range(3):
            assert writer.stdout.readline() == "wrote\n"
        writer.kill()
    assert any(cache.iterdir())  # half an entry, under another name
    assert open_entry(cache / "name-1", "name") is None
    write(cache / "name-1", pieces(2))
    assert len(open_entry(cache / "name-1", "name").y) == 2


def test_a_killed_writer_is_never_believed_and_swept_up_later(cache):
    half = cache / ".name-1-0123456789abcdef"
    half.mkdir(parents=True)
    (half / "images.u8").write_bytes(b"half")
    assert open_entry(cache / "name-1", "name") is None
    write(cache / "name-1", pieces(2))
    assert half.exists()  # it may belong to a process that is still at work
    old = time.time() - 2 * module.STALE_SECONDS
    os.utime(half, (old, old))
    write(cache / "name-2", pieces(2))
    assert not half.exists()


def test_of_two_writers_the_first_to_finish_is_kept(cache):
    def slow():
        yield from pieces(3)
        write(cache / "name-1", pieces(8))  # another process, meanwhile

    write(cache / "name-1", slow())
    assert len(open_entry(cache / "name-1", "name").y) == 8
    assert [path.name for path in cache.iterdir()] == ["name-1"]


def test_a_wrong_number_of_images_is_refused(cache):
    with pytest.raises(ValueError, match="name: 3 images, there must be 4"):
        write(cache / "name-1", pieces(3), 4)
    with pytest.raises(ValueError, match="name: 0 images, there must be some"):
        write(cache / "name-1", [])


def test_the_cache_folder_follows_the_platform(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDNCV_CACHE")
    monkeypatch.setattr(module.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fedncv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "fedncv"
    monkeypatch.setattr(module.sys, "platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "fedncv"
    monkeypatch.setattr(module.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "fedncv" / "Cache"
