"""Files of --config: the options of `fedncv run` or `fedncv study` as TOML, and --print-config, which writes one."""

import argparse
from collections.abc import Collection, Mapping
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedncv.config import RunConfig, Settings, from_dict, read_toml, to_toml
from fedncv.spec import nearest


def early(argv: list[str], **options: str) -> dict[str, str]:
    """Return the values of these options, or their defaults, before all options are parsed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, default in options.items():
        parser.add_argument(f"--{name}", default=default)
    try:
        return vars(parser.parse_known_args(argv)[0])
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None


def read_settings_file(path: str, *, others: Collection[str], command: str) -> dict[str, Any]:
    """Return the values of a file. Raise ValueError for a key that is neither a setting nor one of ``others``."""
    values = read_toml(Path(path))
    if isinstance(values.get("settings"), dict):
        raise ValueError(
            f"{path} is the record of a study, not a file of options; its [made_with] has the command that repeats it, "
            "and --print-config with that command writes a file for --config"
        )
    names = [*others, *(f.name for f in fields(RunConfig))]
    for name in values:
        if name not in names:
            raise ValueError(f"{path}: {nearest(name, names, what='key')}; `fedncv {command} --help` lists them")
    return values


def with_settings(values: dict[str, Any], settings: Settings, *, where: str) -> Settings:
    """Return the settings with the given values in place."""
    config = from_dict(values, where=where, base=RunConfig(**vars(settings)))
    return Settings(**{f.name: getattr(config, f.name) for f in fields(Settings)})


def listed(value: object, kind: type, name: str, where: str) -> tuple[Any, ...]:
    """Return the values of a list, or the only value. Raise ValueError if one is of another type."""
    values = value if isinstance(value, list) else [value]
    kinds = (int, float) if kind is float else (kind,)
    if not all(type(each) in kinds for each in values):
        raise ValueError(f"{where}: {name} must be a list of {kind.__name__}, not {value!r}")
    return tuple(map(kind, values))


def settings_file(command: str, values: Mapping[str, Any]) -> str:
    """Return the text that --print-config prints."""
    return f"# options of `fedncv {command}` (fedncv {version('fedncv')}), for --config\n{to_toml(values)}"
