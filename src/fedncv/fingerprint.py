"""Fingerprint of an object: six hexadecimal digits that tell different objects apart, in every process the same.

It covers what an object is made of, never where it lies in memory:

    function      its bytecode and constants, its defaults, the values that it closes over, and the global
                  values, functions and classes of its own module that it names
    class         its functions and attributes, and its bases
    tensor        dtype, shape and bytes; above ``WHOLE`` bytes those of evenly spaced blocks
    anything else its type and its values, field by field; fields that have their default are left out

Code of installed libraries and of fedncv itself counts by its name. So another version of a library has the same
fingerprint; another version of Python has another one, because its bytecode differs.
"""

import copyreg
import dataclasses
import dis
import functools
import hashlib
import inspect
import sys
import sysconfig
import types
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DIGITS = 6
WHOLE = 1 << 28  # bytes of a tensor that are read; a larger one is read in this many
BLOCKS = 256  # evenly spaced blocks
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), torch.dtype, torch.device, range)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that a class statement made
_OF_TORCH = set(vars(nn.Module())) - {"training"}  # what torch keeps in every module; tensors and hooks are read apart
_CONTAINERS = (Mapping, set, frozenset, tuple, list)
_SKIPPED = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__"}


def fingerprint(thing: Any) -> str:
    """Return the fingerprint of any object.

    >>> def scaled(by):
    ...     return lambda x: by * x
    >>> fingerprint(scaled(2)) == fingerprint(scaled(2)), fingerprint(scaled(2)) == fingerprint(scaled(3))
    (True, False)
    """
    return _Reader().read(thing).hex()[:DIGITS]


class _Reader:
    """Reads one object, each part once. Objects may refer to each other in circles."""

    def __init__(self) -> None:
        self._done: dict[int, bytes] = {}
        self._open: dict[int, int] = {}  # objects that are being read -> their depth
        self._alive: list[Any] = []  # an object made on the way must not leave its id to another one

    def read(self, thing: Any) -> bytes:
        """Return a digest of the object's type and content."""
        if type(thing) in _PLAIN:
            return _digest(type(thing).__name__, repr(thing))
        if id(thing) in self._done:
            return self._done[id(thing)]
        if id(thing) in self._open:
            return _digest("circle", str(self._open[id(thing)]))
        self._open[id(thing)] = len(self._open)
        self._alive.append(thing)
        self._done[id(thing)] = _digest(*self._parts(thing))
        del self._open[id(thing)]
        return self._done[id(thing)]

    def _parts(self, thing: Any) -> Iterable[str | bytes]:
        if isinstance(thing, Tensor):
            return _tensor(thing)
        if isinstance(thing, np.ndarray) and not thing.dtype.hasobject:
            return ["array", str(thing.dtype), str(thing.shape), _bytes(thing)]
        if isinstance(thing, types.CodeType):
            return self._code(thing)
        if isinstance(thing, types.FunctionType):
            return self._function(thing)
        if isinstance(thing, types.MethodType):
            return ["method", self.read(thing.__func__), self.read(thing.__self__)]
        if isinstance(thing, functools.partial):
            return ["partial", *map(self.read, (thing.func, thing.args, thing.keywords, vars(thing)))]
        if isinstance(thing, type):
            return self._class(thing)
        if isinstance(thing, functools._lru_cache_wrapper):
            return ["cached", self.read(thing.__wrapped__)]
        if isinstance(thing, types.ModuleType):
            return ["module", thing.__name__]
        beside = vars(thing) if isinstance(thing, _CONTAINERS) and getattr(thing, "__dict__", None) else None
        return ["object", self.read(type(thing)), *self._content(thing), *([self.read(beside)] if beside else [])]

    def _content(self, thing: Any) -> Iterable[bytes]:
        if isinstance(thing, nn.Module):
            return self._module(thing)
        if isinstance(thing, Mapping):
            factory = [self.read(thing.default_factory)] if isinstance(thing, defaultdict) else []
            keys = sorted(thing, key=_order)  # objects in circles are read in one order, whatever that of the mapping
            return factory + sorted(_digest(self.read(key), self.read(thing[key])) for key in keys)
        if isinstance(thing, set | frozenset):
            return sorted(map(self.read, sorted(thing, key=_order)))
        if isinstance(thing, tuple) and hasattr(thing, "_fields"):
            return self._fields(thing, thing._fields, getattr(thing, "_field_defaults", {}))
        if isinstance(thing, tuple | list):
            return [self.read(each) for each in thing]
        if dataclasses.is_dataclass(thing):
            defaults = {f.name: f.default for f in dataclasses.fields(thing)}
            others = {name: value for name, value in getattr(thing, "__dict__", {}).items() if name not in defaults}
            return self._fields(thing, list(defaults), defaults) + ([self.read(others)] if others else [])
        return self._state(thing)

    def _fields(self, thing: Any, names: Iterable[str], defaults: Mapping[str, Any]) -> list[bytes]:
        """A field that a later version adds, with a default, changes no fingerprint."""
        values = {name: getattr(thing, name) for name in names}
        given = [name for name in values if not _same(values[name], defaults.get(name, dataclasses.MISSING))]
        return [_digest(name, self.read(values[name])) for name in given]

    def _module(self, module: nn.Module) -> list[bytes]:
        """Layers with their attributes and hooks, and tensors: which are trained, and which are one under two names."""
        parts = []
        for name, each in module.named_modules():
            held = {key: value for key, value in vars(each).items() if key not in _OF_TORCH}
            hooks = [[*each._forward_pre_hooks.values()], [*each._forward_hooks.values()]]
            parts.append(_digest(name, self.read(type(each)), self.read(held), self.read(hooks)))
        first: dict[int, int] = {}
        for of in (module.named_parameters, module.named_buffers):
            for name, tensor in of(remove_duplicate=False):
                number = first.setdefault(id(tensor), len(first))
                parts.append(_digest(name, str(number), str(tensor.requires_grad), self.read(tensor.detach())))
        return parts

    def _state(self, thing: Any) -> list[bytes]:
        """What pickle would store; nothing but the type of an object that it cannot store, such as a lock."""
        if isinstance(thing, types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType):
            bound = getattr(thing, "__self__", None)
            of = [] if bound is None or isinstance(bound, types.ModuleType | type) else [self.read(bound)]
            return [_digest(str(getattr(thing, "__module__", "")), thing.__qualname__), *of]
        try:
            reduce = copyreg.dispatch_table.get(type(thing))
            reduced: Any = reduce(thing) if reduce else thing.__reduce_ex__(4)
        except Exception:
            return [self.read(vars(thing))] if hasattr(thing, "__dict__") else []
        if isinstance(reduced, str):
            return [_digest(reduced)]
        return [self.read(list(part) if hasattr(part, "__next__") else part) for part in reduced[1:]]

    def _function(self, function: types.FunctionType) -> list[str | bytes]:
        cells = function.__closure__ or ()
        closed = [self.read(_cell(cell)) for cell in cells]
        attributes = [self.read(vars(function))] if vars(function) else []
        given = [self.read(function.__defaults__), self.read(function.__kwdefaults__), *closed, *attributes]
        if _installed(function):
            return ["function", _name(function), *given]
        names = sorted(_names(function.__code__))
        named = []
        for name in (name for name in names if name in function.__globals__):
            value = function.__globals__[name]
            named.append(_digest(name, self.read(value)))
            if isinstance(value, types.ModuleType) and not _installed_module(value.__name__):
                used = [each for each in sorted(_attributes(function.__code__)) if hasattr(value, each)]
                named += [_digest(name, each, self.read(getattr(value, each))) for each in used]
        return ["function", self.read(function.__code__), *given, *named]

    def _code(self, code: types.CodeType) -> list[str | bytes]:
        words = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        consts = [self.read(const) for const in code.co_consts]
        return ["code", code.co_code, code.co_exceptiontable, repr(words), str(code.co_flags), *consts]

    def _class(self, kind: type) -> list[str | bytes]:
        if _installed(kind):
            return ["class", _name(kind)]
        held = {name: _plain_attribute(value) for name, value in vars(kind).items() if name not in _SKIPPED}
        parts = [_digest(name, self.read(held[name])) for name in sorted(held) if not name.startswith("_abc_")]
        return ["class", kind.__name__, *map(self.read, kind.__bases__), *parts]


