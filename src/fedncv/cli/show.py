"""fedncv show: print the scores of runs as a table and a curve in the terminal."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fedncv.cli.arguments import parse
from fedncv.cli.summary import print_table
from fedncv.results import Run, by_method, points, read_runs, runs_in

WIDTH, HEIGHT = 64, 12


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Print a table and a curve of runs, finished or in progress."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A run, or a folder of runs."""


def main(argv: list[str]) -> int:
    runs, unreadable = read_runs(runs_in(Path(parse(Arguments, argv, command="show").folder)))
    if runs:
        print_table(runs)
        print(curve(runs))
    for error in unreadable.values():
        print(f"fedncv: {error}", file=sys.stderr)
    return 2 if unreadable else 0


def curve(runs: list[Run]) -> str:
    """Return a plot of the score before local training over rounds, one letter per method (mean over seeds)."""
    lines = {}
    for method, group in by_method(runs).items():
        if measured := points(group, "before"):
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
    text = ["", f"{runs[0].score.name} before, mean over seeds (* where curves meet)"]
    for i, cells in enumerate(grid):
        text.append(f"{high - i / HEIGHT * span:7.3f} |{''.join(cells)}".rstrip())
    text.append(f"{'':8}+{'-' * WIDTH}")
    text.append(f"{'':9}0{'round':^{WIDTH - 2}}{last}")
    return "\n".join([*text, *(f"  {letters[i % 26]} {method}" for i, method in enumerate(lines))])
