"""Folders of images: any ``class/picture`` tree, Tiny-ImageNet and CINIC-10.

Classes are numbered in the order of their sorted folder names. If the number of channels requires it, grey pictures
are repeated over the channels, and colour pictures are converted to luminance.
"""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedncv.data.raw import PIECE, Images, Raw, reason

MEMORY = 1 << 28  # bytes of pictures to decode at a time
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
SPLITS = ("train", "valid", "val", "validation", "test")

Picture = tuple[Path, int]  # a file and its class


def read_cinic10(folder: Path) -> Iterator[Raw]:
    """Read CINIC-10: train/, valid/ and test/, each with the ten class folders.

    L. Darlow et al., "CINIC-10 is not ImageNet or CIFAR-10", 2018.
    """
    return read_pictures(pictures(folder)[0], size=(32, 32), channels=3)


def read_tiny_imagenet(folder: Path) -> Iterator[Raw]:
    """Read Tiny-ImageNet: train/<class>/images/, and val/ with its labels in val_annotations.txt.

    The validation pictures may already be sorted into val/<class>/. The unlabelled test/ is left out.
    """
    names = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    number = {name: k for k, name in enumerate(names)}
    train = [(path, number[name]) for name in names for path in _files(folder / "train" / name)]
    notes = folder / "val" / "val_annotations.txt"
    if notes.exists():
        rows = [line.split("\t") for line in notes.read_text().splitlines()]
        for row in rows:
            if len(row) < 2 or row[1] not in number:
                raise ValueError(f"{notes}: {row[:2]} is not a picture with one of the {len(names)} classes")
        val = [(folder / "val" / "images" / row[0], number[row[1]]) for row in rows]
    else:
        val = [(path, number[name]) for name in names for path in _files(folder / "val" / name)]
    return read_pictures([*train, *val], size=(64, 64), channels=3)


def pictures(folder: Path) -> tuple[list[Picture], list[str]]:
    """Return every picture under ``class/`` or ``train|valid|test/class/``, with its class, and the class names."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give one with a subfolder of pictures for each class")
    below = {path.name for path in folder.iterdir() if path.is_dir()}
    splits = [name for name in SPLITS if name in below] if below <= set(SPLITS) else ["."]
    names = sorted({path.name for split in splits for path in (folder / split).iterdir() if path.is_dir()})
    found = [
        (path, number)
        for split in splits
        for number, name in enumerate(names)
        for path in _files(folder / split / name)
    ]
    if not found:
        raise ValueError(f"{folder} holds no pictures; put them in one subfolder for each class")
    return found, names


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)


def read_pictures(
    items: Iterable[Picture], *, size: tuple[int, int], channels: int, resize: bool = False
) -> Iterator[Raw]:
    """Decode the pictures to (channels, *size), PIECE at a time, fewer if they are large."""
    at_once = max(1, min(PIECE, MEMORY // max(1, channels * size[0] * size[1])))
    images: list[Images] = []
    labels: list[int] = []
    for path, label in items:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from None
        images.append(decode(data, str(path), size=size, channels=channels, resize=resize))
        labels.append(label)
        if len(images) == at_once:
            yield Raw(np.stack(images), np.array(labels, dtype=np.int64))
            images, labels = [], []
    if images:
        yield Raw(np.stack(images), np.array(labels, dtype=np.int64))


def decode(data: bytes, source: str, *, size: tuple[int, int], channels: int, resize: bool = False) -> Images:
    """Decode one picture to (channels, height, width); raise ValueError if it is damaged or has another size."""
    pillow = _pillow()
    try:
        with pillow.open(io.BytesIO(data)) as opened:
            picture = opened.convert("RGB" if channels == 3 else "L")
    except Exception as error:  # Pillow raises a different error for each way a picture can be damaged
        raise ValueError(f"{source} is not a complete picture ({reason(error)}); replace or remove it") from None
    height, width = size
    if picture.size != (width, height):
        if not resize:
            raise ValueError(
                f"{source} is {picture.size[1]}x{picture.size[0]}, not {height}x{width}; "
                "give a size to scale all pictures to"
            )
        picture = picture.resize((width, height), pillow.Resampling.BILINEAR)
    pixels = np.asarray(picture, dtype=np.uint8)
    return pixels.transpose(2, 0, 1) if channels == 3 else pixels[None]


def picture_size(path: Path) -> tuple[int, int]:
    """Return height and width of the picture, for a folder without a given size."""
    try:
        with _pillow().open(path) as picture:
            return picture.size[1], picture.size[0]
    except Exception as error:  # also one that is too large for Pillow
        raise ValueError(f"{path} is not a picture ({reason(error)}); replace or remove it") from None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("reading pictures needs Pillow; pip install pillow") from None
    return Image
