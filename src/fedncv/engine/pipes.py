"""Messages between the processes of one machine: tensors go from memory to memory, and only the rest is pickled.

Pickle would copy a ResNet-18 (45 MB) several times on each side; here the pipe makes the only copies. A tensor that is
in several messages, such as the model that all clients of a round receive, goes through a pipe once.
"""

import io
import os
import pickle
from collections import Counter
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from fedncv.tree import leaves

SMALL = 4096  # bytes; a smaller tensor is sent each time

Place = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]
"""Address, dtype, shape and stride: equal for two views of the same numbers."""

Known = dict[Place, int | None]
"""Of each tensor that is sent several times, its number at the other end of a pipe; None before it is there."""


def repeated(messages: Iterable[Any]) -> list[Place]:
    """Return the places of the tensors that are in more than one of these trees. They must not change meanwhile."""
    count = Counter[Place]()
    for message in messages:
        count.update({_place(leaf) for _, leaf in leaves(message) if _is_plain(leaf) and leaf.nbytes >= SMALL})
    return [place for place, num in count.items() if num > 1]


def send(connection: Connection, message: Any, known: Known | None = None) -> None:
    """Send any object that pickles. Of a view only its own numbers are sent; of a known tensor only its number."""
    known = {} if known is None else known
    there = sum(number is not None for number in known.values())
    numbers: list[memoryview] = []
    words = io.BytesIO()
    _Pickler(words, known, there, numbers).dump(message)
    connection.send_bytes(pickle.dumps((words.getvalue(), [len(part) for part in numbers], there)))
    for part in numbers:
        while part:
            part = part[os.write(connection.fileno(), part) :]


def receive(connection: Connection, memory: list[Tensor] | None = None) -> Any:
    """Return the next message. Raise EOFError at the end of the pipe.

    Its tensors are new, and may be written to. Those that will be sent again are in ``memory`` and must not be.
    """
    memory = [] if memory is None else memory
    words, sizes, there = pickle.loads(connection.recv_bytes())
    del memory[there:]
    numbers = [torch.empty(size, dtype=torch.uint8).numpy() for size in sizes]  # torch's memory: begins at 64 bytes
    for array in numbers:
        part = array.data
        while part:
            done = os.readv(connection.fileno(), [part])
            if not done:
                raise EOFError
            part = part[done:]
    return _Unpickler(io.BytesIO(words), numbers, memory).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, known: Known, there: int, numbers: list[memoryview]) -> None:
        super().__init__(file, protocol=5, buffer_callback=lambda buffer: numbers.append(buffer.raw()))
        self._known, self._there = known, there

    def persistent_id(self, value: Any) -> Any:
        if not self._known or not _is_plain(value) or (place := _place(value)) not in self._known:
            return None
        number = self._known[place]
        if number is not None:
            return number
        self._known[place] = self._there
        self._there += 1
        return _parts(value)

    def reducer_override(self, value: Any) -> Any:
        return (_tensor, _parts(value)) if _is_plain(value) else NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, numbers: list[Any], memory: list[Tensor]) -> None:
        super().__init__(file, buffers=numbers)
        self._memory = memory

    def persistent_load(self, found: Any) -> Tensor:
        if isinstance(found, int):
            return self._memory[found]
        self._memory.append(_tensor(*found))
        return self._memory[-1]


def _is_plain(value: Any) -> bool:
    return type(value) is Tensor and value.device.type == "cpu" and value.layout == torch.strided


def _place(tensor: Tensor) -> Place:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _parts(tensor: Tensor) -> tuple[Any, torch.dtype, torch.Size]:
    numbers = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return pickle.PickleBuffer(numbers.data), tensor.dtype, tensor.shape


def _tensor(numbers: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if not len(numbers):
        return torch.empty(shape, dtype=dtype)
    flat: Tensor = torch.from_numpy(numbers)
    return flat.view(dtype).reshape(shape)
