"""Parse ``name:key=value,key=value``, the text of a method, a partition or a schedule in a config or a command.

The knobs are the keyword-only parameters of a callable (a function or a keyword-only dataclass), so they
are defined once, where they are used.

>>> def dirichlet(labels, *, alpha: float = 0.1, min_samples: int = 10): ...
>>> parse("dirichlet:alpha=1", {"dirichlet": dirichlet}, what="partition")
('dirichlet', {'alpha': 1.0})
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints


def nearest(word: str, choices: Iterable[str], *, what: str) -> str:
    """Return the message for a typo: "unknown method 'fedavgg'; did you mean 'fedavg'? (there are …)"."""
    choices = list(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {what} {word!r}{hint} (there are {', '.join(choices)})"


def knobs(function: Callable[..., Any]) -> dict[str, Any]:
    """Return knob -> type, for every keyword-only parameter that a text can set."""
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    return {p.name: hints[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}


def parse(text: str, choices: Mapping[str, Callable[..., Any]], *, what: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the knobs that ``text`` sets; raise ValueError with the offending word and the remedy."""
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
    """Return the text that ``parse`` reads back."""
    parts = (f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items())
    return ":".join(filter(None, [name, ",".join(parts)]))


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
