"""Follow the runs of a folder: what has changed since the last look, and nothing else, is read.

A run is read again from its start when it was resumed, which a new line of machine.jsonl, or a round that repeats in
timing.jsonl, tells: rows that were cut may have come back with other numbers. Nothing is written and nothing locked.
"""

import itertools
import time
from collections.abc import Callable
from pathlib import Path

from fedncv import heartbeat
from fedncv.config import RunConfig, read_toml
from fedncv.heartbeat import Beat
from fedncv.report.gather import Given
from fedncv.results import CONFIG, MACHINE, METRICS, STATUS, TIMING, Run, check_cut, parse_row, read_config
from fedncv.study import FILE, PARTITION, TUNING, Study, read_study
from fedncv.watch.condition import FINISHED, UNREADABLE, Condition, condition
from fedncv.watch.find import Finder, Found
from fedncv.watch.tail import Stamp, Tail, stamp

LARGEST = 1 << 20  # bytes of a config, a study or a partition that is read
PLANNED = 100_000  # runs
BELOW = ("before", "after")
LATEST = 10  # rounds that the pace of a run is measured over


class FollowedRun:
    """One run, as far as it has been read."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        self.name = folder.relative_to(root).as_posix() if folder != root else folder.resolve().name
        self.is_tuning = folder != root and folder.relative_to(root).parts[0] == TUNING
        self.config: RunConfig | None = None
        self.beat: Beat | None = None
        self.error = ""
        self.rounds, self.status = 0, "unreadable"  # those of ``run``, which it would count again
        self.scores: tuple[str, ...] = ()  # the latest, before and after local training, in words
        self.seconds: dict[int, float] = {}
        """Round -> the seconds of it, a share of those of the runs that train together."""
        self._metrics = Tail(folder / METRICS, parse_row, check_cut)
        self._timing, self._machine = Tail(folder / TIMING), Tail(folder / MACHINE)
        self._config_seen: Stamp | None = None
        self._status_seen: Stamp | None = None
        self._locked: bool | None = False

    def look(self) -> bool:
        """Read what is new; return whether anything changed."""
        before = (self.error, self.beat, self._locked)
        try:
            changed = self._look()
            self.error = self._metrics.error
        except (ValueError, RecursionError) as error:
            changed, self.error = False, str(error) or type(error).__name__
        changed = changed or before[0] != self.error
        if changed:
            self._summarise()
        return changed or before != (self.error, self.beat, self._locked)

    def _summarise(self) -> None:
        run, clocks = self.run, {}
        for row in self._timing.rows:
            at, took = row.get("round"), row.get("seconds")
            if type(at) is int and isinstance(took, int | float) and 0 <= took < 1e12 and "extended" not in row:
                clocks[at] = float(took)
        self.seconds = clocks
        self.rounds, self.status, self.scores = 0, "unreadable", ()
        if run is not None:
            self.rounds, self.status = run.rounds, run.status
            latest = [value for value in map(run.last, BELOW) if value is not None]
            self.scores = tuple(f"{run.score.show(value, 1)}{run.score.unit}" for value in latest)

    def _look(self) -> bool:
        changed = self._look_at_config()
        if not changed and self.status == "finished":
            if not self._metrics.look():  # as nearly always
                return False
            changed = True
        had, last = len(self._machine.rows), len(self._timing.rows)
        resumed = self._machine.look() and 0 < had < len(self._machine.rows)
        changed = self._timing.look() or changed
        rounds = [row.get("round") for row in self._timing.rows[max(0, last - 1) :]]
        repeated = any(type(a) is int and type(b) is int and a >= b for a, b in itertools.pairwise(rounds))
        changed = self._metrics.look(again=resumed or repeated) or changed
        self._look_at_status()
        self._locked = heartbeat.is_locked(self.folder)
        return changed

    def _look_at_config(self) -> bool:
        now = stamp(self.folder / CONFIG)
        if now is not None and now == self._config_seen:
            return False
        self._config_seen = None
        self.config = read_config(_plain(self.folder / CONFIG).parent)
        self._config_seen = now
        return True

    def _look_at_status(self) -> None:
        try:
            now = stamp(self.folder / STATUS)
        except ValueError:
            now = None
        if now is None or now != self._status_seen:
            self._status_seen, self.beat = now, heartbeat.read(self.folder) if now is not None else None

    @property
    def run(self) -> Run | None:
        return None if self.config is None or self.error else Run(self.folder, self.config, self._metrics.rows)

    @property
    def has_rows(self) -> bool:
        return bool(self._metrics.rows)

    @property
    def changed(self) -> float:
        """When the run last gave a sign, in seconds since 1970; 0 if never."""
        status = self._status_seen.changed / 1e9 if self._status_seen else 0.0
        return max(self._metrics.changed, self._timing.changed, status)

    @property
    def last_row(self) -> float:
        return self._metrics.changed

    def condition(self, now: float) -> Condition:
        run = self.run
        if run is None:
            return Condition(UNREADABLE, self.error)
        if self.status == "finished":
            return Condition(FINISHED)
        slowest = max(list(self.seconds.values())[-LATEST:], default=0.0)
        silent = max(0.0, now - (self.changed or now))
        return condition(run, self.beat, locked=self._locked, silent=silent, slowest=slowest)


class FollowedFolder:
    """A study, a run, a federation or any folder of runs."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self.root, self.clock = root, clock
        self.runs: dict[Path, FollowedRun] = {}
        self.study: Study | None = None
        self.made_with: dict[str, str] = {}
        self.error = ""
        """Why the folder or its study cannot be read."""
        self.deleted: list[str] = []
        """Runs that were there and are gone."""
        self.found = Found([], 0, False)
        self._finder = Finder(root)
        self._study_seen: Stamp | None = None

    def look(self) -> bool:
        """Read what is new; return whether anything changed."""
        before = (self.error, self.found, self._study_seen)
        try:
            self.found = self._finder.look()
            self._look_at_study()
            self.error = ""
        except (ValueError, RecursionError) as error:
            self.error = str(error) or type(error).__name__
            if not self.root.is_dir():
                self.found = Found([], 0, False)
        there = dict.fromkeys(self.found.runs)
        for folder in [folder for folder in self.runs if folder not in there]:
            self.deleted.append(self.runs.pop(folder).name)
        for folder in there:
            if folder not in self.runs:
                self.runs[folder] = FollowedRun(self.root, folder)
        self.deleted = [name for name in self.deleted if name not in {run.name for run in self.runs.values()}]
        changed = [run.look() for run in self.runs.values()]
        return any(changed) or before != (self.error, self.found, self._study_seen)

    def _look_at_study(self) -> None:
        now = stamp(self.root / FILE)
        if now == self._study_seen and self._study_seen is not None:
            return
        self.study, self.made_with, self._study_seen = None, {}, None
        if now is not None:
            path = _plain(self.root / FILE)
            study = read_study(self.root)
            if (size := _size(study)) > PLANNED:
                raise ValueError(f"{path} plans {size:,} runs, more than the {PLANNED:,} that watch shows")
            self.study = study
            said = read_toml(path).get("made_with", {})
            self.made_with = {str(key): str(value) for key, value in said.items()} if isinstance(said, dict) else {}
            self._study_seen = now

    def given(self, _folder: Path) -> Given:
        """Return what the report is made of, as far as it has been read. Raise ValueError if a file is a link."""
        runs: list[Run] = []
        unreadable: dict[Path, str] = {}
        for folder, followed in sorted(self.runs.items()):
            if followed.is_tuning:
                continue
            run = followed.run
            if run is None:
                unreadable[folder] = followed.error
                continue
            for path in (folder / MACHINE, folder / TIMING, folder / PARTITION, folder.parent / PARTITION):
                if path.parent.is_relative_to(self.root):
                    stamp(path)
            runs.append(run._replace(rows=list(run.rows)))
        return Given(self.study, self.made_with, runs, unreadable)


def _size(study: Study) -> int:
    columns = len(study.datasets) * max(1, len(study.clients)) * max(1, len(study.variants))
    tuning = 0 if study.tuning is None else len(study.tuning.names) * len(study.tuning.seeds)
    return columns * len(study.methods) * (len(study.seeds) + tuning)


def _plain(path: Path) -> Path:
    """Return the path of an ordinary small file. Raise ValueError if it is another thing."""
    found = stamp(path)
    if found is not None and found.size > LARGEST:
        raise ValueError(f"{path} has more than {LARGEST:,} bytes")
    return path
