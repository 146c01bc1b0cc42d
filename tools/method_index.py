"""Write src/fedncv/methods/index.json: the facts about every method and switch, to be read without torch.

python tools/method_index.py
"""

import ast
import inspect
import json
import sys
import textwrap
from dataclasses import is_dataclass

from fedncv import spec
from fedncv.catalogue import INDEX, About, Knob
from fedncv.methods import METHODS, SWITCHES
from fedncv.methods.fedavg import fedavg


def knobs(config):
    """Return the knobs of a Config, with the docstring under each field; none if there is no Config."""
    if config is None:
        return []
    texts = {name: text for each in reversed(config.__mro__[:-1]) for name, text in docstrings(each).items()}
    defaults, types = config(), spec.knobs(config)
    found = []
    for name in types:
        default = written(getattr(defaults, name))
        found.append(Knob(name, spec.kind_of(types[name]), default, " ".join(texts.get(name, "").split())))
    return found


def docstrings(config):
    """Return field -> the docstring under it, of one class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(tree, ast.ClassDef)
    pairs = zip(tree.body, tree.body[1:], strict=False)
    return {
        field.target.id: text.value.value
        for field, text in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def written(default):
    """Return a default as it is written in a method's name; a part of a chain is on or off."""
    return "off" if default is None else "on" if is_dataclass(default) else spec.written(default)


def formula(made_by):
    """Return the docstring of the file that defines a method or a switch."""
    return (sys.modules[made_by.__module__].__doc__ or "").strip()


def buffers(rule):
    """Return how BatchNorm's running statistics are treated, in words."""
    words = {"averaged": "averaged with the model, unless the study says otherwise", "personal": "kept by each client"}
    if isinstance(rule, str):
        return words[rule]
    return "averaged over rounds, unless the study says otherwise" if rule.shared else "mixed by the method's own rule"


def about(name, entry):
    method = entry.make()
    return About(
        name=name,
        title=entry.title,
        summary=entry.summary,
        reference=entry.reference,
        form=method.form,
        knobs=tuple(knobs(entry.config)),
        reveals=dict(method.reveals),
        buffers=buffers(method.buffers),
        needs_sgd=method.needs_sgd,
        formula=formula(entry.make),
    )


def about_switch(name, switch):
    found = tuple(knobs(switch.config))
    needs_sgd = switch.apply(fedavg(), switch.config()).needs_sgd
    return About(name, "", switch.summary, "", "", found, {}, "", needs_sgd, formula(switch.apply))


def index():
    """Return the file's text, generated from the current code."""
    entries = {
        "methods": [about(name, entry) for name, entry in METHODS.items()],
        "switches": [about_switch(name, switch) for name, switch in SWITCHES.items()],
    }
    plain = {
        what: [each._asdict() | {"knobs": [knob._asdict() for knob in each.knobs]} for each in found]
        for what, found in entries.items()
    }
    return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    INDEX.write_text(index(), encoding="utf-8")
    print(f"wrote {INDEX}")
