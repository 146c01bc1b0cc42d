"""Find methods by name. Each method is one file; switches can be added to its name."""

import inspect
from typing import Any, NamedTuple

from fedncv.imports import Own, make_own, own, own_values
from fedncv.methods import older
from fedncv.methods.base import Method
from fedncv.methods.registry import METHODS, Entry
from fedncv.methods.switches import SWITCHES, chain
from fedncv.spec import knobs, parse, split, write


def _no_knobs() -> None: ...


def find_method(text: str) -> Method:
    """Return the method that ``name``, ``name:knob=value,…`` or ``name+switch+switch:knob=value`` names.

    ``name`` is one of METHODS, or ``package.module:name``: a Method of your own, or a function that returns one and
    whose keyword-only parameters are its knobs, as in ``my.module:mine:mu=0.1+prior``.

    >>> find_method("fedprox:mu=0.1+prior").reveals
    {'delta_P': "the client's model update"}
    >>> find_method("fedncv:momentum=0.9,prior=off+memory").form
    'each reply'
    """
    base, switches = _parts(text)
    method = make_own(base.own, Method, what="method") if base.own else _built_in(base)
    for name in switches:
        if name in method.switches:
            raise ValueError(f"{text!r}: {base.name} already has {name}; {_remedy(text, base.name, name)}")
    if not base.own and METHODS[base.name].chain and switches:  # its own switches and the added ones in one order
        method, switches = METHODS[METHODS[base.name].chain].make(), vars(base.config) | switches
    try:
        return chain(method, **switches)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None


def is_own(text: str) -> bool:
    """Return whether the text names a method of the user's own, with or without switches."""
    return _parts(text)[0].own is not None


def needs_each_reply(text: str) -> str:
    """Return the part of a method, itself or a switch, with which its server needs each reply; "" if none does.

    >>> needs_each_reply("fedncv"), needs_each_reply("fedavg+prior+ht"), needs_each_reply("scaffold")
    ('drift', 'ht', '')
    """
    base, switches = _parts(text)
    if not base.own and METHODS[base.name].chain:
        method, switches = METHODS[METHODS[base.name].chain].make(), vars(base.config) | switches
    else:
        method = make_own(base.own, Method, what="method") if base.own else _built_in(base)
    if method.form != "sums":
        return base.name
    given = {name: config for name, config in switches.items() if config is not None}
    for name in SWITCHES:  # in the order in which they are applied
        if name in given and (method := SWITCHES[name].apply(method, given[name])).form != "sums":
            return name
    return ""


def in_full(text: str) -> str:
    """Return the method's text with every knob written out, so that it does not depend on later defaults.

    >>> in_full("fedavg+prior:tau=2")
    'fedavg:server_lr=1.0+prior:tau=2.0,epsilon=1.0'
    """
    base, switches = _parts(text)
    values = _own_in_full(base.own) if base.own else {} if base.config is None else vars(base.config)
    return "+".join([write(base.name, values), *(write(name, vars(config)) for name, config in switches.items())])


class _Base(NamedTuple):
    name: str
    config: Any  # of a method of METHODS, None if it has no knobs
    own: Own | None  # the user's own method


def _built_in(base: _Base) -> Method:
    make = METHODS[base.name].make
    return make() if base.config is None else make(base.config)


def _own_in_full(base: Own) -> dict[str, Any]:
    """Return all knobs of the user's method. A knob that is None by default has no text, so it is left out."""
    found, values = own_values(base, what="method")
    if not callable(found):
        return {}
    parameters = inspect.signature(found).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
    return {name: value for name, value in (defaults | values).items() if value is not None}


def _parts(text: str) -> tuple[_Base, dict[str, Any]]:
    """Return the method, and name and config of its switches in the order in which they are applied."""
    first, *others = (part.strip() for part in split(text, r"\+(?!\d)"))  # 1e+3 is a number
    base, known = _base(first), {name: switch.config for name, switch in SWITCHES.items()}
    given: dict[str, Any] = {}
    for each in others:
        name, values = parse(each, known, what="switch")
        if name in given:
            raise ValueError(f"{text!r} names {name} twice; leave one out")
        given[name] = _made(known[name], values, f"switch {name!r}")
    return base, {name: given[name] for name in SWITCHES if name in given}


def _base(text: str) -> _Base:
    older.refuse(text)
    theirs = own(text)
    if theirs and text.partition(":")[0] not in METHODS:
        return _Base(theirs.name, None, theirs)
    name, values = parse(text, {name: entry.config or _no_knobs for name, entry in METHODS.items()}, what="method")
    config = METHODS[name].config
    return _Base(name, None if config is None else _made(config, values, f"method {name!r}"), None)


def _made(config: Any, values: dict[str, Any], where: str) -> Any:
    try:
        return config(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _remedy(text: str, base: str, switch: str) -> str:
    """Return a chain that works, with the knobs that ``text`` gives the switch."""
    config = METHODS[base].config if base in METHODS else None
    if config is None or switch not in knobs(config):
        return f"leave +{switch} out, or use fedavg+{switch}"
    given = next(part for part in text.split("+") if part.partition(":")[0] == switch).partition(":")[2]
    words = [f"{switch}.{word}" for word in given.split(",") if word] or [f"{switch}=on"]
    return f"leave +{switch} out, or set it as in {base}:{','.join(words)}"


__all__ = ["METHODS", "SWITCHES", "Entry", "chain", "find_method", "in_full", "is_own", "needs_each_reply"]
