"""Convert trees of tensors to and from Flower's ArrayRecord, and check messages.

    name of an array    path of the leaf, for example "up.delta_P"
    bytes of an array   the tensor's numbers, little-endian, C order: no pickle, no header, nothing to parse

A receiver knows in advance the names, types and shapes of a message (its template). It rejects any difference, by
name, before it makes a tensor. So the method's declaration bounds the size of what is decoded.
"""

import math
import sys
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from fedncv.flower.foreign import quoted
from fedncv.tree import leaves

STYPE = "fedncv.raw"  # the serialisation named in every array
ARRAYS, ASK = "arrays", "ask"  # the two records of a message; a reply has the first only


class WireError(ValueError):
    """A message that the receiver must reject."""


def encode(tree: Any) -> ArrayRecord:
    """Return the tensors of a tree, by the names of their fields."""
    if sys.byteorder != "little":
        raise WireError("this machine is big-endian; federations of fedncv send little-endian numbers")
    return ArrayRecord({path: _array(path, leaf) for path, leaf in leaves(tree) if not _is_nothing(leaf)})


def decode(record: ArrayRecord, template: Any, *, what: str) -> Any:
    """Return the numbers of ``record`` in the template's form; raise WireError if anything differs."""
    expected = {path: leaf for path, leaf in leaves(template) if not _is_nothing(leaf)}
    extra, missing = sorted(set(record) - set(expected)), sorted(set(expected) - set(record))
    if extra or missing:
        raise WireError(f"{what} has undeclared fields {_names(extra)} and lacks {_names(missing)}")
    for path, leaf in expected.items():
        _check(record[path], leaf, f"{what}, field {path}")
    return fill(template, {path: _tensor(record[path], leaf) for path, leaf in expected.items()})


def records(message: Message, *names: str, what: str) -> RecordDict:
    """Return the content of a message that consists of exactly these records."""
    content = message.content
    if sorted(content) != sorted(names):
        raise WireError(f"{what} consists of {_names(sorted(content))}, not of {_names(sorted(names))}")
    return content


def arrays(content: RecordDict) -> ArrayRecord:
    found = content[ARRAYS]
    if not isinstance(found, ArrayRecord):
        raise WireError(f"record {ARRAYS!r} is a {type(found).__name__}")
    return found


def whole_numbers(content: RecordDict, *names: str, beside: Collection[str] = (), what: str) -> list[int]:
    """Return fields of the record of settings, all of them whole numbers from 0 to 2^62.

    Fields ``beside`` them, which the caller checks, may be there; no others.
    """
    found = content[ASK]
    if not isinstance(found, ConfigRecord) or sorted(set(found) - set(beside)) != sorted(names):
        raise WireError(f"{what} gives {_names(sorted(found))}, not {_names(sorted([*names, *beside]))}")
    numbers = [found[name] for name in names]
    for name, value in zip(names, numbers, strict=True):
        if type(value) is not int or not 0 <= value <= 2**62:
            raise WireError(f"{what}: {name} is {quoted(value)}, not a whole number of at least 0")
    return [int(value) for value in numbers]  # type: ignore[arg-type]  # just checked


def _is_nothing(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.numel() == 0


def _array(path: str, leaf: Any) -> Array:
    if not isinstance(leaf, Tensor):
        raise WireError(f"field {path} is a {type(leaf).__name__}; messages are made of tensors")
    flat = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return Array(_dtype(leaf), tuple(leaf.shape), STYPE, flat.numpy().tobytes())


def _dtype(leaf: Tensor) -> str:
    return str(leaf.dtype).removeprefix("torch.")


def _check(array: Array, leaf: Tensor, where: str) -> None:
    found = (array.stype, array.dtype, tuple(array.shape))
    wanted = (STYPE, _dtype(leaf), tuple(leaf.shape))
    if found != wanted:
        raise WireError(f"{where} is {_form(found)}, not {_form(wanted)}")
    size = math.prod(leaf.shape) * leaf.element_size()
    if len(array.data) != size:
        raise WireError(f"{where} has {len(array.data)} bytes, not {size}")


def _form(form: tuple[str, str, tuple[int, ...]]) -> str:
    shape = form[2] if len(form[2]) <= 8 else (*form[2][:8], "…")
    return f"{_word(form[1])}[{', '.join(map(str, shape))}] ({_word(form[0])})"


def _tensor(array: Array, leaf: Tensor) -> Tensor:
    flat = torch.from_numpy(np.frombuffer(array.data, dtype=np.uint8).copy())
    return flat.view(leaf.dtype).reshape(leaf.shape).to(leaf.device)


def fill(template: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Return the template's tree with ``tensors`` put in by their paths; other leaves stay."""
    if isinstance(template, Tensor):
        return tensors.get(path, template)
    if isinstance(template, tuple):
        names = getattr(template, "_fields", range(len(template)))
        parts = [
            fill(part, tensors, f"{path}.{name}" if path else str(name))
            for name, part in zip(names, template, strict=True)
        ]
        return type(template)(*parts) if hasattr(template, "_fields") else tuple(parts)
    if isinstance(template, dict):
        return {n: fill(part, tensors, f"{path}.{n}" if path else str(n)) for n, part in template.items()}
    raise WireError(f"field {path} is a {type(template).__name__}; messages are made of tensors")


def _names(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(map(_word, names[:5])) or "none") + more


def _word(text: str) -> str:
    """Return a plain word as it is, and anything else that a message holds in quotes."""
    plain = len(text) <= 60 and all(c.isascii() and (c.isalnum() or c in "._") for c in text)
    return text if plain else quoted(text, shown=60)
