"""Command lines drawn at random from the commands' own options, and a place to try them.

A command's options are the fields of the dataclass that its module defines, so that a new option is drawn too. A new
action of a command with ACTIONS is found as well. Texts with knobs (methods, partitions, datasets) are put together
from the names and knobs that the code knows, and from values at which programs break.
"""

import dataclasses
import importlib
import types
import typing
from pathlib import Path

import tyro

from fedncv import spec
from fedncv.cli import COMMANDS
from fedncv.data import DATASETS, PARTITIONS, STREAMS
from fedncv.data.load import FORMS
from fedncv.methods import METHODS, SWITCHES
from fedncv.metrics import CLASSIFICATION, REGRESSION
from fedncv.models import MODELS
from fedncv.optimizers import OPTIMIZERS
from fedncv.schedule import SCHEDULES
from fedncv.tasks import TASKS

WHOLE = ["0", "1", "2", "3", "5", "10", "-1", "100", "2147483648", "9223372036854775807", "9223372036854775808"]
WHOLE += ["18446744073709551615", "18446744073709551616", "-9223372036854775809", "1" + "0" * 30, "9" * 5000, "1e3"]
WHOLE += ["", " ", "٣", "0x10", "1_000", "nan", "many", "+2", "-0"]
NUMBERS = ["0", "-0.0", "0.1", "0.5", "1", "2", "-1", "nan", "inf", "-inf", "1e308", "1e-320", "1e400", "-1e-9", "0,5"]
NUMBERS += ["", "9" * 400, "1e-9", "100", "3"]
# No absolute path, and none of a user: a command line may write to it.
WORDS = [
    "", " ", ".", "..", "~", "~nosuchuser/x", "..:x", ":", "::", "x:", ":x", "a.b:c", "x:y:z", "=", "+", "-",
    "--",
]  # fmt: skip
WORDS += [
    "a\0b",
    "a\nb",
    "é" * 300,
    "\udcff",
    "x" * 5000,
    "table.csv/x",
    "*",
    "[",
    "%s",
    "{}",
    '"',
    '""',
    "'",
]
WORDS += [
    "nan",
    "custom:x#abcdef",
    "custom",
    "math:sqrt",
    "math:pi",
    "json",
    "fedavg",
    "digits",
    "1",
    "-1",
    "a,b",
    "a=b",
]
FILES = ["run", "runs", "study", "pictures", "table.csv", "config.toml", "broken.toml", "deep.toml", "empty", "nowhere"]
FILES += ["run/metrics.jsonl", "federation", "federation/clients/0", "rows.jsonl", "link", "words"]


def no_knobs(): ...


def value(rng, kind):
    """A value of a knob, as text."""
    if kind is bool:
        return rng.choice(["true", "false", "yes", ""])
    if typing.get_origin(kind) is typing.Literal:
        return rng.choice([*typing.get_args(kind), "other", ""])
    if spec.part_of(kind) is not None:
        return rng.choice(["on", "off", *NUMBERS])
    if typing.get_args(kind):
        return value(rng, rng.choice(typing.get_args(kind)))
    if kind is int:
        return rng.choice(WHOLE[:17] if rng.random() < 0.8 else WHOLE)
    if kind is float:
        return rng.choice(NUMBERS)
    if kind is Path:
        return rng.choice([*FILES, *WORDS])
    return rng.choice(["label", "x", "a", *WORDS])


def quoted(text):
    return spec.quoted(text) if set(text) & set(',+" ') else text


def with_knobs(rng, choices):
    """``name:knob=value,...`` of one of these callables, most often right in form."""
    name = rng.choice(list(choices))
    knobs = spec.knobs(choices[name])
    some = rng.sample(list(knobs), rng.randint(0, min(2, len(knobs))))
    some = list(dict.fromkeys([*(k for k in knobs if _is_needed(choices[name], k)), *some]))
    text = ",".join(f"{knob}={quoted(value(rng, knobs[knob]))}" for knob in some)
    return f"{name}:{text}" if text else name


def _is_needed(function, knob):
    import inspect

    return inspect.signature(function).parameters[knob].default is inspect.Parameter.empty


def method(rng):
    words = [with_knobs(rng, {name: entry.config or no_knobs for name, entry in METHODS.items()})]
    switches = {name: entry.config or no_knobs for name, entry in SWITCHES.items()}
    words += [with_knobs(rng, switches) for _ in range(rng.choice([0, 0, 1, 2]))]
    return "+".join(words)


def data(rng):
    plain = {name: entry.make or (lambda: None) for name, entry in DATASETS.items() if not entry.files}
    own = ["folder:path=pictures", "folder:path=pictures,size=20", "table:path=table.csv,y=label"]
    text = rng.choice(
        [with_knobs(rng, FORMS), with_knobs(rng, plain), rng.choice(own), "digits", rng.choice(list(DATASETS))]
    )
    return text


