"""Parse ``name:key=value,key=value``, the text of a method, a partition or a schedule in a config or a command.

The knobs are the keyword-only parameters of a callable (a function or a keyword-only dataclass), so they
are defined once, where they are used.

>>> def dirichlet(labels, *, alpha: float = 0.1, min_samples: int = 10): ...
>>> parse("dirichlet:alpha=1", {"dirichlet": dirichlet}, what="partition")
('dirichlet', {'alpha': 1.0})

A knob may be a part with knobs of its own: a field of type ``Config | None``, where Config is a frozen dataclass.
``part=off`` leaves it out, ``part=on`` is its default, ``part=0.9`` sets its first knob, ``part.knob=2`` any of them.

A value that holds a comma or a plus sign is put in double quotes, with \\" and \\\\ for a quote and a backslash in it:
``folder:path="/home/me/cats, dogs"``.
"""

import difflib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

OWN = re.compile(r"([^\W\d][\w.]*:[^\W\d]\w*)(?::(.*))?", re.DOTALL)  # package.module:name, and knobs
QUOTED = re.compile(r'(?<==)"(?:[^"\\]|\\.)*"', re.DOTALL)  # a value in quotes


def nearest(word: str, choices: Iterable[str], *, what: str) -> str:
    """Return the message for a typo: "unknown method 'fedavgg'; did you mean 'fedavg'? (there are …)"."""
    choices = list(choices)
    return f"unknown {what} {word!r}{_hint(word, choices)} (there are {', '.join(choices)})"


