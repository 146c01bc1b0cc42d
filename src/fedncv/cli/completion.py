"""fedncv completion: the completion of commands, options and names in bash, zsh and fish.

The scripts are made from commands.json, which `python tools/command_index.py` writes, and from the catalogue of
methods, so that making them does not load torch. They hold all words: pressing Tab does not even start Python.
"""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fedncv import catalogue
from fedncv.cli import COMMANDS
from fedncv.cli.arguments import parse
from fedncv.notes import note
from fedncv.spec import nearest

INDEX = Path(__file__).with_name("commands.json")
TEMPLATES = Path(__file__).parent
Shell = Literal["bash", "zsh", "fish"]
EVERYWHERE = {
    "--help": "list the options", "--quiet": "only results and errors", "--verbose": "also details and tracebacks",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Print the completion of fedncv for bash, zsh or fish; with --install, write it where the shell looks.

    Without --install, put a line into the shell's own file:
      bash   eval "$(fedncv completion bash)"    in ~/.bashrc
      zsh    eval "$(fedncv completion zsh)"     in ~/.zshrc, after compinit
      fish   fedncv completion fish | source     in ~/.config/fish/config.fish
    """

    shell: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SHELL")] = ""
    """bash, zsh or fish."""
    install: bool = False
    """Write the completion into your home folder instead of printing it."""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, command="completion")
    shells = {"bash": bash, "zsh": zsh, "fish": fish}
    if arguments.shell not in shells:
        remedy = (
            nearest(arguments.shell, shells, what="shell") if arguments.shell else "name a shell: bash, zsh or fish"
        )
        raise ValueError(remedy)
    text = shells[arguments.shell]()
    if not arguments.install:
        sys.stdout.write(text)
        return 0
    path = place(arguments.shell)  # type: ignore[arg-type]  # checked above
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(path)
    if arguments.shell == "zsh":
        note(f"add this line to ~/.zshrc, before compinit: fpath=({shlex.quote(str(path.parent))} $fpath)")
    if arguments.shell == "bash":
        note("new shells read it if the package bash-completion is installed; it is read at the first Tab")
    return 0


def place(shell: Shell) -> Path:
    """Return the file in which the shell looks for a user's completions."""
    home = Path.home()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    return {
        "bash": data / "bash-completion" / "completions" / "fedncv",
        "zsh": data / "zsh" / "site-functions" / "_fedncv",
        "fish": config / "fish" / "completions" / "fedncv.fish",
    }[shell]


# ---- the words ---------------------------------------------------------------------------------------------


@cache
def index() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(INDEX.read_text(encoding="utf-8"))
    return found


def actions() -> dict[str, str]:
    """Return the actions of `fedncv federation`, with their meaning."""
    from fedncv.cli.federation import ACTIONS

    return ACTIONS


def options(command: str) -> dict[str, str]:
    """Return option -> help, of a command such as "run" or "federation up"."""
    found = {}
    for option in index()["commands"][command]["options"]:
        found[option["name"]] = option["help"]
        if option["flag"]:
            found["--no-" + option["name"][2:]] = f"not {option['name']}"
    return found | EVERYWHERE


def words() -> dict[str, dict[str, str]]:
    """Return kind -> word -> meaning."""
    methods = {name: about.summary for name, about in catalogue.methods().items()}
    return {"method": methods} | {kind: dict.fromkeys(names, "") for kind, names in index()["words"].items()}


def knobs() -> dict[str, list[str]]:
    """Return the knobs of every method and switch; those of a part of a chain are left out."""
    every = catalogue.methods() | catalogue.switches()
    return {name: [knob.name for knob in about.knobs if "." not in knob.name] for name, about in every.items()}


def _value(option: dict[str, Any]) -> str:
    """Return what an option takes: nothing, one or many, of a kind."""
    kind = " ".join(["choices", *option["choices"]]) if option["choices"] else option["words"] or "other"
    return "none" if option["flag"] else f"{'many' if option['many'] else 'one'} {kind}"


# ---- bash and zsh share a function that prints candidates; they differ in how a word is replaced --------------


def bash() -> str:
    return _shared() + (TEMPLATES / "completion.bash").read_text(encoding="utf-8")


def zsh() -> str:
    return "#compdef fedncv\n" + _shared() + (TEMPLATES / "completion.zsh").read_text(encoding="utf-8")


def _shared() -> str:
    """Return the functions that know the words, in what bash and zsh have in common."""
    switches = {name: about.summary for name, about in catalogue.switches().items()}
    each_knobs = {name: _listing(dict.fromkeys(each, "")) for name, each in knobs().items() if each}
    return "\n".join(
        [
            "# Completion of fedncv, written by `fedncv completion`.",
            *_function("__fedncv_commands", _listing(COMMANDS | {"--version": "print the version"} | EVERYWHERE)),
            *_function("__fedncv_actions", _listing(actions())),
            *_cases("__fedncv_options", {name: _listing(options(name)) for name in index()["commands"]}),
            *_cases("__fedncv_value", dict(_values())),
            *_cases("__fedncv_arguments", {name: [_say(it["arguments"])] for name, it in index()["commands"].items()}),
            *_cases("__fedncv_words", {kind: _listing(each) for kind, each in words().items()}),
            *_function("__fedncv_switches", _listing(switches)),
            *_cases("__fedncv_knobs", each_knobs),
            (TEMPLATES / "completion.sh").read_text(encoding="utf-8"),
        ]
    )


def _values() -> Iterator[tuple[str, list[str]]]:
    for command, about in index()["commands"].items():
        for option in about["options"]:
            yield f"{command} {option['name']}", [_say(_value(option))]


def _say(text: str) -> str:
    return f"printf '%s\\n' {shlex.quote(text)}"


def _listing(entries: dict[str, str]) -> list[str]:
    """Return a command that prints word, tab, meaning, line by line."""
    quoted = (shlex.quote(f"{word}\t{meaning}" if meaning else word) for word, meaning in entries.items())
    return [f"printf '%s\\n' {' '.join(quoted)}"] if entries else [":"]


def _function(name: str, body: list[str]) -> list[str]:
    return [f"{name}() {{", *(f"  {line}" for line in body), "}"]


def _cases(name: str, cases: dict[str, list[str]]) -> list[str]:
    branches = [f"    {shlex.quote(case)}) {'; '.join(body)} ;;" for case, body in cases.items()]
    return _function(name, ['case "$1" in', *(line[2:] for line in branches), "esac"])


# ---- fish ----------------------------------------------------------------------------------------------------


def fish() -> str:
    """Return one line for every word. fish asks which command was given; it completes an option's first value only."""
    lines = ["# Completion of fedncv, written by `fedncv completion`.", "complete -c fedncv -f"]
    for name, about in COMMANDS.items():
        lines.append(_fish("__fish_use_subcommand", f"-a {name}", about))
    lines.append(_fish("__fish_use_subcommand", "-l version", "print the version"))
    lines += [f"complete -c fedncv -l {name[2:]} -d {_quoted(about)}" for name, about in EVERYWHERE.items()]
    chosen = " ".join(actions())
    none_yet = f"__fish_seen_subcommand_from federation; and not __fish_seen_subcommand_from {chosen}"
    lines += [_fish(none_yet, f"-a {name}", about) for name, about in actions().items()]
    for command, about in index()["commands"].items():
        first, _, action = command.partition(" ")
        seen = f"__fish_seen_subcommand_from {first}" + (
            f"; and __fish_seen_subcommand_from {action}" if action else ""
        )
        lines += [_fish(seen, *_fish_option(option)) for option in about["options"]]
        if about["arguments"]:
            lines.append(_fish(seen, _fish_words(about["arguments"]), ""))
    return "\n".join(lines) + "\n"


def _fish(condition: str, what: str, about: str) -> str:
    return f"complete -c fedncv -n {_quoted(condition)} {what}" + (f" -d {_quoted(about)}" if about else "")


def _fish_option(option: dict[str, Any]) -> tuple[str, str]:
    name = f"-l {option['name'][2:]}"
    if option["flag"]:
        return name, option["help"]
    if option["choices"]:
        return f"{name} -x -a {_quoted(' '.join(option['choices']))}", option["help"]
    return f"{name} {_fish_words(option['words'], needed='-x')}", option["help"]


def _fish_words(kind: str, needed: str = "") -> str:
    if kind == "file":
        return "-r -F" if needed else "-F"
    if kind not in words():
        return needed
    return f"{needed} -a {_quoted(' '.join(words()[kind]))}".strip()


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
