"""fedncv show: print the scores of runs as a table and a curve in the terminal."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fedncv.cli.arguments import parse
from fedncv.cli.summary import print_table
from fedncv.results import Run, by_method, metrics_of, points, read_runs, runs_in
from fedncv.spec import nearest

WIDTH, HEIGHT = 64, 12


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Print a table and a curve of runs, finished or in progress."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A run, or a folder of runs."""
    metric: str = ""
    """Number to draw over rounds: a metric of the runs such as f1_macro, or any number of their rows such as
    after_f1_macro_client_mean or loss; empty: the score before local training."""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, command="show")
    runs, unreadable = read_runs(runs_in(Path(arguments.folder)))
    if runs:
        name = number_name(runs, arguments.metric)
        print_table(runs)
        print(curve(runs, name))
    for error in unreadable.values():
        print(f"fedncv: {error}", file=sys.stderr)
    return 2 if unreadable else 0


def number_name(runs: list[Run], metric: str) -> str:
    """Return the name that rows use for a metric or number. Raise ValueError if no row has it."""
    metrics = metrics_of(runs)
    numbers = [key for run in runs for row in run.rows for key, value in row.items() if isinstance(value, int | float)]
    if not metric or metric in metrics:
        return f"before_{metric}".rstrip("_")
    if metric not in numbers:
        raise ValueError(nearest(metric, dict.fromkeys([*metrics, *numbers]), what="metric of these runs"))
    return metric


def curve(runs: list[Run], name: str = "before") -> str:
    """Return a plot of a number over rounds, one letter per method (mean over seeds)."""
    lines = {}
    for method, group in by_method(runs).items():
        if measured := points(group, name):
            lines[method] = {t: sum(values) / len(values) for t, values in measured.items()}
    if not lines:
        return "nothing measured yet"
    last = max(max(line) for line in lines.values()) or 1
    values = [value for line in lines.values() for value in line.values()]
    low, high = min(values), max(values)
    span = high - low or 1.0
    grid = [[" "] * (WIDTH + 1) for _ in range(HEIGHT + 1)]
    letters = "abcdefghijklmnopqrstuvwxyz"
    for number, line in enumerate(lines.values()):
        for t, value in line.items():
            y, x = round((high - value) / span * HEIGHT), round(t / last * WIDTH)
            grid[y][x] = "*" if grid[y][x] != " " else letters[number % 26]
    what = f"{runs[0].score.name} before" if name == "before" else name
    text = ["", f"{what}, mean over seeds (* where curves meet)"]
    for i, cells in enumerate(grid):
        text.append(f"{high - i / HEIGHT * span:7.3f} |{''.join(cells)}".rstrip())
    text.append(f"{'':8}+{'-' * WIDTH}")
    text.append(f"{'':9}0{'round':^{WIDTH - 2}}{last}")
    return "\n".join([*text, *(f"  {letters[i % 26]} {method}" for i, method in enumerate(lines))])
