"""``name:key=value,key=value``: how a method, a partition or a schedule is named in a config or a command.

The knobs are the keyword-only parameters of a callable (a function or a keyword-only dataclass), so they
are written down once, where they are used.

>>> def dirichlet(labels, *, alpha: float = 0.1, min_samples: int = 10): ...
>>> parse("dirichlet:alpha=1", {"dirichlet": dirichlet}, what="partition")
('dirichlet', {'alpha': 1.0})
"""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints


def nearest(word: str, choices: Iterable[str], *, what: str) -> str:
    """'unknown method 'fedavgg'; did you mean 'fedavg'? (there are …)': the one line a typo gets."""
    choices = list(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {what} {word!r}{hint} (there are {', '.join(choices)})"


def knobs(function: Callable[..., Any]) -> dict[str, Any]:
    """Knob -> type, for every keyword-only parameter that a text can set."""
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    return {p.name: hints[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}


def parse(text: str, choices: Mapping[str, Callable[..., Any]], *, what: str) -> tuple[str, dict[str, Any]]:
    """The name and the knobs that ``text`` sets; ValueError with the offending word and the remedy."""
    name, _, rest = text.partition(":")
    if name not in choices:
        raise ValueError(nearest(name, choices, what=what))
    types = knobs(choices[name])
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{what} {text!r}: {part!r} should be key=value, as in {name}:key=value,key=value")
        if key not in types:
            known = ", ".join(types) or "none"
            raise ValueError(f"{what} {name!r} has no knob {key!r} (it has {known})")
        values[key] = _convert(value, types[key], f"{what} {name!r}: {key}")
    return name, values


def write(name: str, values: Mapping[str, Any]) -> str:
    """The text that ``parse`` reads back."""
    parts = (f"{key}={written(value)}" for key, value in values.items())
    return ":".join(filter(None, [name, ",".join(parts)]))


def written(value: Any) -> str:
    """Return a knob's value as it is written in a text."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def kind_of(kind: Any) -> str:
    """Return the type of a knob in words.

    >>> kind_of(float), kind_of(Literal["saga", "svrg"])
    ('float', 'saga or svrg')
    """
    return " or ".join(get_args(kind)) if get_origin(kind) is Literal else str(kind.__name__)


def _convert(value: str, kind: Any, where: str) -> Any:
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
