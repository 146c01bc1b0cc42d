"""Plot runs. Every figure of the project takes a method's colour and line from here, so they are the same in all."""

import io
import textwrap
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedncv.catalogue import methods as listed_methods
from fedncv.comparison import summary
from fedncv.config import short_name
from fedncv.files import write_atomically
from fedncv.results import Run, Score, by_method, metrics_of, points, read_run, samples_of, share_samples
from fedncv.spec import nearest

# Okabe and Ito's colours with indigo for their yellow, which is hard to see on white: colour-blind readers can tell
# all eight apart. On a dark page the second list is used. Line styles tell more than eight methods apart.
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5E2A84", "#333333"]
COLOURS_ON_DARK = ["#E8702F", "#4D94D0", "#2FBF75", "#D08CB4", "#F8CC17", "#B1DFFD", "#8F5AE8", "#F0F0EC"]
STYLES = ["-", "--", ":", "-.", (0, (8, 3))]
# The methods compared most have a colour of their own; the other built-in ones share it, with another line.
FIRST = ("fedncv", "fedavg", "fedprox", "scaffold", "fedrep", "fedper", "pfedsim", "fedncv-paper")
APART = " @ "  # between a method and the folder it was run in, where two folders have it with different settings
FEW_SEEDS = 5  # with fewer, an interval is a rough guess
WIDTH = 64  # characters of a line below a figure
BANDS = 6  # lines whose intervals can be shaded before they hide each other


class Look(NamedTuple):
    colour: int  # index into COLOURS
    line: int  # index into STYLES

    @property
    def style(self) -> dict[str, Any]:
        """Keyword arguments for matplotlib's ``plot``."""
        return {"color": COLOURS[self.colour], "linestyle": STYLES[self.line]}


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """Return the look of each method by its text, whatever the order.

    A built-in method looks the same everywhere. Any other text has a colour by its hash; if a method of this figure
    has that colour already, it takes the next free one.
    """
    named = list(dict.fromkeys([*FIRST, *listed_methods()]))
    fixed = {name: _look(i) for i, name in enumerate(named)}
    found = {method: fixed[method] for method in methods if method in fixed}
    for method in sorted(set(methods) - set(found)):
        base, apart, _ = method.partition(APART)
        start = fixed.get(base, Look(zlib.crc32(base.encode()) % len(COLOURS), 0))
        found[method] = _free(start, set(found.values()), keep_colour=bool(apart))
    return found


