"""Rows: a tree of tensors for every client seen, in memory or in a file, as an immutable value.

    rows | {u: row, …}      a new value with new rows; the old value does not change
    rows[u], rows.get(u, default), u in rows

In memory this is a plain dictionary. ``Rows`` is the same in a file: a round reads and writes only the rows of its own
clients. The others stay on the disk; memory holds only the name and place of each. Names and places
are in pages of neighbouring clients: ``|`` copies the pages of its clients, and values share all others, so that a
round costs the same with a million clients. (A plain dictionary copies its pointers.)

A row is written once, under a hash of its content, and reading verifies this hash. Its place is free when no value
uses it any more. A checkpoint holds only names: it writes no row, and equal runs write equal checkpoints wherever
their rows are stored. Its rows stay as long as the state it was made from is in use.

The file is read and written, not mapped: the kernel's cache is as fast, and a full disk is an error instead of a
signal.
"""

import hashlib
import heapq
import os
import tempfile
from array import array
from collections.abc import Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedncv.files import open_here
from fedncv.portable import need_posix
from fedncv.tree import Tree, leaves, num_bytes, tree_map

NAME = 16  # bytes of a row's name, before the row
PAGE = 256  # clients of one page of names and places


def write_point(name: str) -> None:
    """Mark a moment at which a crash is most dangerous. Tests send SIGKILL here."""


def form_of(row: Tree) -> list[Any]:
    """Return [type, shape] of every tensor."""
    return [[str(leaf.dtype).removeprefix("torch."), list(leaf.shape)] for _, leaf in leaves(row)]


class Slot:
    """A place in the file that holds a row as long as this object exists."""

    __slots__ = ("_file", "name", "number")

    def __init__(self, file: "RowFile", number: int, name: bytes) -> None:
        self._file, self.number, self.name = file, number, name

    def __del__(self, free: Any = heapq.heappush) -> None:  # modules may be unloaded at the end of a process
        free(self._file.free, self.number)


