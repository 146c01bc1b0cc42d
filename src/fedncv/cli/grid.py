"""A grid of runs under way: how much of all of it is done, and how long the rest will take.

Runs are weighed by the samples they train on, so that a large dataset does not surprise.
"""

import time

from rich.progress import TextColumn

from fedncv.cli.progress import Log, bar, duration, speed, start_line
from fedncv.config import RunConfig
from fedncv.simulation import Row
from fedncv.studies.cells import Watch
from fedncv.studies.cost import expected_samples, measured_samples


def work(config: RunConfig) -> float:
    return expected_samples(config) + measured_samples(config)


class Grid:
    """One bar over all runs in a terminal; elsewhere lines: at the start, now and then, and for a group that ends."""

    def __init__(self, what: str, total: int, left: list[RunConfig]) -> None:
        self._what, self._total, self._left = what, total, len(left)
        self._start = f"{what}: {start_line(total, left)}"
        self._work_left = sum(map(work, left))
        self._done = 0.0  # work done since this command began
        self._rounds = 0  # and rounds
        self._running: dict[RunConfig, float] = {}
        self._scores: dict[RunConfig, dict[str, float]] = {}  # the latest
        self._began = time.monotonic()
        self._log = Log()
        self._bar = bar(TextColumn("{task.percentage:.0f} %  {task.fields[rest]}"))
        self._task = self._bar.add_task(what, total=self._work_left or 1, rest="")

    def __enter__(self) -> "Grid":
        self._bar.start()
        if self._bar.disable:
            self.say(self._start)
            self._log.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._bar.disable:
            self._log.stop()

    @property
    def watch(self) -> Watch:
        return Watch(self._begin, self._row, self._end, self.say)

    def _begin(self, configs: list[RunConfig], rounds: list[int]) -> None:
        for config, done in zip(configs, rounds, strict=True):
            share = done / config.rounds if config.rounds else 0.0
            self._work_left -= work(config) * share  # done in an earlier sitting
            self._running[config] = share
        if self._bar.disable:
            self.say(f"{self._place(configs)}  begins at round {rounds[0]}/{configs[0].rounds}")

    def _row(self, config: RunConfig, row: Row) -> None:
        share = row["round"] / config.rounds if config.rounds else 1.0
        before = self._running.get(config, 0.0)
        if share > before:
            self._done += work(config) * (share - before)
            self._work_left -= work(config) * (share - before)
            self._running[config] = share
            self._rounds += 1
        if row["round"] == config.rounds:
            self._left -= 1
            self._running.pop(config, None)
        if "before" in row:
            self._scores[config] = {name: row[name] for name in ("before", "after") if name in row}
        if not self._bar.disable:
            self._bar.update(
                self._task,
                description=self._place([config]),
                total=self._done + self._work_left,
                completed=self._done,
                rest=self.time_left(),
            )
        elif self._log.due():
            self._report([config], f"round {row['round']}/{config.rounds}")

    def _end(self, configs: list[RunConfig]) -> None:
        for config in configs:
            if config in self._running:  # it diverged, and its other rounds will not be run
                self._work_left -= work(config) * (1 - self._running.pop(config))
                self._scores.pop(config, None)
                self._left -= 1
        if self._bar.disable:
            self._report(configs, "ended")

    def _report(self, configs: list[RunConfig], reached: str) -> None:
        """A line of the log: where it stands, the latest scores (of several runs the mean), the rate, the time left."""
        scores = [self._scores[config] for config in configs if config in self._scores]
        words = [self._place(configs), reached]
        for name in ("before", "after"):
            if values := [each[name] for each in scores if name in each]:
                words.append(f"{name} {sum(values) / len(values):.3f}")
        if self._rounds:
            words.append(speed(self._rounds, time.monotonic() - self._began))
        self.say("  ".join([*words, self.time_left()]).rstrip())

    def _place(self, configs: list[RunConfig]) -> str:
        config = configs[0]
        run = f"lr {config.lr:g} seed {config.seed}" if len(configs) == 1 else f"{len(configs)} runs"
        return f"{self._what} {self._total - self._left}/{self._total}  {config.data}  {config.method} {run}"

    def time_left(self) -> str:
        if not self._done:
            return ""
        return duration((time.monotonic() - self._began) / self._done * max(0.0, self._work_left)) + " left"

    def say(self, text: str) -> None:
        if not self._bar.disable:
            self._bar.console.print(text, highlight=False)
        else:
            self._log.say(text)
