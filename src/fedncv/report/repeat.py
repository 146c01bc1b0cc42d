"""How to repeat what a page shows: commands that run as they are, or the Python call for objects of the user's own."""

import re
import shlex
from collections import Counter
from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from fedncv.config import OBJECTS, RunConfig, differences, options, own_object
from fedncv.files import SEAL, is_intact, parse
from fedncv.report.gather import Results, Source
from fedncv.results import MACHINE, Run

SHOWN = ("date", "device", "processor", "gpu", "cores", "threads", "engine", "layers", "system", "python")


class Again(NamedTuple):
    """One block to copy: a command, or Python code with a sentence that says what to pass."""

    text: str
    words: str = ""


def again(results: Results) -> list[Again]:
    """Return what repeats every run of the page, and then makes the page."""
    names = [f"{source.folder.resolve().name}-again" for source in results.sources]
    if len(set(names)) < len(names):
        names = [f"{name}-{i}" for i, name in enumerate(names, start=1)]
    outs = [f"runs/{name}" for name in names]
    found = [each for source, out in zip(results.sources, outs, strict=True) for each in _of_source(source, out)]
    together = ["--out", "runs/together"] if len(outs) > 1 else []
    return [*found, Again(shlex.join(["fedncv", "report", *outs, *together]))]


def _of_source(source: Source, out: str) -> list[Again]:
    if source.study is not None:
        typed = _typed(source.made_with.get("command", "")) or _in_full(source)
        return [Again(shlex.join([*_without_out(typed), "--out", out]))]
    own = [run for run in source.runs if _objects(run.config)]
    groups = _groups([run for run in source.runs if not _objects(run.config)])
    found = []
    for i, (settings, methods, seeds) in enumerate(groups, start=1):
        where = out if len(groups) == 1 else f"{out}/{i}"
        words = options(settings, RunConfig(), but=("method", "seed", "code"))
        words += ["--method", *methods, "--seeds", *map(str, seeds), "--out", where]
        found.append(Again(shlex.join(["fedncv", "run", *words])))
    return found + ([_python(own, out)] if own else [])


def _typed(command: str) -> list[str]:
    """Return the words of the study's command; none if it is not one of fedncv: readers copy what the page shows."""
    try:
        words = shlex.split(command)
    except ValueError:
        return []
    return words if words[:2] == ["fedncv", "study"] else []


def _objects(config: RunConfig) -> list[str]:
    """Return the settings of the run that were objects in Python."""
    found = [name for name in OBJECTS if own_object(getattr(config, name))]
    return [*found, "metrics"] if any(map(own_object, config.metrics)) else found


def _groups(runs: list[Run]) -> list[tuple[RunConfig, list[str], list[int]]]:
    """Return (settings, methods, seeds) such that every method has every seed: one command each."""
    seeds: dict[RunConfig, dict[str, list[int]]] = {}
    for run in runs:
        plain = replace(run.config, method=RunConfig().method, seed=0, code="")  # as it is now
        seeds.setdefault(plain, {}).setdefault(run.config.method, []).append(run.config.seed)
    groups: dict[tuple[RunConfig, tuple[int, ...]], list[str]] = {}
    for settings, by_method in seeds.items():
        for method, each in by_method.items():
            groups.setdefault((settings, tuple(sorted(set(each)))), []).append(method)
    return [(settings, methods, list(each)) for (settings, each), methods in groups.items()]


def _without_out(words: list[str]) -> list[str]:
    """Return the command without --out, as commands of earlier versions have it."""
    kept = [word for i, word in enumerate(words) if word != "--out" and (i == 0 or words[i - 1] != "--out")]
    return [word for word in kept if not word.startswith("--out=")]


def _in_full(source: Source) -> list[str]:
    """Return the command with every setting, for a study.toml without its command."""
    study = source.study
    assert study is not None
    words = ["fedncv", "study", study.name, "--datasets", *study.datasets, "--methods", *study.methods]
    words += ["--seeds", str(len(study.seeds)), "--clients", *map(str, study.clients or (study.settings.clients,))]
    for f in fields(study.settings):
        if f.name not in ("data", "clients"):
            words += [f"--{f.name.replace('_', '-')}", str(getattr(study.settings, f.name))]
    return words


# ---- objects of Python -----------------------------------------------------------------------------------


def _python(runs: list[Run], out: str) -> Again:
    """Return a call for every method, and the objects to pass."""
    lines, passed = ["import fedncv", ""], dict[str, None]()
    texts = {(name, getattr(run.config, name)) for run in runs for name in OBJECTS}
    texts |= {("metric", text) for run in runs for text in run.config.metrics}
    count = Counter(_variable(name, text) for name, text in texts if own_object(text))
    twice = [name for name in count if count[name] > 1]  # objects of one name: the fingerprint tells which
    calls = [(replace(plain, method=method), seeds) for plain, methods, seeds in _groups(runs) for method in methods]
    for i, (config, seeds) in enumerate(calls, start=1):
        changed = {name: value for name, (value, _) in differences(config, RunConfig()).items()}
        changed["method"] = config.method
        own = {name: _variable(name, changed[name], twice) for name in _objects(config) if name != "metrics"}
        passed |= {f"{name} {variable}": None for name, variable in own.items()}
        if "metrics" in _objects(config):
            each = [_variable("metric", text, twice) if own_object(text) else repr(text) for text in config.metrics]
            own["metrics"] = f"[{', '.join(each)}]"
            passed |= {f"metric {word}": None for word in each if word.isidentifier()}
        where = f"out={f'{out}/own-{i}'!r}"
        arguments = [f"{name}={own.get(name, repr(value))}" for name, value in changed.items()]
        method = own_object(config.method)
        if method and method.fingerprint and ":" not in method.name:  # a plain Method has no name of its own
            arguments.append(f"name={method.name!r}")
        lines.append(f"fedncv.simulate_many({', '.join([f'seeds={seeds}', *arguments, where])})")
    words = f"Runs with objects of your own are repeated in Python. Pass the same objects again: {', '.join(passed)}."
    return Again("\n".join(lines), words)


def _variable(setting: str, text: str, twice: Collection[str] = ()) -> str:
    """Return a Python name for an object: its own, made an identifier; with the fingerprint if it is in ``twice``."""
    own = own_object(text)
    name = re.sub(r"\W", "_", own.short) if own and own.fingerprint else ""
    name = name if name.isidentifier() else f"your_{setting}"
    return f"{name}_{own.fingerprint}" if own and name in twice else name


# ---- the machine -----------------------------------------------------------------------------------------


def machines(results: Results) -> tuple[dict[str, str], int]:
    """Return the facts that the runs recorded, with all values of each, and the number of runs that recorded none."""
    found: dict[str, dict[str, None]] = {}
    dates: list[str] = []
    unknown = 0
    for run in results.finished:
        lines = _lines(run.folder / MACHINE)
        unknown += not lines
        for line in lines:
            dates.append(str(line.pop("date", "")))
            line.pop("round", None)
            line.pop("method", None)  # of a study there are many
            for name, value in line.items():
                if value != "":
                    found.setdefault(name, {})[str(value)] = None
    facts = {name: ", ".join(values) for name, values in found.items()}
    days = sorted(date[:10] for date in dates if date)
    if days:
        facts["date"] = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    first = {name: facts.pop(name) for name in SHOWN if name in facts}
    return first | facts, unknown


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of machine.jsonl; none if it is missing."""
    found = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            value = parse(line)
        except ValueError:
            continue
        if isinstance(value, dict) and is_intact(value):
            value.pop(SEAL, None)
            found.append(value)
    return found
