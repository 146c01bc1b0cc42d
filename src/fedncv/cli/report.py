"""fedncv report: the page, the figures and the tables of a study or of any folder of runs."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from fedncv.cli.arguments import parse
from fedncv.config import RunConfig
from fedncv.spec import nearest


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """One page that needs no network, with figures (PNG, SVG) and tables (CSV, Markdown, LaTeX) beside it.

    It can be made again while a study runs, and says what is still missing. Nothing is trained.
    """

    folder: Annotated[str, tyro.conf.Positional]
    """A study, or a folder of runs."""
    target: float = 0.0
    """Accuracy to reach, for the cost of getting there; 0: nine tenths of the way from label prior to the best."""
    allow: tuple[str, ...] = ()
    """Settings in which the runs of one table may differ, by name, such as lr."""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, command="report")
    if not 0 <= arguments.target <= 1:
        raise ValueError(f"--target is a share, from 0 to 1, not {arguments.target}")
    settings = [field.name for field in fields(RunConfig)]
    for name in arguments.allow:
        if name not in settings:
            raise ValueError(f"--allow: {nearest(name, settings, what='setting')}")
    from fedncv.report.write import write  # loads scipy and matplotlib: not for --help, nor for a mistake

    folder = Path(arguments.folder)
    written = write(folder, target=arguments.target or None, allow=arguments.allow)
    print(f"page    {written[0]}\nfiles   {written[1].parent}  ({', '.join(path.name for path in written[1:])})")
    return 0
