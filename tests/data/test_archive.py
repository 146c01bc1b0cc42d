"""Archives: read whole, refused where they reach outside or are damaged, and never left behind."""

import errno
import gzip
import io
import os
import tarfile
import zipfile

import numpy as np
import pytest

from fedncv.data import DATASETS, load
from fedncv.data.archive import unpack

QUIET = {"note": lambda _: None}


def tar(path, members):
    """members: name -> bytes, or a TarInfo to add as it is."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


def link(name, target, kind=tarfile.SYMTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def everything(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def png(seed):
    from PIL import Image

    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue(), pixels


def cinic(path):
    members, pixels = {}, []
    for number, split in enumerate(("train", "valid", "test")):
        content, picture = png(number)
        members[f"{split}/airplane/x.png"] = content
        pixels.append(picture.transpose(2, 0, 1))
    tar(path, members)
    return np.stack(pixels)


def test_a_dataset_is_read_from_its_archive_and_nothing_unpacked_stays(tmp_path, cache):
    (tmp_path / "d").mkdir()
    pixels = cinic(tmp_path / "d" / "CINIC-10.tar.gz")
    data = load("cinic10", tmp_path / "d", verify=False, **QUIET)
    assert np.array_equal(data.x.numpy(), pixels)
    assert everything(tmp_path / "d") == ["CINIC-10.tar.gz"]
    assert list((cache / "unpacked").iterdir()) == []


def test_a_zip_is_read_too(tmp_path):
    from PIL import Image

    (tmp_path / "d").mkdir()
    buffer = io.BytesIO()
    Image.fromarray(np.full((64, 64), 9, np.uint8)).save(buffer, "jpeg")
    with zipfile.ZipFile(tmp_path / "d" / "tiny-imagenet-200.zip", "w") as archive:
        archive.writestr("tiny-imagenet-200/train/n01/images/a.JPEG", buffer.getvalue())
        archive.writestr("tiny-imagenet-200/val/images/b.JPEG", buffer.getvalue())
        archive.writestr("tiny-imagenet-200/val/val_annotations.txt", "b.JPEG\tn01\n")
    data = load("tiny_imagenet", tmp_path / "d", verify=False, **QUIET)
    assert data.x.shape == (2, 3, 64, 64)


def test_an_archive_with_another_checksum_is_refused(tmp_path, cache):
    (tmp_path / "d").mkdir()
    cinic(tmp_path / "d" / "CINIC-10.tar.gz")
    with pytest.raises(ValueError, match=r"published is 6ee4d0c9.*verify=False"):
        load("cinic10", tmp_path / "d", **QUIET)
    assert everything(cache) == []


def test_an_archive_cut_at_several_bytes_is_named_and_leaves_nothing(tmp_path, cache):
    (tmp_path / "d").mkdir()
    path = tmp_path / "d" / "CINIC-10.tar.gz"
    cinic(path)
    whole = path.read_bytes()
    for keep in [0, 1, 9, 30, len(whole) // 4, len(whole) // 2, 3 * len(whole) // 4, len(whole) - 9, len(whole) - 1]:
        path.write_bytes(whole[:keep])
        with pytest.raises(ValueError, match=r"CINIC-10.tar.gz (is truncated or damaged|does not hold)") as caught:
            load("cinic10", tmp_path / "d", verify=False, **QUIET)
        assert "\n" not in str(caught.value)
    assert everything(cache) == []


def test_a_zip_cut_anywhere_is_named(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", os.urandom(500))
    whole = bytearray(path.read_bytes())
    for keep in (0, 10, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        with pytest.raises(ValueError, match="truncated or damaged"):
            unpack(path, tmp_path / "out")
    whole[200] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="truncated or damaged"):
        unpack(path, tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["../evil", "a/../../evil", "/tmp/evil", "..", "C:\\evil", "a\\..\\..\\evil", "\\evil"]
)
def test_a_name_that_leaves_the_folder_is_refused(tmp_path, name):
    (tmp_path / "out").mkdir()
    tar(tmp_path / "a.tar.gz", {"good": b"1", name: b"2"})
    with pytest.raises(ValueError, match="outside its folder; it is unsafe"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"2")
    with pytest.raises(ValueError, match="outside its folder; it is unsafe"):
        unpack(tmp_path / "a.zip", tmp_path / "out")
    assert everything(tmp_path) == ["a.tar.gz", "a.zip", "out/good"]


@pytest.mark.parametrize(
    "member",
    [
        link("a", "/etc/passwd"),
        link("a", "../../x"),
        link("a", "/etc/passwd", tarfile.LNKTYPE),
        link("a", "", tarfile.FIFOTYPE),
        link("a", "", tarfile.CHRTYPE),
    ],
)
def test_links_and_devices_are_refused(tmp_path, member):
    tar(tmp_path / "a.tar.gz", {"a": member, "a/b": b"through the link"})
    with pytest.raises(ValueError, match="a link or device"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "out")


def test_a_link_in_a_zip_is_refused(tmp_path):
    info = zipfile.ZipInfo("a")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(ValueError, match="holds the link 'a'"):
        unpack(tmp_path / "a.zip", tmp_path / "out")


def test_an_archive_that_unpacks_to_too_much_is_stopped_at_the_limit(tmp_path):
    """Ten million zeros, which a zip and a gzip file hold in ten kilobytes; a size that the zip denies counts too."""
    zeros = bytes(10_000_000)
    tar(tmp_path / "a.tar.gz", {"a": zeros[:100], "b": zeros})
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", zeros[:100])
        archive.writestr("b", zeros)
    for name in ("a.tar.gz", "a.zip"):
        path, out = tmp_path / name, tmp_path / f"{name}-out"
        assert path.stat().st_size < 20_000
        with pytest.raises(ValueError, match=r"would unpack to more than 0\.0 GB, which no dataset here needs"):
            unpack(path, out, limit=5_000_000)
        assert sum(each.stat().st_size for each in out.iterdir()) <= 5_000_000
        unpack(path, out, limit=10_100_000)
        assert (out / "b").read_bytes() == zeros


def test_what_follows_the_end_of_a_tar_counts_too(tmp_path):
    path = tmp_path / "a.tar.gz"
    tar(path, {"a": b"1"})
    path.write_bytes(path.read_bytes() + gzip.compress(bytes(10_000_000)))
    with pytest.raises(ValueError, match="would unpack to more than"):
        unpack(path, tmp_path / "out", limit=5_000_000)


def test_too_many_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("fedncv.data.archive.FILES", 3)
    tar(tmp_path / "a.tar.gz", dict.fromkeys("abcd", b""))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in "abcd":
            archive.writestr(name, b"")
    for name in ("a.tar.gz", "a.zip"):
        with pytest.raises(ValueError, match=r"would unpack to (more than 3|4) files"):
            unpack(tmp_path / name, tmp_path / "out")


def test_a_dataset_that_is_a_bomb_leaves_nothing_behind(tmp_path, cache, monkeypatch):
    monkeypatch.setattr("fedncv.data.archive.LIMIT", 1000)
    monkeypatch.setitem(DATASETS, "cifar10", DATASETS["cifar10"]._replace(num_images=1000))
    (tmp_path / "d").mkdir()
    tar(tmp_path / "d" / "cifar-10-python.tar.gz", {"data_batch_1": bytes(4 * 1000 * 3072 + 1)})
    with pytest.raises(ValueError, match=r"cifar-10-python\.tar\.gz would unpack to more than 0\.0 GB"):
        load("cifar10", tmp_path / "d", verify=False, **QUIET)
    assert everything(cache) == []


def test_an_encrypted_zip_is_named(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("secret.csv", b"1")
    data = bytearray(path.read_bytes())
    for begins, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(begins) + flags] |= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.zip is encrypted \(secret\.csv\); unpack it with its password"):
        unpack(path, tmp_path / "out")


def test_a_damaged_zip_of_any_compression_is_named(tmp_path):
    path = tmp_path / "a.zip"
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr("a", os.urandom(2000))
        data = bytearray(path.read_bytes())
        data[1000:1010] = bytes(10)
        path.write_bytes(data)
        with pytest.raises(ValueError, match="truncated or damaged"):
            unpack(path, tmp_path / "out")


def test_another_archive_under_the_name_is_named(tmp_path):
    (tmp_path / "d").mkdir()
    tar(tmp_path / "d" / "cifar-10-python.tar.gz", {"holiday.txt": b"sun"})
    with pytest.raises(ValueError, match="does not hold data_batch_1"):
        load("cifar10", tmp_path / "d", verify=False, **QUIET)


def test_a_disk_that_fills_up_while_unpacking_is_one_line_and_leaves_nothing(tmp_path, cache, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "d").mkdir()
    cinic(tmp_path / "d" / "CINIC-10.tar.gz")
    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(ValueError, match=r"cannot unpack .*CINIC-10.tar.gz to .*: No space left on device"):
        load("cinic10", tmp_path / "d", verify=False, **QUIET)
    assert everything(cache) == []
