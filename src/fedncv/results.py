"""Reading what runs have left on disk. Imports no training code, and changes nothing."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from fedncv.config import RunConfig, from_dict, read_toml
from fedncv.tasks import ACCURACY

CONFIG, METRICS, TIMING, STATE = "config.toml", "metrics.jsonl", "timing.jsonl", "state.safetensors"
LOCK = ".lock"  # held by the process that trains the run
MODEL = "model.safetensors"  # where `fedncv export` puts it

Points = dict[int, list[float]]  # round -> the values of the seeds


class Score(NamedTuple):
    """What "before" and "after" are, and how they are shown: scale times the number, and the unit behind it."""

    name: str
    scale: int
    unit: str

    def show(self, value: float, digits: int) -> str:
        """
        >>> PERCENT.show(0.1234, 1), Score("minus squared error", 1, "").show(-0.1234, 1)
        ('12.3', '-0.1234')
        """
        return self.written(self.scale * value, digits)

    def written(self, scaled: float, digits: int) -> str:
        """A number that was multiplied with the scale already."""
        return f"{scaled:.{digits}f}" if self.unit else f"{scaled:.4g}"

    def axis(self, what: str = "") -> str:
        """
        >>> PERCENT.axis("before"), Score("minus squared error", 1, "").axis()
        ('accuracy before, %', 'minus squared error')
        """
        return f"{self.name} {what}".strip() + ("," + self.unit if self.unit else "")


PERCENT = Score(ACCURACY, 100, " %")


class Run(NamedTuple):
    folder: Path
    config: RunConfig
    rows: list[dict[str, Any]]

    @property
    def rounds(self) -> int:
        """Rounds that are finished."""
        return max((row["round"] for row in self.rows if "failed" not in row), default=0)

    @property
    def status(self) -> str:
        """finished, failed or unfinished."""
        if self.rows and "failed" in self.rows[-1]:
            return "failed"
        finished = bool(self.rows) and self.rounds == self.config.rounds
        return "finished" if finished else "unfinished"

    @property
    def score(self) -> "Score":
        name = self.last("score_name") or PERCENT.name
        return PERCENT if name == PERCENT.name else Score(name, 1, "")

    def last(self, name: str) -> Any:
        """The latest value of a metric, or None."""
        return next((row[name] for row in reversed(self.rows) if row.get(name) is not None), None)


def is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def runs_in(folder: Path) -> list[Path]:
    """The folder itself if it is a run, otherwise the runs in it."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    found = [folder] if is_run(folder) else sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    if not found:
        deeper = sorted(path.parent.parent for path in folder.glob(f"*/*/{CONFIG}"))
        remedy = f"; name a folder of runs, as {deeper[0]}, or see fedncv report {folder}" if deeper else ""
        raise ValueError(f"{folder} holds no run (no {CONFIG} in it or one level below){remedy}")
    return found


def read_config(folder: Path) -> RunConfig:
    if not is_run(folder):
        raise ValueError(f"{folder} is not a run: it has no {CONFIG}")
    return from_dict(read_toml(folder / CONFIG), where=str(folder / CONFIG))


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a last line cut short by a crash is left out."""
    path = folder / METRICS
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            row["round"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{path}, line {number}, is not a row of metrics; restore it, or try `fedncv resume {folder}`, "
                "which cuts off what came after the last checkpoint"
            ) from None
        rows.append(row)
    return rows


def read_run(folder: Path) -> Run:
    return Run(folder, read_config(folder), read_rows(folder))


def by_method(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs of each method, in the order they came."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.config.method, []).append(run)
    return groups


def points(runs: list[Run], name: str) -> Points:
    """Where the metric was measured, and what every run had there."""
    found: Points = {}
    for run in runs:
        for row in run.rows:
            if row.get(name) is not None:
                found.setdefault(row["round"], []).append(row[name])
    return dict(sorted(found.items()))