GRAMMARS = {
    "method": method, "methods": method, "what": method, "reference": method, "data": data, "datasets": data,
    "partition": lambda rng: with_knobs(rng, PARTITIONS), "stream": lambda rng: with_knobs(rng, STREAMS),
    "optimizer": lambda rng: with_knobs(rng, OPTIMIZERS),
    "schedule": lambda rng: with_knobs(rng, SCHEDULES), "task": lambda rng: rng.choice(list(TASKS)),
    "model": lambda rng: rng.choice(list(MODELS)), "metrics": lambda rng: rng.choice([*CLASSIFICATION, *REGRESSION]),
    "probe": lambda rng: f"every={rng.choice(WHOLE)}", "device": lambda rng: rng.choice(
        ["cpu", "cuda", "cuda:0", "cuda:99999999999999999999", "cuda:-1", "cpu:0", "meta", "cuda:٣"]),
    "cluster": lambda rng: rng.choice(["", "auto", "127.0.0.1:1", "nowhere:0", ":", "x:99999999"]),
}  # fmt: skip


def text(rng, name):
    """A value of an option of type str."""
    grammar = GRAMMARS.get(name)
    found = grammar(rng) if grammar is not None and rng.random() < 0.7 else rng.choice([*WORDS, *FILES, *FILES])
    return mutated(rng, found) if rng.random() < 0.1 else found


def mutated(rng, text):
    place = rng.randint(0, len(text))
    return text[:place] + rng.choice([":", ",", "=", "+", '"', "\\", "9", "-", ".", "é", " ", ""]) + text[place + 1 :]


class Option(typing.NamedTuple):
    name: str
    kind: object
    positional: bool


class Command(typing.NamedTuple):
    words: tuple[str, ...]
    options: tuple[Option, ...]


def commands():
    """Every command, and every action of a command that has actions, with its options."""
    found = []
    for name in COMMANDS:
        module = importlib.import_module(f"fedncv.cli.{name}")
        for action in getattr(module, "ACTIONS", [""]):
            inner = importlib.import_module(f"{module.__name__}.{action}") if action else module
            kinds = [
                each
                for each in vars(inner).values()
                if isinstance(each, type) and dataclasses.is_dataclass(each) and each.__module__ == inner.__name__
            ]
            options = [option for kind in kinds for option in options_of(kind)]
            found.append(Command((name, action) if action else (name,), tuple(options)))
    return found


def options_of(kind):
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint, positional, hidden = hints[field.name], False, False
        if typing.get_origin(hint) is typing.Annotated:
            hint, *marks = typing.get_args(hint)
            positional = any(mark is tyro.conf.Positional or "Positional" in repr(mark) for mark in marks)
            hidden = any("Suppress" in repr(mark) for mark in marks)
        if not hidden:
            yield Option(field.name, hint, positional)


def words_of(rng, option):
    """The words on the command line that set the option."""
    kind, several = option.kind, False
    if typing.get_origin(kind) is tuple:
        kind, several = typing.get_args(kind)[0], True
    if isinstance(kind, types.UnionType):
        kind = next(each for each in typing.get_args(kind) if each is not type(None))
    flag = f"--{option.name.replace('_', '-')}"
    if kind is bool:
        return [rng.choice([flag, f"--no-{flag[2:]}"])]
    count = rng.choice([1, 1, 1, 2, 0]) if several else 1
    values = [text(rng, option.name) if kind is str else value(rng, kind) for _ in range(count)]
    return values if option.positional else [flag, *values]


SMALL = {
    "model": "mlp", "clients": "5", "per_round": "2", "rounds": "2", "epochs": "1", "draws": "10",
    "engine": "sequential",
}  # fmt: skip
FIRST = {
    "study": ["smoke"], "variance": ["fedavg"], "methods": ["scaffold"], "datasets": ["synthetic"],
    "resume": ["run", "runs"],
    "show": ["run", "runs"], "export": ["run"], "report": ["run", "runs", "study"], "federation": ["federation"],
}  # fmt: skip


def argv(rng, known, number):
    """A command line: small settings, a new place to write to, and a few options drawn at random."""
    weights = [(3 + len(command.options)) / (4 if len(command.words) > 1 else 1) for command in known]
    command = rng.choices(known, weights)[0]
    often = [option for option in command.options for _ in range(3 if option.name in GRAMMARS else 1)]
    drawn = list(dict.fromkeys(rng.choices(often, k=rng.choice([0, 1, 1, 1, 2, 2, 3]) if often else 0)))
    place = f"out/{number}.png" if command.words[0] == "partition" else f"out/{number}"
    words = list(command.words)
    for option in command.options:
        if option.positional and (option not in drawn or rng.random() < 0.7):
            new = command.words[-1] == "init"
            words.append(place if new else rng.choice(FIRST.get(command.words[0], FILES)))
        elif option.positional:
            words += words_of(rng, option)
    for option in drawn:
        words += [] if option.positional else words_of(rng, option)
    small = SMALL | {"out": place, "to": place} if len(command.words) == 1 else {"seconds": "0.1"}
    for option in command.options:
        if option.name in small and option not in drawn and command.words[0] != "resume":
            words += [f"--{option.name.replace('_', '-')}", small[option.name]]
    return words