def _look(i: int) -> Look:
    return Look(i % len(COLOURS), i // len(COLOURS) % len(STYLES))


def _free(start: Look, used: set[Look], *, keep_colour: bool) -> Look:
    """Return the first look from ``start`` on that is not used: a free colour, or else a free line."""
    colours = [(start.colour + i) % len(COLOURS) for i in range(len(COLOURS))]
    lines = [(start.line + i) % len(STYLES) for i in range(len(STYLES))]
    if keep_colour:
        wanted = [Look(start.colour, line) for line in lines]
    else:
        wanted = [Look(colour, start.line) for colour in colours if colour not in {look.colour for look in used}]
    wanted += [Look(colour, line) for line in lines for colour in colours]
    return next((look for look in wanted if look not in used), start)


# ---- intervals over seeds --------------------------------------------------------------------------------


class Line(NamedTuple):
    """A curve: x, mean over seeds, and the ends of the 95 % interval (None with one seed)."""

    x: list[float]
    mean: list[float]
    low: list[float | None]
    high: list[float | None]
    num_seeds: int


def shaded(lines: Sequence[Line]) -> bool:
    """Return whether intervals are drawn as bands. Many bands, or the wide ones of few seeds, would hide the lines."""
    return len(lines) <= BANDS and all(line.num_seeds >= FEW_SEEDS for line in lines)


def draw_lines(axes: Any, lines: dict[str, Line], *, labels: dict[str, str], found: dict[str, Look], bold: str) -> None:
    """Draw the curves without their intervals; ``bold`` is the method whose line is thick."""
    axes.margins(y=0.1)
    for method, line in lines.items():
        style = found[method].style | {"linewidth": 2.6 if method == bold else 1.4}
        mark = {"marker": "o", "markersize": 3} if len(line.x) == 1 else {}
        axes.plot(line.x, line.mean, label=labels[method], gid=method, **style, **mark)


def draw_intervals(axes: Any, lines: dict[str, Line], found: dict[str, Look]) -> None:
    """Add the intervals when all else is drawn: bands if they can be read, or else a bar at the end of each line."""
    bands, limits = shaded(list(lines.values())), axes.get_ylim()
    ends, starts = [line.x[-1] for line in lines.values()], [line.x[0] for line in lines.values()]
    step = 0.012 * (max(ends, default=1) - min(starts, default=0) or 1)
    for i, (method, line) in enumerate(lines.items(), start=1):
        if None in (*line.low, *line.high):
            continue
        style: dict[str, Any] = {"color": COLOURS[found[method].colour], "gid": f"{method} interval", "zorder": 1}
        if bands:
            axes.fill_between(line.x, line.low, line.high, alpha=0.14, linewidth=0, **style)
        else:
            at = line.x[-1] + i * step
            axes.plot([at, at], [line.low[-1], line.high[-1]], marker="_", markersize=4, linewidth=1.6, **style)
    if not bands:
        axes.set_ylim(limits)  # the interval of two seeds would make the lines flat


def caption(num_seeds: Iterable[int], *, drawn: str) -> str:
    """Return what the intervals of a figure are, with a word of caution if they are of few seeds.

    >>> caption([3, 3], drawn="bars")
    'Mean over 3 seeds; bars: 95 % interval by Student’s t. Fewer than 5 seeds: read intervals with caution.'
    >>> caption([1], drawn="bars")
    'One seed: no interval, so differences may be chance.'
    """
    counts = sorted(set(num_seeds))
    if not counts:
        return ""
    if counts == [1]:
        return "One seed: no interval, so differences may be chance."
    few = f" Fewer than {FEW_SEEDS} seeds: read intervals with caution." if counts[0] < FEW_SEEDS else ""
    seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"Mean over {seeds} seeds; {drawn}: 95 % interval by Student’s t.{few}"


# ---- the picture of `fedncv run`, and of a notebook ------------------------------------------------------


def curves(folders: list[Path], path: Path) -> Path:
    """Draw the runs in these folders into the file ``path``."""
    write_atomically(path, drawn(picture([read_run(folder) for folder in folders]).figure, "png"))
    return path


def drawn(figure: Any, form: str, **options: Any) -> bytes:
    """Return the figure as a file of this form, such as png."""
    data = io.BytesIO()
    figure.savefig(data, format=form, dpi=150, **options)
    return data.getvalue()


def picture(runs: list[Run], size: tuple[float, float] = (8, 4.5), metric: str = "") -> Any:
    """Return the axes of a new figure with the runs drawn; pyplot does not know it, so nobody has to close it."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=size, layout="constrained").subplots()
    draw(axes, runs, metric)
    return axes


def draw(axes: Any, runs: list[Run], metric: str = "") -> None:
    """Plot the score before local training against rounds, mean over seeds with the interval, and the score after.

    ``metric`` is drawn instead of the score. Raise ValueError if no run measured it.
    """
    from matplotlib.ticker import MaxNLocator

    score, groups = (Score(metric, 1, "") if metric else runs[0].score), by_method(runs)
    before, after_name = (f"before_{metric}", f"after_{metric}") if metric else ("before", "after")
    if metric and not any(points([run], name) for run in runs for name in (before, after_name)):
        raise ValueError(nearest(metric, metrics_of(runs), what="metric"))
    lines: dict[str, Line] = {}
    for method, group in groups.items():
        if measured := points(group, before):
            each = [summary([score.scale * value for value in values]) for values in measured.values()]
            one = min(point.num_seeds for point in each) == 1
            low, high = [None if one else p.low for p in each], [None if one else p.high for p in each]
            lines[method] = Line(list(measured), [p.mean for p in each], low, high, each[-1].num_seeds)
    found = looks(groups)
    draw_lines(axes, lines, labels={method: method for method in lines}, found=found, bold="")
    for method, line in lines.items():
        after = [score.scale * run.last(after_name) for run in groups[method] if run.last(after_name) is not None]
        if after:
            mean = sum(after) / len(after)
            axes.plot(line.x[-1], mean, "o", color=COLOURS[found[method].colour], markerfacecolor="none")
    priors = [score.scale * run.last("label_prior") for run in runs if run.last("label_prior") is not None]
    if priors and not metric and share_samples(runs):
        prior = sum(priors) / len(priors)
        axes.axhline(prior, color="grey", linewidth=1, linestyle=(0, (1, 3)), label="label prior alone")
    draw_intervals(axes, lines, found)
    config = runs[0].config
    title = f"{short_name(config.data)}, {config.clients} clients, {config.partition}"
    title = ", ".join(filter(None, [title, samples_of(runs)]))
    axes.set_title(textwrap.fill(title, WIDTH), loc="left")
    drawn = "shaded" if shaded(list(lines.values())) else "bars at the end"
    said = caption([line.num_seeds for line in lines.values()], drawn=drawn)
    axes.set_xlabel("\n".join(["round", *textwrap.wrap(said, WIDTH)]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(f"{score.axis('before local training')}\n(o after it)")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
