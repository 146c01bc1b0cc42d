"""Text as token ids: characters for next-character prediction, bytes for classification.

The alphabet is LEAF's: 80 characters, a character's id is its place. The plain text is divided among its speakers:

    First Citizen:                      a line that ends with a colon, after an empty line, names the speaker
    Before we proceed any further,      his lines follow
    hear me speak.

Speeches of one speaker are joined by line ends. Sample k of a speaker is the window of ``length`` characters from place
k ``stride`` on; its target is the next character. Every character is the target of at most one sample.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedncv.data.dataset import Dataset

# S. Caldas et al., "LEAF: a benchmark for federated settings", 2018, models/utils/language_utils.py
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
SPACE = ALPHABET.index(" ")
FILE = "shakespeare.txt"

Ids = NDArray[np.int8]


def characters(text: str) -> Ids:
    """Return the id of every character; a character that is not in the alphabet becomes a space.

    >>> characters("\\n !$").tolist()
    [0, 1, 2, 1]
    """
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    table = np.full(128, SPACE, dtype=np.int8)
    table[[ord(c) for c in ALPHABET]] = np.arange(len(ALPHABET))
    return np.where(points < 128, table[np.minimum(points, 127)], np.int8(SPACE)).astype(np.int8)


def speakers(text: str) -> dict[str, str]:
    """Return speaker -> all that he says, in the order of first appearance."""
    said: dict[str, list[str]] = {}
    for speech in text.replace("\r\n", "\n").split("\n\n"):
        name, _, lines = speech.strip("\n").partition("\n")
        if name.endswith(":") and lines.strip():
            said.setdefault(name.removesuffix(":"), []).append(lines)
    return {name: "\n".join(speeches) for name, speeches in said.items()}


def windows(ids: Ids, length: int, stride: int) -> tuple[Ids, Ids]:
    """Return every window of ``length`` ids that has a next one, ``stride`` apart, and the next ones.

    >>> x, y = windows(np.arange(6, dtype=np.int8), 3, 2)
    >>> x.tolist(), y.tolist()
    ([[0, 1, 2], [2, 3, 4]], [3, 5])
    """
    seen = np.lib.stride_tricks.sliding_window_view(ids[:-1], length)[::stride]
    return seen, ids[length::stride]


def load_shakespeare(folder: Path, *, length: int = 80, stride: int = 10, min_chars: int = 1000) -> Dataset:
    """Read ``shakespeare.txt`` in ``folder``; the speakers are the owners.

    ``length`` is the number of characters in a window, ``stride`` the distance of two windows (1: LEAF's),
    ``min_chars`` the least number of characters of a speaker; others are left out.
    """
    for name, value in (("length", length), ("stride", stride)):
        if value < 1:
            raise ValueError(f"shakespeare: {name} is {value}; it must be at least 1")
    path = folder / FILE
    try:
        texts = speakers(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error.reason}, byte {error.start})") from None
    least = max(min_chars, length + 1)
    parts = [windows(characters(text), length, stride) for text in texts.values() if len(text) >= least]
    if not parts:
        raise ValueError(
            f"{path}: none of its {len(texts)} speakers has {least} characters; lower min_chars or length, "
            "and check that each speech begins with a line such as 'Name:'"
        )
    x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
    owners = np.repeat(np.arange(len(parts)), [len(targets) for _, targets in parts])
    return Dataset(
        "shakespeare",
        torch.from_numpy(x),
        torch.from_numpy(y.astype(np.int64)),
        len(ALPHABET),
        owners=torch.from_numpy(owners),
        classes=tuple(ALPHABET),
    )