class RowFile:
    """Rows of one form, each in a slot after its name. Without a path this is an unnamed temporary file."""

    def __init__(self, device: torch.device, *, like: Tree = None, form: list[Any] | None = None) -> None:
        self.device = device
        self.like = torch.empty(0, device=device) if like is None else like
        """A row's structure; the values, types and shapes of its tensors do not matter."""
        self.form = form
        """[type, shape] of every tensor of a row; known after the first row."""
        self.free: list[int] = []
        self.path: Path | None = None
        self._descriptor, self._writable = -1, False
        self._end = 0  # number of slots, including free ones
        self._written = False

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def place(self, path: Path) -> None:
        """Set the path of the file; before the first row."""
        if self.path != path:
            assert self._descriptor < 0, "rows are already in another file"
            self.path = path

    def write(self, row: Tree) -> Slot:
        form = form_of(row)
        if self.form is None:
            self.form, self.like = form, tree_map(lambda leaf: leaf.new_empty(0), row)
        assert form == self.form, f"all rows must have one form: {self.form}, not {form}"
        self._open(os.O_RDWR | os.O_CREAT)
        data = b"".join(_bytes(leaf) for _, leaf in leaves(row))
        number = heapq.heappop(self.free) if self.free else self._end
        self._end = max(self._end, number + 1)
        slot = Slot(self, number, _name(data))
        write_point("rows: before a row")
        self._put(data[: len(data) // 2], number, NAME)
        write_point("rows: half a row")
        self._put(data[len(data) // 2 :], number, NAME + len(data) // 2)
        write_point("rows: a row under the name of an old one")
        self._put(slot.name, number, 0)
        write_point("rows: a row")
        self._written = True
        return slot

    def read(self, slot: Slot) -> Tree:
        data = self._get(slot.number)
        if _name(data) != slot.name:
            raise ValueError(f"{self.path or 'the file of rows'} is damaged, or another run has written to it")
        tensors = iter(_tensors(data, self.form or [], self.device))
        return tree_map(lambda _: next(tensors), self.like)

    def find(self, names: list[bytes]) -> dict[bytes, Slot]:
        """Return the slots of these rows, and free all others; ambiguous ones are verified."""
        self._open(os.O_RDONLY)
        self._end = os.fstat(self._descriptor).st_size // self._stride
        wanted: dict[bytes, list[int]] = {name: [] for name in names}
        for number in range(self._end):
            wanted.get(os.pread(self._descriptor, NAME, number * self._stride), []).append(number)
        slots = {}
        for name, numbers in wanted.items():
            if len(numbers) > 1:  # one may be an incomplete row of a killed run
                numbers = [number for number in numbers if _name(self._get(number)) == name]
            if numbers:
                slots[name] = Slot(self, numbers[0], name)
        self.free = sorted(set(range(self._end)) - {slot.number for slot in slots.values()})
        return slots

    def sync(self) -> None:
        """Flush all written rows to the disk."""
        if self._written:
            os.fsync(self._descriptor)
            self._written = False

    @property
    def _stride(self) -> int:
        sizes = [_size(dtype) * torch.Size(shape).numel() for dtype, shape in self.form or []]
        return NAME + sum(sizes)

    def _open(self, flags: int) -> None:
        """Open the file once, and again if it was opened for reading and is now written to."""
        if self._descriptor >= 0 and (flags == os.O_RDONLY or self._writable):
            return
        need_posix("state of clients on disk", remedy="use --rows memory, or Linux, macOS or WSL 2")
        if self.path is None:
            with tempfile.TemporaryFile(prefix="fedncv-") as file:
                self._descriptor = os.dup(file.fileno())
        else:
            descriptor = open_here(self.path, flags)
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = descriptor
        self._writable = flags != os.O_RDONLY

    def _put(self, data: bytes, number: int, offset: int) -> None:
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(self._descriptor, data[done:], number * self._stride + offset + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path or "the file of rows")) from None

    def _get(self, number: int) -> bytes:
        return os.pread(self._descriptor, self._stride - NAME, number * self._stride + NAME)


class Page:
    """The slots of neighbouring clients. A page never changes, so its part of a checkpoint is made only once."""

    __slots__ = ("_ids_and_names", "slots")

    def __init__(self, slots: dict[int, Slot]) -> None:
        self.slots = slots
        self._ids_and_names: tuple[bytes, bytes] | None = None

    def ids_and_names(self) -> tuple[bytes, bytes]:
        """Return the clients in order, eight bytes each, and the names of their rows."""
        if self._ids_and_names is None:
            ids = sorted(self.slots)
            names = b"".join(self.slots[u].name for u in ids)
            self._ids_and_names = array("q", ids).tobytes(), names
        return self._ids_and_names


class Room:
    """Memory for the rows of several dictionaries. Each takes what all its clients need, when its first row comes."""

    def __init__(self, num_bytes: float) -> None:
        self._left, self._taken = num_bytes, dict[RowFile, int]()

    def holds(self, file: RowFile, num_bytes: int) -> bool:
        """Return whether the rows that would be in ``file`` fit; if so, they have their place from now on."""
        if file not in self._taken and num_bytes <= self._left:
            self._left -= num_bytes
            self._taken[file] = num_bytes
        return file in self._taken


class Rows(Mapping[int, Any]):
    """Rows in a file. An empty value keeps its rows in memory if there is ``room`` for those of all clients."""

    def __init__(
        self, file: RowFile, slots: Mapping[int, Slot] | None = None, *, room: Room | None = None, num_clients: int = 1
    ) -> None:
        self.file = file
        self._pages: dict[int, Page] = {}  # client // PAGE -> the page
        self._room, self._num_clients = room, num_clients
        self._put(slots or {})

    def _put(self, slots: Mapping[int, Slot]) -> None:
        """Replace the pages of these clients; only of a value that nobody else has yet."""
        changed: dict[int, dict[int, Slot]] = {}
        for u, slot in slots.items():
            changed.setdefault(u // PAGE, {})[u] = slot
        for number, mine in changed.items():
            old = self._pages.get(number)
            self._pages[number] = Page(old.slots | mine if old else mine)

    def __or__(self, new: Mapping[int, Any]) -> "Rows | dict[int, Any]":
        if not new:
            return self
        if not self._pages:
            size = num_bytes(next(iter(new.values())))
            if self._room is not None and self._room.holds(self.file, size * self._num_clients):
                return dict(new)
        value = Rows(self.file)
        value._pages = dict(self._pages)
        value._put({u: self.file.write(row) for u, row in new.items()})
        return value

    def ids_and_names(self) -> tuple[bytes, bytes]:
        """Return all clients in order, as int64, and the names of their rows, ``NAME`` bytes each."""
        pages = [self._pages[number].ids_and_names() for number in sorted(self._pages)]
        return b"".join(ids for ids, _ in pages), b"".join(names for _, names in pages)

    def slot(self, u: int) -> Slot:
        return self._pages[u // PAGE].slots[u]

    def __getitem__(self, u: int) -> Any:
        return self.file.read(self.slot(u))

    def __contains__(self, u: object) -> bool:
        if not isinstance(u, Integral):  # numpy's numbers too
            return False
        page = self._pages.get(int(u) // PAGE)
        return page is not None and int(u) in page.slots

    def __iter__(self) -> Iterator[int]:
        return (u for page in self._pages.values() for u in page.slots)

    def __len__(self) -> int:
        return sum(len(page.slots) for page in self._pages.values())


AnyRows = Rows | dict[int, Any]


def rows_of(rows: AnyRows, ids_S: Tensor, default: Tensor) -> Tensor:
    """Return the rows of these clients, stacked; ``default`` for one never seen."""
    return torch.stack([rows.get(u, default) for u in ids_S.tolist()])


def with_rows(rows: AnyRows, ids_S: Tensor, new_SP: Tensor) -> AnyRows:
    """Replace the rows of these clients; each is a copy, so that it does not keep its whole round in memory."""
    return rows | {u: row.clone() for u, row in zip(ids_S.tolist(), new_SP, strict=True)}


def rows_for(tree: Tree, *, room: float, num_clients: int, device: torch.device) -> Tree:
    """Replace each empty dictionary of clients in the tree by ``Rows``; they share the ``room`` in memory."""
    shared = Room(room)

    def made(part: Tree) -> Tree:
        if isinstance(part, dict) and not part:
            return Rows(RowFile(device), room=shared, num_clients=num_clients)
        if isinstance(part, tuple):
            parts = [made(each) for each in part]
            return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
        return part

    return made(tree)


def all_rows(tree: Tree, path: str = "") -> Iterator[tuple[str, Rows]]:
    """Yield (path, rows) for all rows of the tree that are in files, or may be."""
    if isinstance(tree, Rows):
        yield path, tree
    elif isinstance(tree, tuple):
        names = getattr(tree, "_fields", range(len(tree)))
        for name, part in zip(names, tree, strict=True):
            yield from all_rows(part, f"{path}.{name}" if path else str(name))


def name_of(row: Tree) -> bytes:
    """Return the name under which a file would hold this row."""
    return _name(b"".join(_bytes(leaf) for _, leaf in leaves(row)))


def _name(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=NAME).digest()


def _bytes(leaf: Tensor) -> bytes:
    return leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _size(dtype: str) -> int:
    return torch.empty(0, dtype=getattr(torch, dtype)).element_size()


def _tensors(data: bytes, form: list[Any], device: torch.device) -> Iterator[Tensor]:
    at = 0
    for name, shape in form:
        end = at + _size(name) * torch.Size(shape).numel()
        leaf = torch.empty(shape, dtype=getattr(torch, name))
        if end > at:
            leaf = torch.frombuffer(bytearray(data[at:end]), dtype=leaf.dtype).reshape(shape)
        at = end
        yield leaf.to(device)
