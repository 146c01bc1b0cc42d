"""Show how a run of a federation goes on: on a terminal one line that changes, elsewhere a line now and then.

round 12 of 50: 5 of 5 clients, 14 s; accuracy before 87.3 % (scored by 3 of 5 clients); about 9 min left
round 13 of 50: training, 3 of 5 clients replied, 31 s
"""

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from fedncv.notes import level, note
from fedncv.report.names import duration
from fedncv.results import ACCURACY, is_run, read_config, read_rows

QUIET = 30.0  # seconds between two lines about the same phase


class Following:
    """Shows what the server's folder of a run says. ``look`` is called every few seconds."""

    def __init__(self, run: Path) -> None:
        self._run, self._rounds = run, 0
        self._seen = self._first = -1
        if is_run(run):  # otherwise whoever waits for it says that there is none
            self._rounds = read_config(run).rounds
            self._seen = self._first = max((row["round"] for row in read_rows(run)), default=-1)
        self._began = self._said = time.monotonic()
        console = Console(stderr=True)
        shown = console.is_terminal and level() != "quiet"
        self._status = Status("waiting for the server", console=console) if shown else None

    def __enter__(self) -> "Following":
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.look()  # the last round ended since the last look
        if self._status is not None:
            self._status.stop()

    def look(self) -> None:
        try:
            rows = read_rows(self._run)
        except ValueError:  # the row of a round is on the disk, and its checkpoint is not yet
            return
        for row in rows:
            if row["round"] > self._seen:
                self._say(f"{words_of_round(row, self._rounds, rows)}{self._left(row['round'])}")
        self._seen = max([self._seen, *(row["round"] for row in rows)])
        if self._status is None and time.monotonic() - self._said < QUIET:
            return
        if words := words_of_now(self._run, time.time()):
            if self._status is not None:
                self._status.update(words)
            else:
                self._say(words)

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        if self._status is not None:
            self._status.console.print(text, highlight=False)
        else:
            note(text)

    def _left(self, round: int) -> str:
        if self._first < 0:  # joining is over, and the rounds begin
            self._first, self._began = round, time.monotonic()
        done, left = round - self._first, self._rounds - round
        if done < 1 or left < 1:
            return ""
        return f"; about {duration((time.monotonic() - self._began) / done * left)} left"


def words_of_round(row: dict[str, Any], rounds: int, rows: list[dict[str, Any]]) -> str:
    """Return a finished round in words.

    >>> words_of_round({"round": 2, "counted": [0, 2], "absent": [1]}, 3, [])
    'round 2 of 3: 2 of 3 clients counted'
    >>> score = {"before": 0.8125, "before_by": 3, "scored_among": 5}
    >>> words_of_round({"round": 0} | score, 3, [])
    'round 0 of 3: all clients have joined; accuracy before 81.2 % (scored by 3 of 5 clients)'
    """
    if row["round"]:
        counted, lacking = len(row["counted"]), len(row.get("absent", ())) + len(row.get("refused", ()))
        parts = [f"{counted} of {counted + lacking} clients counted"]
    else:
        barred = len(row.get("barred", ()))
        parts = [f"all clients have joined, {barred} excluded" if barred else "all clients have joined"]
    name = next((each["score_name"] for each in rows if "score_name" in each), ACCURACY)
    for when in ("before", "after"):
        if when in row:
            value = f"{100 * row[when]:.1f} %" if name == ACCURACY else f"{row[when]:.4g}"
            by = f"scored by {row[f'{when}_by']} of {row['scored_among']} clients"
            parts.append(f"{name} {when} {value} ({by})")
    return f"round {row['round']} of {rounds}: " + "; ".join(parts)


def words_of_now(run: Path, now: float) -> str:
    """Return what the server of a run does now; empty if it has said nothing yet, or is done."""
    from fedncv.flower.record import read_progress

    said = read_progress(run)
    if said is None or said.phase == "done":
        return ""
    seconds = f"{max(0.0, now - said.began):.0f} s"
    if said.phase == "joining":
        return f"joining: {said.replied} of {said.asked} clients replied, {seconds}"
    return (
        f"round {said.round} of {said.rounds}: {said.phase}, {said.replied} of {said.asked} clients replied, {seconds}"
    )
