"""Store the state of clients that are not in the round: on the device, in host memory, or in a file.

The place is chosen once, by the size of one client's state times the number of clients. States are values, so a row
is written once and never changed in place; its memory is freed when no state uses it any more.
"""

import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedncv.portable import memory_bytes, need_posix
from fedncv.tree import num_bytes, tree_map

Place = Literal["device", "host", "file"]
SHARE_OF_DEVICE, SHARE_OF_HOST = 0.25, 0.5


def choose(bytes_in_all: int, device: torch.device) -> Place:
    """Return the fastest place that leaves room for everything else."""
    if device.type == "cuda" and bytes_in_all < room(device):
        return "device"
    return "host" if bytes_in_all < room(torch.device("cpu")) else "file"


def room(device: torch.device) -> float:
    """Return the bytes of the device's memory that the state of clients not in the round may use."""
    if device.type == "cuda":
        return SHARE_OF_DEVICE * torch.cuda.mem_get_info(device)[1]
    return SHARE_OF_HOST * memory_bytes()


class Keeper:
    """Stores rows, and loads them back to the device."""

    def __init__(self, num_clients: int, device: torch.device, *, place: Place | None = None) -> None:
        self.place = place
        self._num_clients, self._device = num_clients, device

    def put(self, tree: Any) -> Any:
        """Return a copy: a view would keep the whole stack in memory."""
        if self.place is None and num_bytes(tree):
            self.place = choose(num_bytes(tree) * self._num_clients, self._device)
        return tree_map(self._put, tree)

    def here(self, tree: Any) -> Any:
        return tree_map(lambda leaf: leaf.to(self._device, non_blocking=True), tree)

    def _put(self, leaf: Tensor) -> Tensor:
        if self.place == "file" and leaf.numel():
            return _in_a_file(leaf)
        if self.place == "host" and leaf.device.type == "cuda":
            return torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True).copy_(leaf)
        return leaf.clone()


def _in_a_file(leaf: Tensor) -> Tensor:
    """Return a tensor in an unnamed mapped file; the disk space is freed with the tensor."""
    need_posix("state of clients on disk", remedy="use fewer clients or a smaller model, or Linux, macOS or WSL 2")
    descriptor, name = tempfile.mkstemp(prefix="fedncv-")
    try:
        os.ftruncate(descriptor, leaf.numel() * leaf.element_size())
        mapped = torch.from_file(name, shared=True, size=leaf.numel(), dtype=leaf.dtype)
    finally:
        os.close(descriptor)
        Path(name).unlink()
    return mapped.view(leaf.shape).copy_(leaf)
