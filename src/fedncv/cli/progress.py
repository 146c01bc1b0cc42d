"""Runs under way: a live line in a terminal, plain lines elsewhere, and the table at the end."""

import contextlib
import sys
import threading
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn

from fedncv.cli.summary import print_table
from fedncv.config import RunConfig
from fedncv.engine.processes import num_cores
from fedncv.results import STATE, read_config, read_runs
from fedncv.simulation import Row, resume

OFTEN = 10  # seconds after which a log has another line, if something happened
QUIET = 30  # and if nothing did


def run_all(out: Path, folders: list[Path]) -> int:
    """Every run to its end, one after the other; then what came of them and where it is."""
    configs = {folder: read_config(folder) for folder in folders}
    live = Live(sum(config.rounds for config in configs.values())) if sys.stdout.isatty() else _log_of(configs)
    failures: list[str] = []
    try:
        with live:
            for number, folder in enumerate(folders, start=1):
                config = configs[folder]
                live.begin(f"[{number}/{len(folders)}] {config.method} seed {config.seed}", config.rounds)
                try:
                    resume(folder, on_round=live.row)
                except (ArithmeticError, ValueError) as error:  # diverged or damaged: it does not stop the others
                    failures.append(f"{folder}: {error}")
                    live.say(f"fedncv: {failures[-1]}")
    except KeyboardInterrupt:
        print(f"\nstopped; nothing is lost. Go on with:  fedncv resume {out}", file=sys.stderr)
        return 130
    runs, _ = read_runs(folders)  # a damaged one has said so
    if runs:
        print_table(runs)
        _draw(out, [run.folder for run in runs])
    for failure in failures:
        print(f"fedncv: {failure}", file=sys.stderr)
    return 2 if failures else 0


def _log_of(configs: dict[Path, RunConfig]) -> "Plain":
    """A log of what is left to do; without a checkpoint a run begins anew."""
    begun = read_runs([folder for folder in configs if (folder / STATE).exists()])[0]
    done = dict.fromkeys(configs, 0) | {run.folder: run.rounds for run in begun}
    finished = {run.folder for run in begun if run.status == "finished"}
    left = [config for folder, config in configs.items() if folder not in finished]
    total = sum(config.rounds - done[folder] for folder, config in configs.items())
    return Plain(total, start_line(len(configs), left))


def _draw(out: Path, folders: list[Path]) -> None:
    from fedncv.figures import curves

    picture = curves(folders, out / "curves.png")
    print(f"\nruns     {out}\npicture  {picture}\nagain    fedncv show {out}")


def bar(*behind: ProgressColumn) -> Progress:
    """Words, a bar and these columns behind it, in a terminal and gone at the end; elsewhere nothing is shown."""
    columns = TextColumn("{task.description}"), BarColumn(), *behind
    return Progress(*columns, console=Console(), transient=True, disable=not sys.stdout.isatty())


def start_line(total: int, left: list[RunConfig]) -> str:
    """How much there is to do, and on what: the first line of a log."""
    if not left:
        return f"{total} runs, nothing to do"
    places = dict.fromkeys(f"{_device(config.device)}, engine {config.engine}" for config in left)
    return f"{total} runs, {total - len(left)} ended, {len(left)} to do, on {'; '.join(places)}"


def _device(name: str) -> str:
    if name.startswith("cuda"):
        return f"{name} ({torch.cuda.get_device_name(name)})"
    return f"{name} ({num_cores()} cores)"


def speed(rounds: int, seconds: float) -> str:
    """
    >>> speed(3, 2.0), speed(5000, 60.0)
    ('90.0 rounds/min', '5,000.0 rounds/min')
    """
    return f"{60 * rounds / seconds:,.1f} rounds/min"


def duration(seconds: float) -> str:
    """
    >>> duration(42), duration(600), duration(9000), duration(200_000)
    ('42 s', '10 min', '2.5 h', '2.3 days')
    """
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.1f} {unit}" if unit == "h" else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.1f} days"


class Log:
    """Lines for a file; where nothing happens for a while, that it is still at work."""

    def __init__(self) -> None:
        self._last, self._told, self._said = "", 0.0, 0.0
        self._over = threading.Event()
        self._waiting = threading.Thread(target=self._wait, daemon=True)

    def start(self) -> None:
        self._waiting.start()

    def stop(self) -> None:
        self._over.set()
        self._waiting.join()

    def say(self, text: str) -> None:
        self._last, self._told = text, time.monotonic()
        self._print(text)

    def due(self) -> bool:
        return time.monotonic() - self._said >= OFTEN

    def _print(self, text: str) -> None:
        self._said = time.monotonic()
        print(text + "\n", end="", flush=True)  # in one piece, whoever else prints

    def _wait(self) -> None:
        while not self._over.wait(max(0.1, self._said + QUIET - time.monotonic())):
            if time.monotonic() - self._said >= QUIET:
                with contextlib.suppress(OSError):  # nobody reads any more: the training will be told
                    self._print(f"still at work, {duration(time.monotonic() - self._told)} after: {self._last}")


class Plain:
    """A log: a line at the start, for every measurement, and for a round where there was none for a while."""

    def __init__(self, total: int, start: str) -> None:  # rounds to train
        self._log = Log()
        self._total, self._start = total, start
        self._trained = 0  # rounds since this command began
        self._began = time.monotonic()

    def __enter__(self) -> "Plain":
        self.say(self._start)
        self._log.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._log.stop()

    def begin(self, name: str, rounds: int) -> None:
        self._name, self._rounds = name, rounds

    def row(self, row: Row) -> None:
        self._trained += row["round"] > 0
        if "before" not in row and not self._log.due():
            return
        words = [f"{self._name}  round {row['round']}/{self._rounds}"]
        words += [f"{name} {row[name]:.3f}" for name in ("before", "after") if name in row]
        if self._trained:
            taken, left = time.monotonic() - self._began, max(0, self._total - self._trained)
            words += [speed(self._trained, taken), f"{duration(taken / self._trained * left)} left"]
        self.say("  ".join(words))

    def say(self, text: str) -> None:
        self._log.say(text)


class Live:
    """A bar over all rounds of all runs, with the latest accuracy and the time left."""

    def __init__(self, total: int) -> None:
        self._progress = bar(
            TextColumn("{task.completed:.0f}/{task.total:.0f} rounds"),
            TextColumn("{task.fields[score]}"),
            TimeRemainingColumn(),
        )
        self._task: TaskID = self._progress.add_task("", total=total, score="")
        self._done = 0

    def __enter__(self) -> "Live":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, name: str, rounds: int) -> None:
        self._progress.update(self._task, description=name, completed=self._done, score="")
        self._before, self._done = self._done, self._done + rounds

    def row(self, row: Row) -> None:
        score = {"score": f"before {row['before']:.3f}"} if "before" in row else {}
        self._progress.update(self._task, completed=self._before + row["round"], **score)  # type: ignore[arg-type]

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)
