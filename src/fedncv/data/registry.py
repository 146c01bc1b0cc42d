"""The datasets by name: what they are, where they come from, and which function reads them.

A dataset is added here, in one entry, and in nothing else.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fedncv.data.digits import read_digits
from fedncv.data.raw import Raw


class Entry(NamedTuple):
    title: str
    description: str  # one line
    year: int
    shape: tuple[int, int, int]  # channels, height, width
    num_classes: int
    num_images: int
    read: Callable[[], Raw]
    files: tuple[str, ...] = ()  # what to put into the data folder; none: built in
    hub: str = ""  # id on the Hugging Face hub


DATASETS: Mapping[str, Entry] = {
    "digits": Entry(
        title="digits",
        description="Handwritten digits of 8x8, enlarged to 28x28; built in",
        year=1998,
        shape=(1, 28, 28),
        num_classes=10,
        num_images=1_797,
        read=read_digits,
    ),
}