def _digest(*parts: str | bytes) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.digest()


def _tensor(tensor: Tensor) -> list[str | bytes]:
    parts: list[str | bytes] = ["tensor", str(tensor.dtype), str(tuple(tensor.shape))]
    if tensor.is_meta:
        return parts
    if tensor.layout is not torch.strided:
        tensor = tensor.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
        return [*parts, str(tensor.layout), _bytes(tensor.indices()), _bytes(tensor.values().detach())]
    return [*parts, _bytes(tensor.detach())]


def _bytes(values: Any) -> bytes:
    """Return a digest of an array's or tensor's bytes; of a large one those of evenly spaced blocks."""
    flat = values.reshape(-1)
    length = flat.shape[0] if values.nbytes <= WHOLE else WHOLE // BLOCKS // flat.itemsize
    starts = [0] if length == flat.shape[0] else np.linspace(0, flat.shape[0] - length, BLOCKS).astype(int).tolist()
    found = hashlib.sha256()
    for start in starts:
        block = flat[start : start + length]
        array = block.cpu().contiguous().view(torch.uint8).numpy() if isinstance(block, Tensor) else block
        found.update(np.ascontiguousarray(array).tobytes())
    return found.digest()


def _same(value: Any, default: Any) -> bool:
    comparable = type(value) in (*_PLAIN, tuple, dict) and type(value) is type(default)
    return value is default or (comparable and repr(value) == repr(default))


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _names(code: types.CodeType) -> set[str]:
    """Return the global names that a function and the functions within it look up."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _names(const)
    return found


def _attributes(code: types.CodeType) -> set[str]:
    """Return the names that a function and the functions within it look up in other objects, such as modules."""
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _attributes(const)
    return found


def _order(thing: Any) -> str:
    """Return a text to sort by that is the same in every process."""
    return repr(thing) if type(thing) in _PLAIN else f"{type(thing).__name__} {getattr(thing, '__qualname__', '')}"


def _plain_attribute(value: Any) -> Any:
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return (value.fget, value.fset)
    if inspect.isdatadescriptor(value):
        return None  # a slot: its name is enough
    return value


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _installed(thing: Any) -> bool:
    """Return whether the code belongs to fedncv, to Python or to an installed package."""
    module = thing.__module__ or ""
    if module == "__main__":
        return False
    if module == "builtins":  # also the module of code that `exec` ran without a name
        return isinstance(thing, type) and not thing.__flags__ & _IN_PYTHON
    return _installed_module(module)


def _installed_module(name: str) -> bool:
    top = name.partition(".")[0]
    if top == "fedncv":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return top in sys.stdlib_module_names
    place = Path(file).resolve()
    # a virtual environment may use the packages of another one, or of the system
    return str(place).startswith(_INSTALLED) or not {"site-packages", "dist-packages"}.isdisjoint(place.parts)
