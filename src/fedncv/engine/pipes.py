"""Messages between the processes of one machine: tensors go from memory to memory, and only the rest is pickled.

Pickle would copy a ResNet-18 (45 MB) several times on each side; here the pipe makes the only copies.
"""

import io
import os
import pickle
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor


def send(connection: Connection, message: Any) -> None:
    """Send any object that pickles. Of a view only its own numbers are sent."""
    numbers: list[memoryview] = []
    words = io.BytesIO()
    _Pickler(words, protocol=5, buffer_callback=lambda buffer: numbers.append(buffer.raw())).dump(message)
    connection.send_bytes(pickle.dumps((words.getvalue(), [len(part) for part in numbers])))
    for part in numbers:
        while part:
            part = part[os.write(connection.fileno(), part) :]


def receive(connection: Connection) -> Any:
    """Return the next message; its tensors are new, and may be written to. Raise EOFError at the end of the pipe."""
    words, sizes = pickle.loads(connection.recv_bytes())
    numbers = [torch.empty(size, dtype=torch.uint8).numpy() for size in sizes]  # torch's memory: begins at 64 bytes
    for array in numbers:
        part = array.data
        while part:
            done = os.readv(connection.fileno(), [part])
            if not done:
                raise EOFError
            part = part[done:]
    return pickle.loads(words, buffers=numbers)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout != torch.strided:
            return NotImplemented
        numbers = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(numbers.data), value.dtype, value.shape)


def _tensor(numbers: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.from_numpy(numbers).view(dtype).reshape(shape) if len(numbers) else torch.empty(shape, dtype=dtype)
