"""Runs under way: a live line in a terminal, plain lines elsewhere, and the table at the end."""

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn

from fedncv.cli.summary import print_table
from fedncv.results import read_config, read_run
from fedncv.simulate import Row, resume


def run_all(out: Path, folders: list[Path]) -> int:
    """Every run to its end, one after the other; then what came of them and where it is."""
    configs = {folder: read_config(folder) for folder in folders}
    total = sum(config.rounds for config in configs.values())
    live = Live(total) if sys.stdout.isatty() else Plain()
    failures: list[str] = []
    try:
        with live:
            for number, folder in enumerate(folders, start=1):
                config = configs[folder]
                live.begin(f"[{number}/{len(folders)}] {config.method} seed {config.seed}", config.rounds)
                try:
                    resume(folder, on_round=live.row)
                except (
                    ArithmeticError,
                    ValueError,
                ) as error:  # one that diverged or is damaged does not stop the others
                    failures.append(f"{folder}: {error}")
                    live.say(f"fedncv: {failures[-1]}")
    except KeyboardInterrupt:
        print(f"\nstopped; nothing is lost. Go on with:  fedncv resume {out}", file=sys.stderr)
        return 130
    readable = [folder for folder in folders if _is_readable(folder)]
    if readable:
        print_table(readable)
        _draw(out, readable)
    for failure in failures:
        print(f"fedncv: {failure}", file=sys.stderr)
    return 2 if failures else 0


def _is_readable(folder: Path) -> bool:
    try:
        read_run(folder)
    except ValueError:  # one that is damaged has said so, and the others have their table
        return False
    return True


def _draw(out: Path, folders: list[Path]) -> None:
    from fedncv.figures import curves

    picture = curves(folders, out / "curves.png")
    print(f"\nruns     {out}\npicture  {picture}\nagain    fedncv show {out}")


def bar(*behind: ProgressColumn) -> Progress:
    """Words, a bar and these columns behind it, in a terminal and gone at the end; elsewhere nothing is shown."""
    columns = TextColumn("{task.description}"), BarColumn(), *behind
    return Progress(*columns, console=Console(), transient=True, disable=not sys.stdout.isatty())


class Plain:
    """A line for every measurement."""

    def __enter__(self) -> "Plain":
        return self

    def __exit__(self, *_: object) -> None: ...

    def begin(self, name: str, rounds: int) -> None:
        self._name, self._rounds, self._began, self._first = name, rounds, time.monotonic(), -1

    def row(self, row: Row) -> None:
        if self._first < 0:
            self._first = row["round"]
        if "before" not in row:
            return
        done = row["round"] - self._first
        left = (time.monotonic() - self._began) / done * (self._rounds - row["round"]) if done else None
        words = [f"{self._name}  round {row['round']}/{self._rounds}  before {row['before']:.3f}"]
        words += [f"after {row['after']:.3f}"] if "after" in row else []
        words += [f"{left:.0f} s left"] if left else []
        self.say("  ".join(words))

    def say(self, text: str) -> None:
        print(text, flush=True)


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
