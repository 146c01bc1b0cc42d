"""Parse ``name:key=value,key=value``, the text of a method, a partition or a schedule in a config or a command.

The knobs are the keyword-only parameters of a callable (a function or a keyword-only dataclass), so they
are defined once, where they are used.

>>> def dirichlet(labels, *, alpha: float = 0.1, min_samples: int = 10): ...
>>> parse("dirichlet:alpha=1", {"dirichlet": dirichlet}, what="partition")
('dirichlet', {'alpha': 1.0})

A knob may be a part with knobs of its own: a field of type ``Config | None``, where Config is a frozen dataclass.
``part=off`` leaves it out, ``part=on`` is its default, ``part=0.9`` sets its first knob, ``part.knob=2`` any of them.
"""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass, replace
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints


def nearest(word: str, choices: Iterable[str], *, what: str) -> str:
    """Return the message for a typo: "unknown method 'fedavgg'; did you mean 'fedavg'? (there are …)"."""
    choices = list(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {what} {word!r}{hint} (there are {', '.join(choices)})"


def knobs(function: Callable[..., Any]) -> dict[str, Any]:
    """Return knob -> type, for every keyword-only parameter that a text can set."""
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    return {p.name: hints[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}


def part_of(kind: Any) -> Any:
    """Return the Config of a knob that is a part, and None for every other knob."""
    kinds = [each for each in get_args(kind) if is_dataclass(each)] if isinstance(kind, UnionType) else []
    return kinds[0] if kinds else None


def parse(text: str, choices: Mapping[str, Callable[..., Any]], *, what: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the knobs that ``text`` sets; raise ValueError with the offending word and the remedy."""
    name, _, rest = text.partition(":")
    if name not in choices:
        raise ValueError(nearest(name, choices, what=what))
    types = knobs(choices[name])
    values: dict[str, Any] = {}
    parts: dict[str, dict[str, str]] = {}  # part -> its words, "" for the part itself
    for word in filter(None, rest.split(",")):
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{what} {text!r}: {word!r} should be key=value, as in {name}:key=value,key=value")
        knob, dot, inner = key.partition(".")
        if knob not in types or (dot and not inner):
            known = ", ".join(types) or "none"
            raise ValueError(f"{what} {name!r} has no knob {key!r} (it has {known})")
        if knob in values or inner in parts.get(knob, {}):
            raise ValueError(f"{what} {text!r} sets {key} twice; leave one out")
        if part_of(types[knob]) is not None:
            parts.setdefault(knob, {})[inner] = value
        elif inner:
            raise ValueError(f"{what} {name!r}: {knob} has no knobs of its own; write {knob}={value}")
        else:
            values[key] = _convert(value, types[key], f"{what} {name!r}: {key}")
    for knob, words in parts.items():
        default = inspect.signature(choices[name]).parameters[knob].default
        values[knob] = _part(default, part_of(types[knob]), words, f"{what} {name!r}: {knob}")
    return name, values


def _part(default: Any, part: Any, words: dict[str, str], where: str) -> Any:
    """Return the part's config with all its words set at once, or None if it is switched off."""
    types, first = knobs(part), next(iter(knobs(part)), "")
    itself = words.pop("", "on")
    if itself == "off":
        if words:
            raise ValueError(f"{where}=off and {where.split()[-1]}.{next(iter(words))} contradict; leave one out")
        return None
    if itself != "on":
        if not types:
            raise ValueError(f"{where} must be on or off, not {itself!r}")
        if first in words:
            raise ValueError(f"{where} and {where.split()[-1]}.{first} are the same knob; leave one out")
        words = {first: itself, **words}
    values: dict[str, Any] = {}
    for inner, value in words.items():
        if inner not in types:
            raise ValueError(f"{where}.{inner}: there is no such knob (it has {', '.join(types) or 'none'})")
        try:
            values[inner] = _convert(value, types[inner], f"{where}.{inner}")
        except ValueError:
            if value is not itself:
                raise
            raise ValueError(f"{where} must be on, off or {kind_of(types[inner])}, not {value!r}") from None
    try:
        return replace(default or part(), **values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def write(name: str, values: Mapping[str, Any]) -> str:
    """Return the text that ``parse`` reads back."""
    words: list[str] = []
    for key, value in values.items():
        if value is None:
            words.append(f"{key}=off")
        elif is_dataclass(value):
            inner = [f"{key}.{knob}={written(each)}" for knob, each in vars(value).items()]
            words += inner or [f"{key}=on"]
        else:
            words.append(f"{key}={written(value)}")
    return ":".join(filter(None, [name, ",".join(words)]))


def written(value: Any) -> str:
    """Return a knob's value as it is written in a text."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def kind_of(kind: Any) -> str:
    """Return the type of a knob in words.

    >>> kind_of(float), kind_of(Literal["saga", "svrg"]), kind_of(float | Literal["learned"])
    ('float', 'saga or svrg', 'float or learned')
    """
    part = part_of(kind)
    if part is not None:
        return "on, off, or its first knob's value" if knobs(part) else "on or off"
    if isinstance(kind, UnionType) or (get_origin(kind) is not Literal and get_args(kind)):
        return " or ".join(map(kind_of, get_args(kind)))
    return " or ".join(get_args(kind)) if get_origin(kind) is Literal else str(kind.__name__)


def _convert(value: str, kind: Any, where: str) -> Any:
    choices = get_args(kind)
    if get_origin(kind) is not Literal and choices:  # float | Literal["learned"]
        words = [word for each in choices if get_origin(each) is Literal for word in get_args(each)]
        plain = next(each for each in choices if get_origin(each) is not Literal)
        try:
            return value if value in words else plain(value)
        except ValueError:
            raise ValueError(f"{where} must be {kind_of(kind)}, not {value!r}") from None
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{where} must be one of {', '.join(get_args(kind))}, not {value!r}")
        return value
    if kind is bool:
        if value not in ("true", "false"):
            raise ValueError(f"{where} must be true or false, not {value!r}")
        return value == "true"
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"{where} must be {kind.__name__}, not {value!r}") from None


def import_object(name: str, *, what: str):  # type: ignore[no-untyped-def]  # whatever the user's module holds
    """The object called ``package.module:name``."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:  # a console script does not look where its user stands
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{what} {name!r} cannot be imported: {error}; name it as package.module:function, from here or installed"
        ) from None
