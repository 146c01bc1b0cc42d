"""Pack values for other processes: tensors apart from the rest, so that large ones go through shared memory.

A tensor on a GPU travels through the host's memory and arrives on the GPU of the receiver.
"""

import io
import pickle
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.uint8]


class Packed(NamedTuple):
    """A pickled value in which tensors are numbers of ``parts``."""

    words: bytes
    parts: list[Numbers]


class CannotPackError(ValueError):
    """A value holds an object that cannot be pickled; the message is the reason."""


def pack(value: Any) -> Packed:
    """Pack any value that cloudpickle can pickle, functions and classes of a script included."""
    import ray.cloudpickle as cloudpickle

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, found: Any) -> Any:
            if type(found) is not Tensor or found.layout != torch.strided:
                return None
            return place(found)

    parts: list[Numbers] = []
    places: dict[int, tuple[Tensor, Any]] = {}  # with the tensor, so that its id stays its own

    def place(tensor: Tensor) -> Any:
        if id(tensor) not in places:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            if flat.stride(0) != 1:  # one number of an expanded tensor
                flat = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)
            places[id(tensor)] = tensor, (len(parts), tensor.dtype, tuple(tensor.shape), tensor.is_cuda)
            parts.append(flat.view(torch.uint8).numpy())
        return places[id(tensor)][1]

    words = io.BytesIO()
    try:
        Pickler(words, protocol=5).dump(value)  # type: ignore[no-untyped-call]
    except Exception as error:  # of any object's own __reduce__
        raise CannotPackError(f"{type(error).__name__}: {error}".splitlines()[0]) from None
    return Packed(words.getvalue(), parts)


def unpack(words: bytes, parts: Sequence[Numbers], *, copy: bool = True) -> Any:
    """Return the value. With ``copy=False`` its tensors on the CPU share the memory of ``parts``: only read them."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, found: Any) -> Tensor:
            if found not in made:
                made[found] = _tensor(parts[found[0]], *found[1:], copy=copy)
            return made[found]

    made: dict[Any, Tensor] = {}
    return Unpickler(io.BytesIO(words)).load()


def _tensor(numbers: Numbers, dtype: torch.dtype, shape: tuple[int, ...], on_gpu: bool, *, copy: bool) -> Tensor:
    if not len(numbers):
        return torch.empty(shape, dtype=dtype, device="cuda" if on_gpu else "cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(numbers)
    if copy and not on_gpu:
        tensor = torch.empty_like(tensor).copy_(tensor)  # torch's own memory begins at 64 bytes
    tensor = tensor.view(dtype).reshape(shape)
    return tensor.cuda() if on_gpu else tensor
