"""A grid of runs under way: how much of all of it is done, and how long the rest will take.

Runs are weighed by the samples they train on, so that a large dataset does not surprise.
"""

import time

from rich.progress import TextColumn

from fedncv.cli.progress import bar
from fedncv.config import RunConfig
from fedncv.simulate import Row
from fedncv.studies.cells import Watch
from fedncv.studies.cost import expected_samples, measured_samples

QUIET = 30  # seconds without a word, where there is no bar


def work(config: RunConfig) -> float:
    return expected_samples(config) + measured_samples(config)


class Grid:
    """One bar over all runs in a terminal; elsewhere a line for every run that ends, and now and then."""

    def __init__(self, what: str, total: int, left: list[RunConfig]) -> None:
        self._what, self._total, self._left = what, total, len(left)
        self._work_left = sum(map(work, left))
        self._done = 0.0  # work done since this command began
        self._running: dict[RunConfig, float] = {}
        self._began = self._said = time.monotonic()
        self._bar = bar(TextColumn("{task.percentage:.0f} %  {task.fields[rest]}"))
        self._task = self._bar.add_task(what, total=self._work_left or 1, rest="")

    def __enter__(self) -> "Grid":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @property
    def watch(self) -> Watch:
        return Watch(self._begin, self._row, self.say)

    def _begin(self, configs: list[RunConfig], rounds: list[int]) -> None:
        for config, done in zip(configs, rounds, strict=True):
            share = done / config.rounds if config.rounds else 0.0
            self._work_left -= work(config) * share  # done in an earlier sitting
            self._running[config] = share

    def _row(self, config: RunConfig, row: Row) -> None:
        share = row["round"] / config.rounds if config.rounds else 1.0
        before = self._running.get(config, 0.0)
        if share > before:
            self._done += work(config) * (share - before)
            self._work_left -= work(config) * (share - before)
            self._running[config] = share
        finished = row["round"] == config.rounds
        if finished:
            self._left -= 1
            self._running.pop(config, None)
        run = f"{config.data}  {config.method} lr {config.lr:g} seed {config.seed}"
        place = f"{self._what} {self._total - self._left}/{self._total}  {run}"
        if not self._bar.disable:
            self._bar.update(
                self._task,
                description=place,
                total=self._done + self._work_left,
                completed=self._done,
                rest=self.time_left(),
            )
        elif "before" in row and (finished or time.monotonic() - self._said > QUIET):
            scores = [f"{name} {row[name]:.3f}" for name in ("before", "after") if name in row]
            reached = [] if finished else [f"round {row['round']}/{config.rounds}"]
            self.say("  ".join([place, *reached, *scores, self.time_left()]).rstrip())

    def time_left(self) -> str:
        if not self._done:
            return ""
        return duration((time.monotonic() - self._began) / self._done * max(0.0, self._work_left)) + " left"

    def say(self, text: str) -> None:
        self._said = time.monotonic()
        if not self._bar.disable:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, flush=True)


def duration(seconds: float) -> str:
    """
    >>> duration(42), duration(600), duration(9000), duration(200_000)
    ('42 s', '10 min', '2.5 h', '2.3 days')
    """
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.1f} {unit}" if unit == "h" else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.1f} days"
