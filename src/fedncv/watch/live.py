"""The live page: the report's sections and the one about now, and what has changed in them since a browser asked.

Every part has the number of the change that it is of. A browser names the last change that it has, and gets all later
parts. Files are looked at only when a browser asks, at most once a second; the report's sections are made again only
when a run began, finished or failed, and in at most one part in ``SHARE`` of the time.
"""

import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from fedncv.report import page, table
from fedncv.report.gather import Results, gather
from fedncv.report.page import Frame, Part
from fedncv.report.verdict import claims
from fedncv.watch import now
from fedncv.watch.follow import FollowedFolder
from fedncv.watch.overview import overview

HERE = Path(__file__).parent
LOOK_SECONDS = 1.0  # between two looks at the files
IDLE_SECONDS = 10.0  # after which the section about now is made again though no file has changed
LEAST_SECONDS = 3.0  # between two reports
SHARE = 20
BEGUN = (
    " Thin lines with an open end are unfinished runs, each by itself, up to 60; in the list, “…” marks the mean of "
    "such runs so far."
)
FOOTER = (
    "Kept current by <code>fedncv watch</code>, which only reads. <code>fedncv report</code> writes this page to a "
    "file."
)
FINAL = ("verdict", "table", "work")  # sections that say nothing before a run is finished
EMPTY: dict[str, Any] = {
    "ours": "", "score": "score", "percent": [], "methods": [], "metrics": {}, "curves": [], "variance": [],
    "scale": [],
}  # fmt: skip


class LivePage:
    """What browsers see of a folder. All methods may be called from any thread."""

    def __init__(self, root: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = FollowedFolder(root, clock)
        self._clock = clock
        self._lock = threading.Lock()
        self._session = secrets.token_hex(6)
        self._change = 0
        self._looked = self._filled = 0.0  # by the monotonic clock
        self._now = Part("now", "Now", "", "")
        self._frame = Frame(root.resolve().name)
        self._seen: dict[str, tuple[int, Any]] = {}  # name -> change, value
        self._order: list[str] = []  # names of the sections
        self._results: Results | None = None
        self._report: list[Part] = []
        self._data: dict[str, Any] = EMPTY
        self._of: Any = None  # what the report was made of
        self._made, self._took = 0.0, 0.0

    def document(self, nonce: str) -> str:
        """Return the whole page."""
        with self._lock:
            self._look()
            around = self._frame._replace(
                eyebrow="fedncv watch", footer=FOOTER, nonce=nonce,
                css=(HERE / "live.css").read_text(encoding="utf-8"), js=(HERE / "live.js").read_text(encoding="utf-8"),
            )  # fmt: skip
            data = self._data | {"begun": self._value("begun"), "live": self._token() | {"title": self._value("title")}}
            return page.document(around, [self._now, *self._report], data)

    def changes(self, seen: str) -> dict[str, Any]:
        """Return what has changed since the token ``seen``; everything if it is of another session or damaged."""
        with self._lock:
            self._look()
            session, _, number = seen.partition("-")
            since = int(number) if session == self._session and number.isdecimal() and len(number) < 16 else -1
            found = {name: value for name, (change, value) in self._seen.items() if change > since}
            parts = {name[1:]: found.pop(name) for name in list(found) if name.startswith("#")}
            return self._token() | {"order": [name[1:] for name in self._order], "parts": parts} | found

    def _token(self) -> dict[str, Any]:
        return {"seen": f"{self._session}-{self._change}", "now": self._clock()}

    def _value(self, name: str) -> Any:
        return self._seen[name][1]

    # ---- making it -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        began = time.monotonic()
        if self._change and began - self._looked < LOOK_SECONDS:
            return
        self._looked = began
        changed, of = self._folder.look(), self._made_of()
        if of != self._of and (not self._change or began - self._made >= max(LEAST_SECONDS, SHARE * self._took)):
            self._of, changed = of, True
            self._make_report()
            self._made = time.monotonic()
            self._took = self._made - began
        if changed or began - self._filled >= IDLE_SECONDS:  # a run may seem stopped only because time passes
            self._filled = began
            self._fill()

    def _fill(self) -> None:
        """Note what is on the page now, and which of it is new."""
        found, around = overview(self._folder), self._frame
        self._now = Part("now", "Now", "", now.section(self._folder, found))
        values: dict[str, Any] = {f"#{part.key}": part.html for part in (self._now, *self._report) if part.body}
        order = list(values)
        values["title"] = f"{int(100 * found.share)} % · {around.title}" if found.lines else around.title
        values["header"] = [around.title, around.facts, around.state, around.machine]
        values["links"] = [[part.key, part.title] for part in (self._now, *self._report) if part.body]
        values["data"], values["begun"] = self._data, self._begun()
        new = {name for name, value in values.items() if name not in self._seen or self._seen[name][1] != value}
        if new or order != self._order:
            self._change += 1
        self._seen = {name: (self._change, values[name]) if name in new else self._seen[name] for name in values}
        self._order = order

    def _made_of(self) -> Any:
        """Return what decides whether the report must be made again; running runs only by their having begun."""
        runs = []
        for path, followed in self._folder.runs.items():
            if not followed.is_tuning:
                settled = 0.0 if followed.status == "unfinished" else followed.last_row
                runs.append((path, followed.error, followed.status, followed.has_rows, settled, followed.config))
        return runs, self._folder.study, self._folder.error

    def _make_report(self) -> None:
        self._results, self._report, self._data = None, [], EMPTY
        self._frame = Frame(self._folder.root.resolve().name)
        if not self._folder.runs and self._folder.study is None:
            return
        try:
            results = gather(self._folder.root, given=self._folder.given, is_live=True)
            main = table.main_table(results)
            data = page.chart_data(results)
            parts = page.content(results, main, claims(results, main), data, is_live=True)
            json.dumps(data, allow_nan=False)
            self._frame = page.frame(results)
            self._results, self._data = results, data
            curves = [part._replace(words=part.words + BEGUN) for part in parts if part.key == "curves"]
            empty = () if results.num_finished else FINAL
            self._report = curves + [part for part in parts if part.key not in ("curves", *empty)]
        except Exception as error:  # a folder that is damaged in a way nobody thought of must not end the server
            words = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self._report = [
                Part("verdict", "Report", "", f'<div class="notice"><b>No report:</b> {escape(words)}</div>')
            ]

    def _begun(self) -> dict[str, Any]:
        """Return the curves of unfinished runs as they are now, by column."""
        found = {}
        for column in self._results.columns if self._results is not None else ():
            fresh: dict[str, Any] = {}
            for method, runs in column.begun.items():
                now_ = [self._folder.runs[run.folder].run for run in runs if run.folder in self._folder.runs]
                fresh[method] = [run for run in now_ if run is not None]
            found[column.name] = page.begun(replace(column, begun=fresh))
        return found
