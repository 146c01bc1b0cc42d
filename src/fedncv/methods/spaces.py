"""The space of a method as it is named, with its switches and parts, and the text of the method with values from it.

Knobs that the text sets stay as they are. A knob of a part or of a switch is called ``part.knob``: ``prior.tau`` of
``fedncv`` and of ``scaffold+prior`` are one knob, and tuning draws the same values for both.
"""

from collections.abc import Mapping
from typing import Any

from fedncv.methods.registry import METHODS
from fedncv.methods.space import PLAIN, RATE, SETTINGS, Range
from fedncv.methods.switches import SWITCHES
from fedncv.spec import knobs, split, written


def space_of(text: str) -> dict[str, Range]:
    """Return knob -> range, the learning rate first: the method's own space and those of its parts and switches.

    >>> list(space_of("fedprox+prior")), list(space_of("fedprox:mu=0.1")), list(space_of("local"))
    (['lr', 'mu', 'prior.tau'], ['lr', 'weight_decay'], ['lr', 'weight_decay'])
    """
    first, *switches = _parts(text)
    name, _, rest = first.partition(":")
    given = {word.partition("=")[0]: word.partition("=")[2] for word in filter(None, split(rest))}
    found: dict[str, Range] = {}
    if name in METHODS:
        entry = METHODS[name]
        found |= {knob: over for knob, over in entry.space.items() if knob not in given}
        for part in knobs(entry.config) if entry.chain and entry.config else ():
            if given.get(part) != "off":
                fixed = {key.partition(".")[2] for key in given if key.startswith(f"{part}.")}
                fixed |= {next(iter(knobs(SWITCHES[part].config)), "")} if given.get(part, "on") != "on" else set()
                found |= _of_switch(part, fixed)
    for switch in switches:
        part, _, rest = switch.partition(":")
        found |= _of_switch(part, {word.partition("=")[0] for word in split(rest)})
    return {"lr": RATE} | (found or dict(PLAIN))


def _of_switch(name: str, fixed: set[str]) -> dict[str, Range]:
    return {f"{name}.{knob}": over for knob, over in SWITCHES[name].space.items() if knob not in fixed}


def with_values(text: str, values: Mapping[str, Any]) -> str:
    """Return the method's text with these knobs; settings of the run, such as lr, are not part of it.

    >>> with_values("scaffold:option=I+prior", {"lr": 0.1, "server_lr": 0.7, "prior.tau": 0.5})
    'scaffold:option=I,server_lr=0.7+prior:tau=0.5'
    >>> with_values("fedncv:prior=off", {"momentum.beta": 0.7})
    'fedncv:prior=off,momentum.beta=0.7'
    """
    first, *switches = _parts(text)
    named = {switch.partition(":")[0] for switch in switches}
    own = {
        knob: value for knob, value in values.items() if knob not in SETTINGS and knob.partition(".")[0] not in named
    }
    words = [_with(first, own)]
    for switch in switches:
        name = switch.partition(":")[0]
        words.append(_with(switch, {k.partition(".")[2]: v for k, v in values.items() if k.partition(".")[0] == name}))
    return "+".join(words)


def _with(part: str, values: Mapping[str, Any]) -> str:
    more = ",".join(f"{knob}={written(value)}" for knob, value in values.items())
    return part if not more else f"{part}{',' if ':' in part else ':'}{more}"


def _parts(text: str) -> list[str]:
    return [part.strip() for part in split(text, r"\+(?!\d)")]
