"""Reading what runs have left on disk. Imports no training code, and changes nothing."""

import difflib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from fedncv.config import RunConfig, from_dict, read_toml

CONFIG, METRICS, TIMING, STATE = "config.toml", "metrics.jsonl", "timing.jsonl", "state.safetensors"
LOCK = ".lock"  # held by the process that trains the run
ACCURACY = "accuracy"  # the one score that is shown in per cent, and that the label prior can be held against
MODEL = "model.safetensors"  # where `fedncv export` puts it

ROW_BEGINS = b'{"round": '
PER_CLIENT = "_clients"  # ends the name of a metric that is a list, a number for each client
NO_NUMBERS = {  # what else is no number; by the client's number, where a federation gives reasons
    "failed": str, "score_name": str, "skipped": list, "sizes": list, "counted": list, "absent": list,
    "barred": dict, "refused": dict, "clipped": dict,
}  # fmt: skip
SHOWN = 44  # characters of a wrong value

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


def check_folder(folder: Path) -> None:
    """ValueError where there is none, with the one whose name is like it."""
    if folder.is_dir():
        return
    if folder.exists():
        raise ValueError(f"{folder} is a file; name a folder of runs, as {folder.parent}")
    beside = folder.parent.iterdir() if folder.parent.is_dir() else iter(())
    close = difflib.get_close_matches(folder.name, [path.name for path in beside if path.is_dir()], n=1)
    remedy = f"did you mean {folder.parent / close[0]}?" if close else "fedncv run and fedncv study make one in runs/"
    raise ValueError(f"there is no folder {folder}; {remedy}")


def runs_in(folder: Path) -> list[Path]:
    """The folder itself if it is a run, otherwise the runs in it."""
    check_folder(folder)
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
    *lines, cut = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            fault = _fault(row)
        except (ValueError, RecursionError):
            fault = "is not a row of metrics: it is no JSON"
        if fault:
            raise _damaged(path, number, fault)
        rows.append(row)
    if not cut.startswith(ROW_BEGINS[: len(cut)]):
        raise _damaged(path, len(lines) + 1, "is not the beginning of a row")
    return rows


def _damaged(path: Path, number: int, fault: str) -> ValueError:
    return ValueError(
        f"{path}, line {number}, {fault}; restore it, or use `fedncv resume {path.parent}`, which repeats what came "
        f"after the last checkpoint, and the whole run where {STATE} is deleted"
    )


def _fault(row: Any) -> str:
    """What is wrong with a row of metrics; empty: nothing."""
    if not isinstance(row, dict) or "round" not in row:
        return "is not a row of metrics: it has no round"
    if type(row["round"]) is not int or row["round"] < 0:
        return f"has round {_short(row['round'])} where a whole number from 0 on belongs"
    for name, value in row.items():
        if name in NO_NUMBERS:
            if not isinstance(value, NO_NUMBERS[name]):
                return f"has {name} {_short(value)}, a value of a wrong kind"
        elif name.endswith(PER_CLIENT):
            if not isinstance(value, list) or not all(each is None or _is_number(each) for each in value):
                return f"has {name} {_short(value)} where a list of numbers belongs"
        elif value is not None and not _is_number(value):
            return f"has {name} {_short(value)} where a finite number belongs"
    return ""


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _short(value: Any) -> str:
    """As JSON has it; of a long one the beginning.

    >>> _short("0.5"), _short(float("nan")), _short([0.5] * 9)
    ('"0.5"', 'NaN', '[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.…')
    """
    text = json.dumps(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def read_run(folder: Path) -> Run:
    return Run(folder, read_config(folder), read_rows(folder))


def read_runs(folders: list[Path]) -> tuple[list[Run], dict[Path, str]]:
    """The runs that can be read, and what is wrong with each of the others."""
    runs: list[Run] = []
    unreadable: dict[Path, str] = {}
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except ValueError as error:
            unreadable[folder] = str(error)
    return runs, unreadable


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