def _hint(word: str, choices: Iterable[str]) -> str:
    """Return the question for the choice that is like the word, or begins with it; empty if there is none."""
    choices = list(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    close += [each for each in choices if len(word) > 1 and each.startswith(word)]
    return f"; did you mean {close[0]!r}?" if close else ""


def knobs(function: Callable[..., Any]) -> dict[str, Any]:
    """Return knob -> type, for every keyword-only parameter that a text can set; without a type, its default's."""
    hints = get_type_hints(function)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return {
        p.name: hints.get(p.name, str if p.default is p.empty or p.default is None else type(p.default))
        for p in parameters
    }


def split(text: str, separator: str = ",") -> list[str]:
    """Split ``text`` at a separator (a regular expression) that is not in quotes.

    >>> split('path="a,b",size=3')
    ['path="a,b"', 'size=3']
    """
    masked = QUOTED.sub(lambda found: "_" * len(found[0]), text)
    cuts = [found.span() for found in re.finditer(separator, masked)]
    starts, ends = [0, *(end for _, end in cuts)], [*(start for start, _ in cuts), len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


def part_of(kind: Any) -> Any:
    """Return the Config of a knob that is a part, and None for every other knob."""
    kinds = [each for each in get_args(kind) if is_dataclass(each)] if isinstance(kind, UnionType) else []
    return kinds[0] if kinds else None


def parse(text: str, choices: Mapping[str, Callable[..., Any]], *, what: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the knobs that ``text`` sets; raise ValueError with the offending word and the remedy."""
    name, _, rest = text.partition(":")
    if name not in choices:
        raise ValueError(nearest(name, choices, what=what))
    return name, values_of(choices[name], name, rest, what=what)


def values_of(function: Callable[..., Any], name: str, rest: str, *, what: str) -> dict[str, Any]:
    """Return the knobs that ``rest`` sets, as in "key=value,key=value", for the callable called ``name``."""
    text = f"{name}:{rest}" if rest else name
    types = knobs(function)
    values: dict[str, Any] = {}
    parts: dict[str, dict[str, str]] = {}  # part -> its words, "" for the part itself
    key = ""
    for word in filter(None, split(rest)):
        before = key
        key, equals, value = word.partition("=")
        if not equals:
            quotes = f'; put a value with a comma in quotes: {before}="..."' if before else ""
            if not before and "path" in types:
                quotes = f"; did you mean {name}:path={rest}?"
            raise ValueError(f"{what} {text!r}: {word!r} should be key=value, as in {name}:key=value,key=value{quotes}")
        value = _unquoted(value, f"{what} {text!r}: {key}")
        knob, dot, inner = key.partition(".")
        if knob not in types or (dot and not inner):
            known = ", ".join(types) or "none"
            raise ValueError(f"{what} {name!r} has no knob {key!r} (it has {known}){_hint(knob, types)}")
        if knob in values or inner in parts.get(knob, {}):
            raise ValueError(f"{what} {text!r} sets {key} twice; leave one out")
        if part_of(types[knob]) is not None:
            parts.setdefault(knob, {})[inner] = value
        elif inner:
            raise ValueError(f"{what} {name!r}: {knob} has no knobs of its own; write {knob}={value}")
        else:
            values[key] = _convert(value, types[key], f"{what} {name!r}: {key}")
    parameters = inspect.signature(function).parameters
    for knob, words in parts.items():
        values[knob] = _part(parameters[knob].default, part_of(types[knob]), words, f"{what} {name!r}: {knob}")
    for knob in types:
        if knob not in values and parameters[knob].default is inspect.Parameter.empty:
            raise ValueError(f"{what} {text!r} does not give {knob}; write {name}:{knob}=...")
    return values


def _unquoted(value: str, where: str) -> str:
    if not value.startswith('"'):
        return value
    if not QUOTED.fullmatch("=" + value, 1):
        raise ValueError(f'{where}: the value begins with a quote and must end with one; inside, write \\" for a quote')
    return re.sub(r"\\(.)", r"\1", value[1:-1], flags=re.DOTALL)


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
    """Return a knob's value as it is written in a text: in quotes if it could be read otherwise.

    >>> written(0.1), written(True), written("cats, dogs")
    ('0.1', 'true', '"cats, dogs"')
    """
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if isinstance(value, int | float) or not re.search(r'[,+"\s]', text) else quoted(text)


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def short_name(text: str) -> str:
    """Return a name for people: of the user's own object the object's, of files the file's, then the knobs.

    >>> short_name("my.module:patients:year=2020"), short_name("folder:path=/home/me/birds,size=32")
    ('patients, year 2020', 'birds, size 32')
    >>> short_name("my.module:mine:mu=0.1+prior")
    'mine, mu 0.1 + prior'
    """
    return " + ".join(map(_short_part, split(text, r"\+(?=[a-z])")))


def _short_part(text: str) -> str:
    found = OWN.fullmatch(text)
    name, rest = (found[1].rpartition(":")[2], found[2] or "") if found else text.partition(":")[::2]
    pairs = [word.partition("=")[::2] for word in filter(None, split(rest))]
    given = {key: _unquoted(value, text) for key, value in pairs}
    if "path" in given and not found:
        path = given.pop("path").replace("\\", "/").rstrip("/")
        name = path.rpartition("/")[2] or name
    return ", ".join([name, *(f"{key} {value}".strip() for key, value in given.items())])


def without_module(text: str) -> str:
    """Return ``package.module:name:knob=value`` without the module, files by ``short_name``, other texts unchanged."""
    first = split(text, r"\+(?=[a-z])")[0]
    if OWN.fullmatch(first):
        return text.partition(":")[2]
    return short_name(text) if re.match(r"\w+:(.*,)?path=", text) else text


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
    if Path in (kind, *choices) and not value:
        raise ValueError(f"{where} is empty; give a path")
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


def expanded(path: Path | str) -> Path:
    """Return the path with a home directory in place of ``~``. Raise ValueError if it cannot be a path.

    >>> expanded("~nosuchuser/x")
    Traceback (most recent call last):
        ...
    ValueError: the path '~nosuchuser/x' names the home of a user who is not on this machine; write it in full
    """
    if "\0" in str(path):
        raise ValueError(f"the path {str(path)!r} holds a null character; leave it out")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"the path {str(path)!r} names the home of a user who is not on this machine; write it in full"
        ) from None


def absolute(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs with absolute paths, so that they mean the same in every folder."""
    return {
        key: Path(os.path.abspath(expanded(value))) if isinstance(value, Path) else value
        for key, value in values.items()
    }


def is_plain(kind: Any) -> bool:
    """Return whether a text can set a knob of this type."""
    if kind in (str, int, float, bool, Path, type(None)) or get_origin(kind) is Literal:
        return True
    return get_origin(kind) in (Union, UnionType) and all(map(is_plain, get_args(kind)))
