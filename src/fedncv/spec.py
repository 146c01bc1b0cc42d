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
from dataclasses import fields, is_dataclass, replace
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
    for word in filter(None, rest.split(",")):
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{what} {text!r}: {word!r} should be key=value, as in {name}:key=value,key=value")
        knob, _, inner = key.partition(".")
        if knob not in types:
            known = ", ".join(types) or "none"
            raise ValueError(f"{what} {name!r} has no knob {key!r} (it has {known})")
        where = f"{what} {name!r}: {key}"
        part = part_of(types[knob])
        if part is not None:
            default = inspect.signature(choices[name]).parameters[knob].default
            values[knob] = _set_part(values.get(knob, default), part, inner, value, where)
        elif inner:
            raise ValueError(f"{what} {name!r}: {knob} has no knobs of its own; write {knob}={value}")
        else:
            values[key] = _convert(value, types[key], where)
    return name, values


def _set_part(now: Any, part: Any, inner: str, value: str, where: str) -> Any:
    """Return the part's config with one knob set, or None where the part is switched off."""
    types = knobs(part)
    if not inner and value in ("on", "off"):
        return (now or part()) if value == "on" else None
    if not inner and not types:
        raise ValueError(f"{where} must be on or off, not {value!r}")
    if inner and inner not in types:
        raise ValueError(f"{where}: there is no such knob (it has {', '.join(types) or 'none'})")
    knob = inner or fields(part)[0].name
    try:
        converted = _convert(value, types[knob], where)
    except ValueError:
        if inner:
            raise
        raise ValueError(f"{where} must be on, off or {kind_of(types[knob])}, not {value!r}") from None
    return replace(now or part(), **{knob: converted})


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
