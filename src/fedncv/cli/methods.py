"""fedncv methods: the methods, their knobs and what they reveal."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import tyro

from fedncv import spec
from fedncv.cli.arguments import parse
from fedncv.methods import METHODS, SWITCHES, Entry
from fedncv.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Args:
    """The methods and switches by name, or all about one of them."""

    name: Annotated[str, tyro.conf.Positional] = ""
    """One method, or one switch as +average: its formulas, knobs, and what the server learns from a client."""


class Knob(NamedTuple):
    name: str
    kind: str
    default: str
    meaning: str


def main(argv: list[str]) -> int:
    args = parse(Args, argv, command="methods")
    if not args.name:
        show()
    elif args.name in METHODS:
        print("\n".join(about(args.name)))
    elif args.name.startswith("+") and args.name[1:] in SWITCHES:
        print("\n".join(about_switch(args.name[1:])))
    else:
        raise ValueError(spec.nearest(args.name, [*METHODS, *(f"+{name}" for name in SWITCHES)], what="method"))
    return 0


def knobs(config: Any) -> list[Knob]:
    """The knobs of a method's Config, with the docstring under each field; none where it has no Config."""
    if config is None:
        return []
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(tree, ast.ClassDef)
    defaults, types, found = config(), spec.knobs(config), []
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            name, kind = field.target.id, types[field.target.id]
            meaning = text.value.value if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) else ""
            found.append(Knob(name, _kind(kind), written(getattr(defaults, name)), " ".join(str(meaning).split())))
    return found


def _kind(kind: Any) -> str:
    return " or ".join(get_args(kind)) if get_origin(kind) is Literal else str(kind.__name__)


def written(value: Any) -> str:
    """As it is written in a method's name."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def formula(entry: Entry) -> str:
    """The docstring of the method's file: formula, reference, departures."""
    return _docstring(entry.make)


def _docstring(made_by: Callable[..., Method]) -> str:
    return (sys.modules[made_by.__module__].__doc__ or "").strip()


def keeps(entry: Entry) -> str:
    """What becomes of BatchNorm's running statistics."""
    rule = entry.make().buffers
    return {"averaged": "averaged with the model, or as the study says", "personal": "each client's own"}.get(
        rule if isinstance(rule, str) else "", "mixed by a rule of the method's own"
    )


def about(name: str) -> list[str]:
    """All that is known of one method."""
    entry = METHODS[name]
    lines = [f"{name}: {entry.summary} ({entry.reference})", "", formula(entry), *_knob_lines(entry.config)]
    lines += ["", "the server learns from a client:"]
    lines += [f"  {field}: {what}" for field, what in entry.make().reveals.items()] or ["  nothing"]
    return [*lines, "", f"running statistics: {keeps(entry)}"]


def about_switch(name: str) -> list[str]:
    """All that is known of one switch."""
    switch = SWITCHES[name]
    return [
        f"+{name}: {switch.summary} (as in fedavg+{name})",
        "",
        _docstring(switch.apply),
        *_knob_lines(switch.config),
    ]


def _knob_lines(config: Any) -> list[str]:
    lines = [f"  {knob.name} = {knob.default} ({knob.kind}): {knob.meaning}" for knob in knobs(config)]
    return ["", "knobs:", *(lines or ["  none"])]


def settings(config: Any) -> str:
    return ", ".join(f"{knob.name}={knob.default}" for knob in knobs(config))


def show() -> None:
    """A table on a terminal, a line each elsewhere."""
    rows = [(name, entry.summary, settings(entry.config), entry.reference) for name, entry in METHODS.items()]
    rows += [
        (f"+{name}", switch.summary, settings(switch.config), f"after a method: fedavg+{name}")
        for name, switch in SWITCHES.items()
    ]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table("method", "meaning", "knobs and defaults", "reference")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        print("fedncv methods NAME shows a method in full")
    else:
        for row in rows:
            print("\t".join(row))
