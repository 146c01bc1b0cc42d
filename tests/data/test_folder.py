"""Folders of pictures: any tree, Tiny-ImageNet, CINIC-10; whole and damaged."""

import numpy as np
import pytest
from PIL import Image

from fedncv.data import load, load_folder

QUIET = {"note": lambda _: None}


def save(path, size=(8, 8), mode="RGB", seed=0):
    """A random picture; -> its pixels (h, w, ...)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (*size, 3) if mode == "RGB" else size
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def test_classes_are_the_sorted_folders(tmp_path):
    cat = save(tmp_path / "cat" / "a.png", seed=1)
    ant = save(tmp_path / "ant" / "b.png", seed=2)
    (tmp_path / "cat" / "notes.txt").write_text("not a picture")
    data = load(f"folder:path={tmp_path}", note=QUIET["note"])
    assert data.y.tolist() == [0, 1]
    assert np.array_equal(data.x[0].numpy(), ant.transpose(2, 0, 1))
    assert np.array_equal(data.x[1].numpy(), cat.transpose(2, 0, 1))
    assert data.num_classes == 2
    assert data.name == tmp_path.name


def test_train_and_test_folders_are_pooled(tmp_path):
    for number, place in enumerate(["train/b", "train/a", "test/a", "valid/b"]):
        save(tmp_path / place / "x.png", seed=number)
    assert load_folder(path=str(tmp_path)).y.tolist() == [0, 1, 1, 0]


def test_pictures_are_scaled_and_coloured_as_asked(tmp_path):
    save(tmp_path / "a" / "x.png", size=(4, 6))
    save(tmp_path / "b" / "y.jpg", size=(9, 9), mode="L")
    data = load(f"folder:path={tmp_path},size=5,channels=1", note=QUIET["note"])
    assert data.input_shape == (1, 5, 5)
    colour = load_folder(path=str(tmp_path), size=5).x
    assert colour.shape == (2, 3, 5, 5)
    assert (colour[1, 0] == colour[1, 1]).all()  # grey in all channels


def test_another_size_is_named_with_the_remedy(tmp_path):
    save(tmp_path / "a" / "x.png", size=(4, 6))
    save(tmp_path / "b" / "y.png", size=(5, 6))
    with pytest.raises(ValueError, match=r"y.png is 5x6, not 4x6; give a size"):
        load_folder(path=str(tmp_path))


@pytest.mark.parametrize("keep", [0, 10, 60, 150])
def test_a_corrupt_picture_is_named_and_leaves_no_cache(tmp_path, cache, keep):
    save(tmp_path / "p" / "a" / "good.png")
    save(tmp_path / "p" / "b" / "bad.png")
    bad = tmp_path / "p" / "b" / "bad.png"
    bad.write_bytes(bad.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"bad.png is not a complete picture .*; replace or remove it") as caught:
        load_folder(path=str(tmp_path / "p"))
    assert "\n" not in str(caught.value)
    assert "object at" not in str(caught.value)
    assert list((cache / "decoded").iterdir()) == []


def test_an_empty_or_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no pictures"):
        load_folder(path=str(tmp_path))
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        load(f"folder:path={tmp_path / 'nowhere'}")
    with pytest.raises(ValueError, match="channels is 2"):
        load(f"folder:path={tmp_path},channels=2")


def test_a_changed_picture_is_decoded_anew(tmp_path):
    save(tmp_path / "p" / "a" / "x.png", seed=1)
    first = load_folder(path=str(tmp_path / "p")).x.clone()
    save(tmp_path / "p" / "a" / "x.png", seed=2)
    assert not (load_folder(path=str(tmp_path / "p")).x == first).all()


def tiny_imagenet(root, *, sorted_val):
    names = ["n02", "n01"]
    for k, name in enumerate(names):
        for i in range(2):
            save(root / "train" / name / "images" / f"{name}_{i}.JPEG", (64, 64), "RGB" if i else "L", seed=10 * k + i)
    (root / "test" / "images").mkdir(parents=True)
    save(root / "test" / "images" / "test_0.JPEG", (64, 64))
    if sorted_val:
        save(root / "val" / "n02" / "images" / "val_0.JPEG", (64, 64), seed=7)
        save(root / "val" / "n01" / "images" / "val_1.JPEG", (64, 64), seed=8)
    else:
        save(root / "val" / "images" / "val_0.JPEG", (64, 64), seed=7)
        save(root / "val" / "images" / "val_1.JPEG", (64, 64), seed=8)
        rows = "val_0.JPEG\tn02\t0\t0\t62\t62\nval_1.JPEG\tn01\t0\t0\t62\t62\n"
        (root / "val" / "val_annotations.txt").write_text(rows)


@pytest.mark.parametrize(("sorted_val", "val_labels"), [(False, [1, 0]), (True, [0, 1])])
def test_tiny_imagenet_takes_its_validation_labels_from_the_notes_or_the_folders(tmp_path, sorted_val, val_labels):
    tiny_imagenet(tmp_path / "tiny-imagenet-200", sorted_val=sorted_val)
    data = load("tiny_imagenet", tmp_path, verify=False, **QUIET)
    assert data.y.tolist() == [0, 0, 1, 1, *val_labels]
    assert data.input_shape == (3, 64, 64)
    with Image.open(tmp_path / "tiny-imagenet-200" / "train" / "n01" / "images" / "n01_1.JPEG") as picture:
        assert np.array_equal(data.x[1].numpy(), np.asarray(picture).transpose(2, 0, 1))


def test_a_validation_label_that_is_no_class_is_named(tmp_path):
    tiny_imagenet(tmp_path / "tiny-imagenet-200", sorted_val=False)
    (tmp_path / "tiny-imagenet-200" / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99\t0\n")
    with pytest.raises(ValueError, match=r"val_annotations.txt: \['val_0.JPEG', 'n99'\]"):
        load("tiny_imagenet", tmp_path, verify=False, **QUIET)


def test_a_missing_picture_is_named(tmp_path):
    tiny_imagenet(tmp_path / "tiny-imagenet-200", sorted_val=False)
    (tmp_path / "tiny-imagenet-200" / "val" / "images" / "val_0.JPEG").unlink()
    with pytest.raises(ValueError, match=r"cannot read .*val_0.JPEG: No such file"):
        load("tiny_imagenet", tmp_path, verify=False, **QUIET)


@pytest.mark.parametrize("folder", ["CINIC-10", "cinic10", "."])
def test_cinic10_pools_train_valid_and_test(tmp_path, folder):
    for split in ("test", "train", "valid"):
        for name in ("truck", "airplane"):
            save(tmp_path / "d" / folder / split / name / f"{split}.png", (32, 32), seed=len(split + name))
    data = load("cinic10", tmp_path / "d", verify=False, **QUIET)
    assert data.y.tolist() == [0, 1] * 3
    with Image.open(tmp_path / "d" / folder / "valid" / "truck" / "valid.png") as picture:
        assert np.array_equal(data.x[3].numpy(), np.asarray(picture).transpose(2, 0, 1))


def test_pictures_that_were_scaled_before_are_not_taken_for_unscaled_ones(tmp_path):
    save(tmp_path / "a" / "x.png", size=(8, 8))
    save(tmp_path / "b" / "y.png", size=(5, 6))
    assert load(f"folder:path={tmp_path},size=8", **QUIET).x.shape == (2, 3, 8, 8)
    with pytest.raises(ValueError, match=r"y.png is 5x6, not 8x8; give a size"):
        load(f"folder:path={tmp_path}", **QUIET)


def test_a_picture_that_moves_to_another_class_is_read_again(tmp_path):
    for name in ("a/1.png", "a/2.png", "b/3.png"):
        save(tmp_path / name)
    assert load_folder(path=str(tmp_path)).y.tolist() == [0, 0, 1]
    (tmp_path / "a" / "2.png").rename(tmp_path / "b" / "2.png")  # same name, size and time; same order of files
    assert load_folder(path=str(tmp_path)).y.tolist() == [0, 1, 1]
