"""Rows that a worker keeps on its own disk, named by their content. The driver has all of them: losing some costs time.

The oldest are dropped when there are too many. A row that cannot be read or written is not there.
"""

from collections import OrderedDict
from typing import Any

import torch

from fedncv.rows import NAME, RowFile, Slot, form_of, name_of
from fedncv.tree import num_bytes

CACHE_BYTES = 4 << 30  # of one worker's rows of one run


class RowCache:
    """Rows of one form in an unnamed temporary file, which ends with this process."""

    def __init__(self, device: torch.device, *, most_bytes: int = CACHE_BYTES) -> None:
        self._file = RowFile(device)
        self._slots: OrderedDict[bytes, Slot] = OrderedDict()
        self._most_bytes = most_bytes

    def put(self, row: Any) -> bytes:
        """Keep a row if there is room, and if it has the form of the others; return its name."""
        if self._file.form not in (None, form_of(row)):
            return name_of(row)
        most = self._most_bytes // (NAME + num_bytes(row))
        try:
            slot = self._file.write(row)
        except OSError:  # a full disk
            return name_of(row)
        self._slots[slot.name] = slot
        self._slots.move_to_end(slot.name)
        while len(self._slots) > most:
            self._slots.popitem(last=False)
        return slot.name

    def get(self, name: bytes) -> Any | None:
        """Return the row of this name, or None."""
        slot = self._slots.get(name)
        if slot is None:
            return None
        self._slots.move_to_end(name)
        try:
            return self._file.read(slot)
        except (OSError, ValueError):  # damaged
            del self._slots[name]
            return None
