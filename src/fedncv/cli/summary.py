"""Print the table of runs: the scores and the cost of every method."""

from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from fedncv.config import short_name
from fedncv.results import (
    LOWER_IS_BETTER,
    Run,
    Score,
    by_method,
    metrics_of,
    notes_on,
    sampling_error,
    share_samples,
)

WHEN = ("before", "after")
SCORES = ("before", "after", "unseen_before", "unseen_after", "before_client_mean", "before_worst_decile")
UNSEEN_SCORES = ("unseen_before", "unseen_after")  # of clients that never train
WIDE = 120  # characters; a narrower terminal does not show the columns in SPARED
SPARED = ("before_client_mean", "gradients")
COLUMNS = {
    "before": "before",
    "after": "after",
    "unseen_before": "unseen before",
    "unseen_after": "unseen after",
    "before_client_mean": "client mean",
    "before_worst_decile": "worst decile",
    "samples": "samples",
    "gradients": "gradients",
    "bytes_down": "down",
    "bytes_up": "up",
    "epsilon": "ε",
}


def print_table(runs: list[Run]) -> None:
    """Print one line per method, mean and deviation over its seeds, and the unfinished runs below."""
    finished = [run for run in runs if run.status == "finished"]
    console = Console() if Console().is_terminal else Console(width=140)
    columns = {name: head for name, head in COLUMNS.items() if console.width >= WIDE or name not in SPARED}
    if not any(run.last(name) is not None for run in finished for name in UNSEEN_SCORES):
        columns = {name: head for name, head in columns.items() if name not in UNSEEN_SCORES}
    if not any(run.last("epsilon") for run in runs):
        columns.pop("epsilon")
    table = Table(title=_title(runs), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold")
    table.add_column("seeds", justify="right")
    for name, heading in columns.items():
        unit = runs[0].score.unit if name in SCORES else ""
        table.add_column(heading + unit, justify="right", no_wrap=name not in SCORES)
    for method, group in by_method(finished).items():
        cells = [
            _cell(name, [run.last(name) for run in group], runs[0].score) + _error(name, group) for name in columns
        ]
        table.add_row(method, str(len(group)), *cells)
    priors = {run.config.seed: run.last("label_prior") for run in finished}
    known = [prior for prior in priors.values() if prior is not None]
    if known and share_samples(finished):
        table.add_section()
        table.add_row(
            "label prior alone", str(len(known)), _cell("before", known, runs[0].score), *[""] * (len(columns) - 1)
        )
    if finished:
        console.print(table)
    if metrics_of(finished):
        console.print(_metrics_table(finished))
    for note in notes_on(finished):
        console.print(note, highlight=False, soft_wrap=True)
    for run in runs:
        if run.status != "finished":
            console.print(
                f"{'stopped' if run.stopped else run.status}: {run.folder} after round {run.rounds} of "
                f"{run.config.rounds}{f' ({run.stopped})' if run.stopped else ''}",
                highlight=False,
            )


def _metrics_table(runs: list[Run]) -> Table:
    """Return one line per method: every metric over the samples of all clients, before and after local training."""
    names = metrics_of(runs)
    title = "metrics before / after, all clients' samples together (mean ± deviation over seeds)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold")
    for name in names:
        table.add_column(name + (" (lower is better)" if name in LOWER_IS_BETTER else ""), justify="right")
    plain = Score("", 1, "")
    for method, group in by_method(runs).items():
        cells = [[_cell("", [run.last(f"{when}_{name}") for run in group], plain) for when in WHEN] for name in names]
        table.add_row(method, *map(" / ".join, cells))
    return table


def _title(runs: list[Run]) -> str:
    config, score = runs[0].config, runs[0].score
    what = "" if score.unit else f"{score.name}, "
    return (
        f"{short_name(config.data)}, {config.clients} clients, {config.partition}, {config.rounds} rounds of "
        f"{config.per_round}, {config.epochs} local epochs ({what}mean ± deviation over seeds)"
    )


def _cell(name: str, values: list[Any], score: Score) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "–"
    mean = float(np.mean(numbers))
    if name.startswith("bytes"):
        return _bytes(mean)
    if name == "epsilon":
        return f"{mean:.3g}"
    if name in ("samples", "gradients"):
        return f"{mean:,.0f}"
    spread = f" ± {score.show(float(np.std(numbers, ddof=1)), 1)}" if len(numbers) > 1 else ""
    return score.show(mean, 1) + spread


def _error(name: str, runs: list[Run]) -> str:
    """Return the standard error of a score that comes from scoring a sample of the clients; empty if all were."""
    error = sampling_error(runs, name) if name in (*WHEN, *UNSEEN_SCORES) else None
    return "" if error is None else f" (s.e. {runs[0].score.show(error, 1)})"


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:.3g} {unit}"
        number /= 1000
    raise AssertionError
