"""fedncv report: write the page, the figures and the tables of a study, of any folder of runs, or of several."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from fedncv.cli.arguments import parse
from fedncv.config import RunConfig
from fedncv.spec import nearest


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Write a page that works offline, with figures (PNG, SVG) and tables (CSV, Markdown, LaTeX) beside it.

    Run it at any time, even while a study runs: the page lists what is still missing. It trains nothing.
    """

    folders: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A study, a run, or a folder of runs. Several are shown side by side and need --out."""
    out: str = ""
    """Folder for the page and its files; empty: the reported folder."""
    target: float = 0.0
    """Report the cost of reaching this accuracy; 0: nine tenths of the way from the label prior to the best."""
    allow: tuple[str, ...] = ()
    """Names of settings, such as lr, that may differ between the runs of one table."""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, command="report")
    if not arguments.folders:
        raise ValueError("name a folder: fedncv report FOLDER")
    if not 0 <= arguments.target <= 1:
        raise ValueError(f"--target must be from 0 to 1, not {arguments.target}")
    settings = [field.name for field in fields(RunConfig)]
    for name in arguments.allow:
        if name not in settings:
            raise ValueError(f"--allow: {nearest(name, settings, what='setting')}")
    from fedncv.report.write import write  # imported late: it loads scipy and matplotlib

    folders, out = map(Path, arguments.folders), Path(arguments.out) if arguments.out else None
    written = write(*folders, out=out, target=arguments.target or None, allow=arguments.allow)
    print(f"page    {written[0]}\nfiles   {written[1].parent}  ({', '.join(path.name for path in written[1:])})")
    return 0
