"""Objects of a user's own: what a config calls them, and how a resumed run gets them again.

A config names an object ``custom:NAME#FINGERPRINT``. NAME is ``package.module:function`` for a function or class that
can be imported, so that every command finds it again. The fingerprint tells different objects apart.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fedncv.config import Own, RunConfig, code_marks, objects_wanted, own_functions, own_object
from fedncv.data import Dataset
from fedncv.fingerprint import fingerprint
from fedncv.imports import import_object, look_in
from fedncv.methods.base import Method
from fedncv.metrics import Function
from fedncv.optimizers import OPTIMIZERS, SGD, Optimizer
from fedncv.tasks import Task

KINDS = {"method": Method, "data": Dataset, "model": None, "task": Task, "optimizer": Optimizer}
"""Setting -> the type of its objects; None: a function that makes one (input shape, outputs -> module)."""


class Objects(NamedTuple):
    """What was passed for some of ``KINDS``: the texts for the config, and the values of those that are not names."""

    texts: dict[str, str]
    values: dict[str, Any]


def named(given: dict[str, Any], *, name: str | None = None) -> Objects:
    """Return the texts and values of what was passed; ``name`` names the method.

    A method, dataset, task or optimizer may also be a function without arguments that returns one. Raise ValueError if
    a value has the wrong type, or if ``name`` is given for a method that has a name.
    """
    texts, values = {}, {}
    for kind, thing in given.items():
        if isinstance(thing, str):
            texts[kind] = thing
        elif thing is not None:
            values[kind] = made(kind, thing)
            texts[kind] = str(Own(_name(kind, thing), fingerprint(values[kind])))
    if name is not None:
        own = own_object(texts.get("method", ""))
        if own is None:
            raise ValueError(f"name={name!r} names a method of your own; {texts.get('method', 'fedavg')} has a name")
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or own._replace(name=name).is_path:
            raise ValueError(f"name must be one line of text, not {name!r}, and not package.module:function")
        texts["method"] = str(own._replace(name=name))
    return Objects(texts, values)


def made(kind: str, thing: Any) -> Any:
    """Return the object, made by calling ``thing`` if that is a function that returns one."""
    wanted = KINDS[kind]
    if wanted is None:
        if not callable(thing):
            raise ValueError(
                f"{kind} must be a name, or a function that maps (input shape, outputs) to a module, not {_said(thing)}"
            )
        return thing
    if isinstance(thing, wanted):
        return thing
    needed = required(thing) if callable(thing) else []
    value = thing() if callable(thing) and not needed else thing
    if isinstance(value, wanted):
        return value
    found = f"a function that returned {_said(value)}" if callable(thing) else _said(thing)
    if needed:
        found = f"{getattr(thing, '__name__', _said(thing))}, which needs arguments ({', '.join(needed)})"
    raise ValueError(
        f"{kind} must be a name, a fedncv.{wanted.__name__}, or a function without arguments that returns one, "
        f"not {found}{_instead(kind, thing)}"
    )


def _instead(kind: str, thing: Any) -> str:
    """Return what to write instead of a thing that people know from elsewhere; empty if there is no such thing."""
    if kind == "data" and not callable(thing):
        return "; make one with fedncv.data.from_arrays(x, y)"
    if kind == "task" and callable(thing):
        return "; write fedncv.Task(loss=..., score=..., score_name=...)"
    if kind == "optimizer":
        name = (thing if isinstance(thing, type) else type(thing)).__name__.lower()
        return f'; write optimizer="{name}"' if name in (SGD, *OPTIMIZERS) else ""
    return ""


def required(function: Any) -> list[str]:
    """Return the arguments without a default; none if Python cannot tell, as for some built-in functions."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.kind not in kinds and p.default is p.empty]


