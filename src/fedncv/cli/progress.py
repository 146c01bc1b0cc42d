"""Progress of runs on stderr: a bar in a terminal, log lines elsewhere and with --verbose, nothing with --quiet.

Runs are weighted by the samples they train on, so that the time left is also right if datasets differ in size.
"""

import contextlib
import sys
import threading
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

from fedncv.config import RunConfig, short_names
from fedncv.machine import num_cores
from fedncv.notes import level
from fedncv.report.names import duration
from fedncv.results import STATE, read_config, read_runs
from fedncv.runner import Row, Watch
from fedncv.studies.cost import expected_samples, measured_samples

OFTEN = 10  # seconds between log lines while something happens
QUIET = 30  # seconds between log lines while nothing happens


def bar(*after: ProgressColumn) -> Progress:
    """Return a text, a bar and the columns after it. It disappears at the end, and shows only in a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), *after
    shown = sys.stderr.isatty() and level() == "normal"
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)


def speed(rounds: int, seconds: float) -> str:
    """
    >>> speed(3, 2.0), speed(5000, 60.0)
    ('90.0 rounds/min', '5,000.0 rounds/min')
    """
    return f"{60 * rounds / seconds:,.1f} rounds/min"


def start_line(total: int, left: list[RunConfig], where: str = "") -> str:
    """Return the first line of a log: how many runs are left, and where they train."""
    if not left:
        return f"{total} runs, nothing to do"
    places = dict.fromkeys(f"{where or _device(config.device)}, engine {config.engine}" for config in left)
    return f"{total} runs, {total - len(left)} ended, {len(left)} to do, on {'; '.join(places)}"


def _device(name: str) -> str:
    if name.startswith("cuda"):
        return f"{name} ({torch.cuda.get_device_name(name)})"
    return f"{name} ({num_cores()} cores)"


def unfinished(folders: list[Path]) -> list[Path]:
    """Return the runs that have rounds left; one without a checkpoint starts again."""
    begun, _ = read_runs([folder for folder in folders if (folder / STATE).exists()])
    finished = {run.folder for run in begun if run.status == "finished"}
    return [folder for folder in folders if folder not in finished]


class Log:
    """Print log lines; if nothing happens for a while, print that the work continues."""

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
        return level() == "verbose" or time.monotonic() - self._said >= OFTEN

    def _print(self, text: str) -> None:
        self._said = time.monotonic()
        if level() != "quiet":  # one write, so that other output cannot split the line
            print(text + "\n", end="", file=sys.stderr, flush=True)

    def _wait(self) -> None:
        while not self._over.wait(max(0.1, self._said + QUIET - time.monotonic())):
            if time.monotonic() - self._said >= QUIET:
                with contextlib.suppress(OSError):  # the reader is gone; the training thread gets the error
                    self._print(f"still running, {duration(time.monotonic() - self._told)} since: {self._last}")


class RunProgress:
    """Show the progress of runs in folders: one bar over all of them in a terminal, log lines elsewhere.

    The log has a line at the start, when runs begin or end together, every ``OFTEN`` seconds, and for every
    measurement of a run that trains alone; with --verbose, one for every round.
    """

    def __init__(self, what: str, folders: list[Path], left: list[Path], *, where: str = "") -> None:
        """``where`` names the place of training, if it is not a device of this machine."""
        self._what, self._left, self._where = what, left, where
        self._configs = {folder: read_config(folder) for folder in folders}
        texts = (text for config in self._configs.values() for text in (config.data, config.method))
        self._names = short_names(texts)
        self._shares = dict.fromkeys(left, 0.0)  # of each run that has not ended: the share that is done
        self._work_left = sum(self._work(folder) for folder in left)
        self._done = 0.0  # work done since this command began
        self._rounds = 0  # and rounds
        self._together: dict[Path, int] = {}  # number of runs that train together, itself included
        self._scores: dict[Path, dict[str, float]] = {}  # the latest
        self._began = time.monotonic()
        self._log = Log()
        self._bar = bar(TextColumn("{task.percentage:.0f} %  {task.fields[rest]}"))
        self._task = self._bar.add_task(what, total=self._work_left or 1, rest="")

    def __enter__(self) -> "RunProgress":
        self._bar.start()
        if self._bar.disable:
            left = [self._configs[folder] for folder in self._left]
            self.say(f"{self._what}: {start_line(len(self._configs), left, self._where)}")
            self._log.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._bar.disable:
            self._log.stop()

    @property
    def watch(self) -> Watch:
        return Watch(self._begin, self._row, self._fail, self._end)

    def say(self, text: str) -> None:
        if self._bar.disable:
            self._log.say(text)
        else:
            self._bar.console.print(text, highlight=False)

    def _begin(self, folders: list[Path], rounds: list[int]) -> None:
        for folder, done in zip(folders, rounds, strict=True):
            config = self._configs[folder]
            share = done / config.rounds if config.rounds else 0.0
            before = self._shares.get(folder, 0.0)  # above 0 if it begins again, because its worker was lost
            if folder not in self._shares:  # its last rows are newer than its checkpoint
                self._work_left += self._work(folder)
            self._work_left -= self._work(folder) * (share - before)  # done before this command began
            self._shares[folder] = share
            self._together[folder] = len(folders)
        if self._bar.disable:
            self.say(f"{self._place(folders)}  begins at round {rounds[0]}/{self._configs[folders[0]].rounds}")

    def _row(self, folder: Path, row: Row) -> None:
        config = self._configs[folder]
        share = row["round"] / config.rounds if config.rounds else 1.0
        more = self._work(folder) * (share - self._shares[folder])
        if more > 0:
            self._done += more
            self._work_left -= more
            self._shares[folder] = share
            self._rounds += 1
        if row["round"] == config.rounds:
            del self._shares[folder]
        if "before" in row:
            self._scores[folder] = {name: row[name] for name in ("before", "after") if name in row}
        if not self._bar.disable:
            self._bar.update(
                self._task,
                description=self._place([folder]),
                total=self._done + self._work_left,
                completed=self._done,
                rest="  ".join([*self._score([folder]), self._time_left()]),
            )
        elif self._log.due() or ("before" in row and self._together[folder] == 1):
            self._report([folder], f"round {row['round']}/{config.rounds}")

    def _fail(self, folder: Path, reason: str) -> None:
        """Print why, and subtract the rounds that will not be run from the work left.

        Of a run that never began, the command says why at its end.
        """
        if folder in self._shares:
            self._work_left -= self._work(folder) * (1 - self._shares.pop(folder))
        self._scores.pop(folder, None)
        if folder in self._together:
            self.say(f"failed: {folder}: {reason}")

    def _end(self, folders: list[Path]) -> None:
        if self._bar.disable:
            self._report(folders, "ended")

    def _report(self, folders: list[Path], reached: str) -> None:
        """Log where runs stand, their latest scores (the mean of several), the speed and the time left."""
        words = [self._place(folders), reached, *self._score(folders)]
        if self._rounds:
            words.append(speed(self._rounds, time.monotonic() - self._began))
        self.say("  ".join([*words, self._time_left()]).rstrip())

    def _score(self, folders: list[Path]) -> list[str]:
        words = []
        for name in ("before", "after"):
            found = (self._scores.get(folder, {}).get(name) for folder in folders)
            if values := [value for value in found if value is not None]:
                words.append(f"{name} {sum(values) / len(values):.3f}")
        return words

    def _place(self, folders: list[Path]) -> str:
        config = self._configs[folders[0]]
        runs = f"lr {config.lr:g} seed {config.seed}" if len(folders) == 1 else f"{len(folders)} runs"
        ended = len(self._configs) - len(self._shares)
        data, method = self._names[config.data], self._names[config.method]
        return f"{self._what} {ended}/{len(self._configs)}  {data}  {method} {runs}"

    def _time_left(self) -> str:
        if not self._done:
            return ""
        return duration((time.monotonic() - self._began) / self._done * max(0.0, self._work_left)) + " left"

    def _work(self, folder: Path) -> float:
        return expected_samples(self._configs[folder]) + measured_samples(self._configs[folder])
