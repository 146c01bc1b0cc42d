"""Find methods by name. Each method is one file; switches can be added to its name."""

import re
from typing import Any

from fedncv.methods import older
from fedncv.methods.base import Method
from fedncv.methods.registry import METHODS, Entry
from fedncv.methods.switches import SWITCHES, chain
from fedncv.spec import knobs, parse, write


def _no_knobs() -> None: ...


def find_method(text: str) -> Method:
    """Return the method that ``name``, ``name:knob=value,…`` or ``name+switch+switch:knob=value`` names.

    >>> find_method("fedprox:mu=0.1+prior").reveals
    {'delta_P': "the client's model update"}
    >>> find_method("fedncv:momentum=0.9,prior=off+memory").form
    'each reply'
    """
    (base, config), *switches = _parts(text)
    entry, configs = METHODS[base], dict(switches)
    method = entry.make() if config is None else entry.make(config)
    for name in configs:
        if name in method.switches:
            raise ValueError(f"{text!r}: {base} already has {name}; {_remedy(text, base, name)}")
    if entry.chain and configs:  # apply its own switches and the added ones in one order
        method, configs = METHODS[entry.chain].make(), vars(config) | configs
    try:
        return chain(method, **configs)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None


def in_full(text: str) -> str:
    """Return the method's text with every knob written out, so that it does not depend on later defaults.

    >>> in_full("fedavg+prior:tau=2")
    'fedavg:server_lr=1.0+prior:tau=2.0,epsilon=1.0'
    """
    return "+".join(write(name, {} if config is None else vars(config)) for name, config in _parts(text))


def _parts(text: str) -> list[tuple[str, Any]]:
    """Return name and config of the method, then of its switches in the order in which they are applied."""
    first, *others = (part.strip() for part in re.split(r"\+(?!\d)", text))  # 1e+3 is a number
    older.refuse(first)
    base, knobs = parse(first, {name: entry.config or _no_knobs for name, entry in METHODS.items()}, what="method")
    config = METHODS[base].config
    known = {name: switch.config for name, switch in SWITCHES.items()}
    given: dict[str, Any] = {}
    for each in others:
        name, values = parse(each, known, what="switch")
        if name in given:
            raise ValueError(f"{text!r} names {name} twice; leave one out")
        given[name] = _made(known[name], values, f"switch {name!r}")
    switches = [(name, given[name]) for name in SWITCHES if name in given]
    return [(base, None if config is None else _made(config, knobs, f"method {base!r}")), *switches]


def _made(config: Any, values: dict[str, Any], where: str) -> Any:
    try:
        return config(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _remedy(text: str, base: str, switch: str) -> str:
    """Return a chain that works, with the knobs that ``text`` gives the switch."""
    config = METHODS[base].config
    if config is None or switch not in knobs(config):
        return f"leave +{switch} out, or use fedavg+{switch}"
    given = next(part for part in text.split("+") if part.partition(":")[0] == switch).partition(":")[2]
    words = [f"{switch}.{word}" for word in given.split(",") if word] or [f"{switch}=on"]
    return f"leave +{switch} out, or set it as in {base}:{','.join(words)}"


__all__ = ["METHODS", "SWITCHES", "Entry", "chain", "find_method", "in_full"]