def again(folder: Path, config: RunConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Return the objects to resume the run in ``folder`` with: those given, and those that can be imported.

    Raise ValueError if some are missing, or if one differs from the object that the run was started with.
    """
    look_in(config.code_dir)
    values: dict[str, Any] = {"metrics": metrics_again(folder, config, given.get("metrics"))}
    missing: dict[str, list[str]] = {}
    for kind in KINDS:
        text, thing = getattr(config, kind), given.get(kind)
        own = own_object(text)
        if own is None:
            if thing is not None and not isinstance(thing, str):
                raise ValueError(f"{folder} was started with {kind} {text!r}; leave out {kind}=")
            continue
        if thing is None and own.is_path:
            with contextlib.suppress(ValueError):
                thing = import_object(own.name, what=kind)
        if thing is None:
            missing[kind] = [text]
            continue
        values[kind] = made(kind, thing)
        found = fingerprint(values[kind]) if own.fingerprint else ""
        if found != own.fingerprint:
            line = f'{kind} = "{own._replace(fingerprint=found)}"'
            raise ValueError(_another(folder, kind, own, f"{_short(kind, thing)} #{found}", line))
    if metrics := [text for text in config.metrics if own_object(text) and text not in values["metrics"]]:
        missing["metrics"] = metrics
    if missing:
        raise ValueError(objects_wanted(missing))
    return values


def _another(folder: Path, kind: str, own: Own, now: str, line: str) -> str:
    return (
        f"{folder} was started with another {kind}: {own.short} #{own.fingerprint}, now {now}; pass the object of the "
        f"original call. If it is the same (a newer Python, a list that grew), write {line} into its config.toml"
    )


# ---- code that a config names ------------------------------------------------------------------------------

_marks: dict[str, tuple[Any, str]] = {}


def code_of(config: RunConfig, *, custom: Iterable[str] = ()) -> str:
    """Return ``RunConfig.code``: the user's own functions that the config names, with fingerprints of their code.

    Settings in ``custom`` are objects. What cannot be imported is left out: checking the config says why.
    """
    look_in(config.code_dir)
    names = {name for setting, name in own_functions(config).items() if setting not in custom}
    return " ".join(f"{name}#{mark}" for name in sorted(names) if (mark := _mark(name)))


def check_code(folder: Path, config: RunConfig) -> None:
    """Raise ValueError if the user's own code is not the code that the run in ``folder`` was started with."""
    if changed := code_changes(config):
        settings = {name: setting for setting, name in own_functions(config).items()}
        words = [f"{settings[name]} {name} #{before}, now #{now}" for name, (before, now) in changed.items()]
        files = dict.fromkeys(_file(name) for name in changed)
        marks = code_marks(config) | {name: now for name, (_, now) in changed.items()}
        line = " ".join(f"{name}#{mark}" for name, mark in sorted(marks.items()) if mark)
        raise ValueError(
            f"{folder} was started with other code ({'; '.join(words)}): {' or '.join(files)} was edited, or Python is "
            f"another version; restore it, or start the run anew. If it does the same as before, write "
            f'code = "{line}" into its config.toml'
        )


def code_changes(config: RunConfig) -> dict[str, tuple[str, str]]:
    """Return the functions whose code differs from that in the config -> both fingerprints; unknown ones are equal."""
    look_in(config.code_dir)
    pairs = {name: (before, _mark(name)) for name, before in code_marks(config).items() if before}
    return {name: (before, now) for name, (before, now) in pairs.items() if now not in ("", before)}


def _mark(name: str) -> str:
    """Return the fingerprint of what ``package.module:name`` is; empty if it cannot be imported.

    It is taken once in a process: a function may change global values that it names, as a cache does.
    """
    try:
        found = import_object(name, what="code")
    except ValueError:
        return ""
    if name not in _marks or _marks[name][0] is not found:
        _marks[name] = (found, fingerprint(found))
    return _marks[name][1]


def _file(name: str) -> str:
    module = name.partition(":")[0]
    return getattr(sys.modules.get(module), "__file__", None) or module


# ---- metrics ---------------------------------------------------------------------------------------------


def named_metrics(given: str | Function | Iterable[str | Function]) -> tuple[tuple[str, ...], dict[str, Function]]:
    """Return the texts of metrics for the config, and text -> function of those that are functions."""
    texts, functions = [], {}
    if not isinstance(given, Iterable) and not callable(given):
        raise ValueError(f"metrics are a list of names and functions of (outputs, targets), not {_said(given)}")
    for each in [given] if isinstance(given, str) or callable(given) else given:
        if not isinstance(each, str) and not callable(each):
            raise ValueError(f"metrics are names and functions of (outputs, targets), not {_said(each)}")
        text = each if isinstance(each, str) else str(Own(_name("metric", each), fingerprint(each)))
        texts.append(text)
        if not isinstance(each, str):
            functions[text] = each
    return tuple(texts), functions


def metrics_again(folder: Path, config: RunConfig, given: Iterable[Any] | None) -> dict[str, Function]:
    """Return text -> function of the config's own metrics: those given, by name, and those that can be imported.

    Raise ValueError if one differs from the function that the run was started with: it would go into one column.
    """
    known = {_short("metric", each): each for each in given or () if callable(each)}
    functions = {}
    for text in config.metrics:
        own = own_object(text)
        if own is None:
            continue
        found = known.get(own.short)
        if found is None and own.is_path:
            with contextlib.suppress(ValueError):
                found = import_object(own.name, what="metric")
        if found is None:
            continue
        functions[text] = found
        mark = fingerprint(found) if own.fingerprint else ""
        if mark != own.fingerprint:
            line = f'"{own._replace(fingerprint=mark)}" among the metrics'
            raise ValueError(_another(folder, "metric", own, f"{own.short} #{mark}", line))
    return functions


def _name(kind: str, thing: Any) -> str:
    """Return the name of an object: its own, that of the function it is, or of the one that made its functions."""
    if isinstance(thing, Dataset):
        return thing.name or kind
    if isinstance(thing, tuple):
        return next(filter(None, map(_maker, thing)), kind)
    if isinstance(thing, functools.partial):
        return Own(_name(kind, thing.func), "").short
    name = getattr(thing, "__name__", type(thing).__name__)
    module = getattr(thing, "__module__", None)
    if module not in (None, "__main__") and getattr(sys.modules.get(module), name, None) is thing:
        return f"{module}:{name}"
    return name if name.isidentifier() else kind


def _short(kind: str, thing: Any) -> str:
    return Own(_name(kind, thing), "").short


def _maker(part: Any) -> str:
    """Return the outermost function in which a user's function was written; empty for those of fedncv and lambdas.

    ``clipped.<locals>.direction`` -> clipped
    """
    if not callable(part) or (getattr(part, "__module__", None) or "").partition(".")[0] == "fedncv":
        return ""
    head: str = getattr(part, "__qualname__", "").partition(".")[0]
    return head if head.isidentifier() else ""


def _said(thing: Any) -> str:
    if callable(thing) or not isinstance(thing, int | float | str | type(None)):  # others may print a whole array
        return f"{type(thing).__name__}"
    return f"{thing!r:.60} ({type(thing).__name__})"
