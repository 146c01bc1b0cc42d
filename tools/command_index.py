"""Write src/fedncv/cli/commands.json: every command's options, for the completion in shells, to be read without torch.

python tools/command_index.py
"""

import contextlib
import importlib
import json
import re
import runpy
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from unittest import mock

import tyro

from fedncv import cli
from fedncv.cli import COMMANDS, federation
from fedncv.cli.completion import INDEX
from fedncv.data import DATASETS, PARTITIONS
from fedncv.metrics import BUILT_IN
from fedncv.models import MODELS
from fedncv.optimizers import OPTIMIZERS
from fedncv.schedule import SCHEDULES
from fedncv.studies import STUDIES
from fedncv.tasks import TASKS

docstrings = runpy.run_path(str(Path(__file__).parent / "method_index.py"))["docstrings"]
WORDS = {  # what the value of an option or an argument is, where that is not a file or a number
    "method": ("method", "methods", "reference"), "dataset": ("data", "datasets"), "model": ("model",),
    "metric": ("metrics", "metric"), "partition": ("partition",), "optimizer": ("optimizer",), "task": ("task",),
    "schedule": ("schedule",),
}  # fmt: skip
ARGUMENTS = {"methods": "method", "variance": "method", "datasets": "dataset", "study": "study"}


class Captured(BaseException):
    """Carries the dataclass that a command parses."""


def arguments(module):
    """Return the dataclass that a command's ``main`` gives to ``parse``."""

    def parse(kind, argv, **_):
        raise Captured(kind)

    with mock.patch.object(module, "parse", parse), contextlib.suppress(SystemExit):
        try:
            module.main(["--help"])
        except Captured as captured:
            return captured.args[0]
    raise AssertionError(f"{module.__name__} parses no arguments")


def of_action(module):
    """Return the dataclass of an action of `fedncv federation`, whose ``main`` would load Flower."""
    (kind,) = [each for each in vars(module).values() if is_dataclass(each) and each.__module__ == module.__name__]
    return module._offered(kind) if hasattr(module, "_offered") else kind


def described(command, kind):
    """Return the options of a command, and what its arguments are."""
    texts = {
        name: text for each in reversed(kind.__mro__[:-1]) if each.__module__ != "types" for name, text in _texts(each)
    }
    options, words = [], ""
    for field, hint in typing.get_type_hints(kind, include_extras=True).items():
        if field not in {f.name for f in fields(kind)}:
            continue
        marks = getattr(hint, "__metadata__", ())
        hint = hint.__origin__ if marks else hint
        if tyro.conf.Suppress[str].__metadata__[0] in marks:
            continue
        if tyro.conf.Positional in marks:
            words = ARGUMENTS.get(command, "file")
            continue
        options.append(option(field, hint, texts.get(field, "")))
    return {"options": options, "arguments": words}


def _texts(kind):
    try:
        return docstrings(kind).items()
    except (OSError, TypeError):  # made at run time
        return ()


def option(field, hint, text):
    choices = list(typing.get_args(hint)) if typing.get_origin(hint) is typing.Literal else []
    word = next((word for word, names in WORDS.items() if field in names), "")
    if not word and hint in (str, tuple[str, ...]):
        word = "file"
    about = {"name": f"--{field.replace('_', '-')}", "help": first(text), "many": typing.get_origin(hint) is tuple}
    return about | {"flag": hint is bool, "choices": choices, "words": word}


def first(text):
    """Return the first sentence, without what is only for terminals that show more."""
    text = " ".join(text.split())
    return re.split(r"(?<=[a-z0-9)])[.;:] ", text + " ")[0].rstrip(" .")


def index():
    """Return the file's text, generated from the current code."""
    modules = {name: importlib.import_module(f"{cli.__name__}.{name}") for name in COMMANDS}
    found = {name: described(name, arguments(module)) for name, module in modules.items() if name != "federation"}
    for action in federation.ACTIONS:
        module = importlib.import_module(f"{federation.__name__}.{action}")
        found[f"federation {action}"] = described(f"federation {action}", of_action(module))
    metrics = dict.fromkeys(name for names in BUILT_IN.values() for name in names)
    words = {
        "dataset": DATASETS, "study": STUDIES, "model": MODELS, "metric": metrics, "partition": PARTITIONS,
        "optimizer": OPTIMIZERS, "task": TASKS, "schedule": SCHEDULES,
    }  # fmt: skip
    return json.dumps({"commands": found, "words": {name: list(each) for name, each in words.items()}}, indent=1) + "\n"


if __name__ == "__main__":
    INDEX.write_text(index(), encoding="utf-8")
    print(f"wrote {INDEX}")
