"""fedncv methods: list the methods, their knobs, and what the server learns from a client."""

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from fedncv import catalogue, spec
from fedncv.catalogue import About
from fedncv.cli.arguments import parse

FORMS = {
    "sums": "weighted sums of the clients' replies, never a single reply",
    "each reply": "each client's reply",
}


@dataclass(frozen=True, kw_only=True)
class Args:
    """List the methods and switches, or describe one of them."""

    name: Annotated[str, tyro.conf.Positional] = ""
    """Method to describe, or switch such as +average: formulas, knobs, and what the server learns from a client."""


def main(argv: list[str]) -> int:
    name = parse(Args, argv, command="methods").name
    methods, switches = catalogue.methods(), catalogue.switches()
    if not name:
        show()
    elif name in methods:
        print("\n".join(about(methods[name])))
    elif name.startswith("+") and name[1:] in switches:
        print("\n".join(about_switch(switches[name[1:]])))
    elif "+" in name[1:] or ":" in name:
        base, *others = name.partition(":")[0].split("+")
        words = [base, *(f"+{other}" for other in others)]
        raise ValueError(f"{name!r} is a chain; describe one part at a time: fedncv methods {words[-1]}")
    else:
        raise ValueError(spec.nearest(name, [*methods, *(f"+{switch}" for switch in switches)], what="method"))
    return 0


def about(method: About) -> list[str]:
    """Return the description of one method, line by line."""
    lines = [f"{method.name}: {method.summary} ({method.reference})", "", method.formula, *_knob_lines(method)]
    lines += ["", "the server learns from a client:"]
    lines += [f"  {field}: {what}" for field, what in method.reveals.items()] or ["  nothing"]
    if method.form:
        lines += ["", f"the server needs: {FORMS[method.form]}"]
    return [*lines, "", f"running statistics: {method.buffers}", *_optimizer_lines(method)]


def about_switch(switch: About) -> list[str]:
    """Return the description of one switch, line by line."""
    name = switch.name
    head = f"+{name}: {switch.summary} (as in fedavg+{name})"
    return [head, "", switch.formula, *_knob_lines(switch), *_optimizer_lines(switch)]


def _knob_lines(method: About) -> list[str]:
    lines = [f"  {knob.name} = {knob.default} ({knob.kind}): {knob.meaning}" for knob in method.knobs]
    return ["", "knobs:", *(lines or ["  none"])]


def _optimizer_lines(method: About) -> list[str]:
    return ["", f"local optimizer: only sgd: {method.needs_sgd}" if method.needs_sgd else "local optimizer: any"]


def settings(method: About) -> str:
    return ", ".join(f"{knob.name}={knob.default}" for knob in method.knobs)


def show() -> None:
    """Print a table on a terminal, one line per method elsewhere."""
    rows = [
        (each.name, each.summary, settings(each), each.form, each.reference) for each in catalogue.methods().values()
    ]
    rows += [
        (f"+{each.name}", each.summary, settings(each), each.form, f"after a method: fedavg+{each.name}")
        for each in catalogue.switches().values()
    ]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table("method", "meaning", "knobs and defaults", "server needs", "reference")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        print("fedncv methods NAME describes one method in full")
    else:
        for row in rows:
            print("\t".join(row))
