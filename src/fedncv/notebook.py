"""What a notebook or a terminal shows of runs in Python: progress while they train, and a result as a small page.

Progress disappears at the end: a notebook keeps no bar, a terminal no line. In a program whose output goes to a file
it is silent unless asked for.
"""

import base64
import importlib
import io
import math
import sys
import time
from html import escape
from typing import Any

from fedncv.config import RunConfig, short_name
from fedncv.figures import draw, picture
from fedncv.results import Run, sampling_error

PATIENCE = 2.0  # seconds before a terminal shows progress; shorter work needs none
OFTEN = 0.2  # seconds between two updates of a bar
SELDOM = 10.0  # seconds between two lines in a file


def in_notebook() -> bool:
    """Return whether this is a Jupyter kernel, which can show pictures and pages; a terminal of IPython is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _ipython() -> Any:
    return importlib.import_module("IPython.display")


# ---- progress --------------------------------------------------------------------------------------------


class RoundProgress:
    """Shows how far some runs are. Use it in a ``with`` block and call ``row`` after every round of every run.

    ``show`` is True, False, or None: in notebooks and, after some seconds, in terminals.
    """

    def __init__(self, configs: list[RunConfig], done: list[int], show: bool | None) -> None:
        self._configs, self._begun, self._done = configs, sum(done), sum(done)
        self._total = sum(config.rounds for config in configs)
        self._show = _screen(show)
        self._began = time.monotonic()
        self._shown = -math.inf
        self._wait = PATIENCE if self._show is _Terminal and not show else 0.0
        self._screen: Any = None
        self._score = ""

    def __enter__(self) -> "RoundProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._screen is not None:
            self._screen.close()

    def row(self, row: dict[str, Any]) -> None:
        """Count a round."""
        self._done += row["round"] > 0
        if "before" in row:
            self._score = f", before {row['before']:.3f}"
        now = time.monotonic()
        if self._show is None or now - self._began < self._wait or now - self._shown < self._show.often:
            return
        self._screen = self._screen or self._show()
        self._screen.show(self.text(now - self._began), self._done, self._total)
        self._shown = now

    def text(self, seconds: float) -> str:
        """Return where the runs are in words, ``seconds`` after the beginning."""
        first, many = self._configs[0], len(self._configs)
        seeds = f", {many} seeds" if many > 1 else ""
        words = (
            f"{short_name(first.method)} on {short_name(first.data)}{seeds}: round {self._done // many}/{first.rounds}"
        )
        trained = self._done - self._begun
        left = f", {seconds / trained * (self._total - self._done):.0f} s left" if trained else ""
        return words + self._score + left


def _screen(show: bool | None) -> Any:
    """Return the kind of display, or None for none."""
    if show is False:
        return None
    if in_notebook():
        return _Notebook
    if sys.stderr.isatty():
        return _Terminal
    return _Lines if show else None


class _Notebook:
    often = OFTEN

    def __init__(self) -> None:
        self._handle = _ipython().display({"text/plain": ""}, raw=True, display_id=True)

    def show(self, text: str, done: int, total: int) -> None:
        page = f'<progress value="{done}" max="{total}"></progress> {escape(text)}'
        self._handle.update({"text/html": page, "text/plain": text}, raw=True)

    def close(self) -> None:
        self._handle.update({"text/html": "", "text/plain": ""}, raw=True)


class _Terminal:
    often = OFTEN

    def show(self, text: str, _done: int, _total: int) -> None:
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class _Lines:
    often = SELDOM

    def show(self, text: str, _done: int, _total: int) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


# ---- results ---------------------------------------------------------------------------------------------


def described(run: Run, num_planned: int, stopped: str = "") -> dict[str, str]:
    """Return the facts about a run that its short description shows, in words."""
    config, score = run.config, run.score
    rounds = str(run.rounds) if run.rounds == num_planned else f"{run.rounds} of {num_planned}"
    facts = {"method": short_name(config.method), "data": short_name(config.data), "seed": str(config.seed)}
    facts |= {"rounds": rounds + (f" (stopped: {stopped})" if stopped else "")}
    for name in ("before", "after"):
        value = run.last(name)
        if value is not None:
            error = sampling_error([run], name)
            spread = "" if error is None else f" (standard error {score.show(error, 1)})"
            facts[f"{score.name} {name}"] = score.show(value, 1) + score.unit + spread
    return facts | ({} if run.sample is None else {"clients": run.sample.words})


def page(run: Run, facts: dict[str, str]) -> str:
    """Return a small table and the curve as HTML, for Jupyter."""
    lines = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in facts.items()
    )
    curve = f'<img style="max-width:100%" width="560" src="data:image/png;base64,{png(picture([run], (7, 3.2)))}">'
    return f'<table style="margin:0">{lines}</table>' + (curve if run.rounds else "")


def png(axes: Any) -> str:
    """Return the figure of these axes as PNG in base64."""
    file = io.BytesIO()
    axes.figure.savefig(file, format="png", dpi=160)
    return base64.b64encode(file.getvalue()).decode()


def plotted(runs: list[Run], axes: Any = None, metric: str = "") -> Any:
    """Draw the runs and return the axes. Without ``axes`` the figure is new, and a notebook shows it at once."""
    if axes is not None:
        draw(axes, runs, metric)
        return axes
    axes = picture(runs, metric=metric)
    if in_notebook():
        _ipython().display(_ipython().Image(data=base64.b64decode(png(axes)), format="png", width=640))
    return axes
