"""Write the figures as files, for papers and slides, with the numbers of the page and the CSV files."""

import textwrap
from pathlib import Path
from typing import Any

from fedncv.comparison import summary
from fedncv.figures import COLOURS, Line, caption, draw_intervals, draw_lines, drawn, looks, shaded
from fedncv.files import write_atomically
from fedncv.report import names, series
from fedncv.report.gather import Results
from fedncv.report.table import scaled

CHARACTER = 0.075  # inches, of the font size below
PLAIN: Any = {"svg.hashsalt": "fedncv", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
PRIOR: dict[str, Any] = {"color": "grey", "linewidth": 1, "linestyle": (0, (1, 3))}


def save_all(results: Results, folder: Path) -> list[Path]:
    """Write every figure as PNG and SVG; equal results give equal files."""
    import matplotlib as mpl

    written = []
    with mpl.rc_context(PLAIN):
        for name, draw in (("curves", curves), ("dots", dots), ("clients", clients), ("scale", scale)):
            figure = draw(results)
            for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
                path = folder / f"{name}.{suffix}"
                if figure is None:
                    path.unlink(missing_ok=True)  # from an earlier report
                    continue
                write_atomically(path, drawn(figure, suffix, metadata=metadata))
                written.append(path)
    return written


def curves(results: Results) -> Any:
    """Plot the score before local training against rounds, one panel per column, as in Figs. 1 and 3."""
    columns = [column for column in results.columns if "before" in series.curves(column)]
    if not columns:
        return None
    figure, panels = _panels(len(columns), height=3.1)
    some, found = series.drawn(results), looks(results.methods)
    seeds_of: list[int] = []
    bands = True
    for panel, column in zip(panels, columns, strict=False):
        by_method = series.curves(column)["before"]
        lines = {method: _line(by_method[method], results.score.scale) for method in some if method in by_method}
        draw_lines(panel, lines, labels=_labels(results), found=found, bold=results.focus)
        prior = column.prior()
        if prior is not None:
            panel.axhline(100 * prior, label="label prior alone", **PRIOR)
        draw_intervals(panel, lines, found)
        seeds_of += [line.num_seeds for line in lines.values()]
        bands = bands and shaded(list(lines.values()))
        panel.set_title(column.title, loc="left")
        panel.set_xlabel("round")
        panel.set_ylabel(results.score.axis("before"))
        if results.score.unit:
            low, high = panel.get_ylim()
            panel.set_ylim(max(0, low), min(100.5, high))
        panel.grid(alpha=0.25)
    focus = f"{names.method(results.focus)} and the best others" if results.focus in some else "the best"
    few = f"{len(some)} of {len(results.methods)} methods: {focus} at the end"
    said = caption(seeds_of, drawn="shaded" if bands else "bars at the end")
    _legend(figure, panels, title=few if len(some) < len(results.methods) else None, caption=said)
    return figure


def _labels(results: Results) -> dict[str, str]:
    return {method: names.method(method) for method in results.methods}


def _line(points: list[series.Point], by: float, x: list[float] | None = None) -> Line:
    return Line(
        x or [float(p.round) for p in points],
        [by * p.mean for p in points],
        [None if p.low is None else by * p.low for p in points],
        [None if p.high is None else by * p.high for p in points],
        min(p.num_seeds for p in points),
    )


def dots(results: Results) -> Any:
    """Plot final scores, before (open) and after (filled), with 95 % intervals over seeds, one panel per column."""
    columns = [column for column in results.columns if column.runs]
    if not columns:
        return None
    figure, panels = _panels(len(columns), height=0.8 + 0.24 * len(results.methods), names_of=results.methods)
    found, seeds_of = looks(results.methods), set()
    for panel, column in zip(panels, columns, strict=True):
        for metric, shift in (("before", 0.14), ("after", -0.14)):
            for method, seeds in column.scores(metric).items():
                each, at = scaled(summary(list(seeds.values())), results.score.scale), shift - _row(results, method)
                colour = COLOURS[found[method].colour]
                fill = colour if metric == "after" else "white"
                if each.num_seeds > 1:
                    panel.plot([each.low, each.high], [at, at], color=colour, linewidth=1, alpha=0.7)
                size = 6 if method == results.focus else 4.5
                panel.plot(each.mean, at, "o", ms=size, color=colour, mfc=fill, gid=f"{method} {metric}", zorder=3)
                seeds_of.add(each.num_seeds)
        if column.prior() is not None:
            panel.axvline(100 * (column.prior() or 0.0), **PRIOR)
        panel.set_title(column.title, loc="left")
        panel.set_xlabel(results.score.axis())
        if results.score.unit:
            low, high = panel.get_xlim()
            panel.set_xlim(max(0, low), min(102, high))
        panel.grid(alpha=0.25)
    dot: dict[str, Any] = {"color": COLOURS[-1], "ms": 4.5}
    panels[0].plot([], [], "o", mfc="white", label="before local training", **dot)
    panels[0].plot([], [], "o", label="after it", **dot)
    if any(column.prior() is not None for column in columns):
        panels[0].plot([], [], label="label prior alone", **PRIOR)
    _legend(figure, panels, caption=caption(seeds_of, drawn="lines"))
    return figure


def clients(results: Results) -> Any:
    """Plot the spread of the clients' final scores before local training."""
    columns = [column for column in results.columns if "before" in series.clients(column)]
    if not columns:
        return None
    figure, panels = _panels(len(columns), height=0.8 + 0.24 * len(results.methods), names_of=results.methods)
    found, by, seeds_of = looks(results.methods), results.score.scale, set()
    for panel, column in zip(panels, columns, strict=False):
        for method, (q05, q25, q50, q75, q95) in series.clients(column)["before"].items():
            i, colour = _row(results, method), COLOURS[found[method].colour]
            panel.barh(-i, by * (q95 - q05), left=by * q05, height=0.2, color=colour, alpha=0.4)
            panel.barh(-i, by * (q75 - q25), left=by * q25, height=0.6, color=colour, alpha=0.6)
            panel.plot([by * q50] * 2, [-i - 0.38, -i + 0.38], color="black", linewidth=2)
            median = series.median_client(column, method, "before")
            seeds_of.add(median.num_seeds)
            if median.num_seeds > 1:
                ends = [by * median.low, by * median.high]
                panel.plot(ends, [-i, -i], color="black", linewidth=1, marker="|", ms=4, gid=f"{method} interval")
        if results.score.unit:
            panel.set_xlim(0, 100)
        panel.set_xlabel(results.score.axis("of single clients before"))
        panel.set_title(column.title, loc="left")
    said = caption(seeds_of, drawn="black line around the median client").replace("Mean over", "All clients of")
    _legend(figure, panels, caption=f"Box: middle half of the clients; thin bar: 5 % to 95 %. {said}")
    return figure


def scale(results: Results) -> Any:
    """Plot the final score against the number of clients, before and after, as in Fig. 2."""
    over = series.over_clients(results)
    if not over:
        return None
    figure, panels = _panels(2 * len(over), height=3.1)
    found, seeds_of = looks(results.methods), set()
    for panel, (data, metric) in zip(panels, [(d, m) for d in over for m in ("before", "after")], strict=False):
        by_method = over[data].get(metric, {})
        for i, (method, points) in enumerate(by_method.items()):
            line = _line([p for _, p in points], results.score.scale, [float(n) for n, _ in points])
            style = found[method].style | {"linewidth": 2.6 if method == results.focus else 1.4}
            panel.plot(line.x, line.mean, marker="o", label=names.method(method), gid=method, **style)
            shift = 1 + 0.01 * (i - len(by_method) / 2)  # bars beside each other
            for x, low, high in zip(line.x, line.low, line.high, strict=True):
                if low is not None:
                    at = {"color": style["color"], "linewidth": 1, "alpha": 0.7, "gid": f"{method} interval"}
                    panel.plot([x * shift] * 2, [low, high], **at)
            seeds_of.add(line.num_seeds)
        panel.set_title(f"{data}, {metric}", loc="left")
        panel.set_xlabel("clients")
        panel.set_ylabel(results.score.axis())
        if results.score.unit:
            low, high = panel.get_ylim()
            panel.set_ylim(max(0, low), min(100.5, high))
        panel.grid(alpha=0.25)
    _legend(figure, panels, caption=caption(seeds_of, drawn="bars"))
    return figure


def _row(results: Results, method: str) -> int:
    """Return the row of a method, the same in every panel."""
    return results.methods.index(method)


def _panels(count: int, *, height: float, names_of: list[str] | None = None) -> tuple[Any, list[Any]]:
    """Make up to four panels per row, with the methods' names at the first one of each row."""
    from matplotlib.figure import Figure

    down = -(-count // 4)
    across = -(-count // down)
    titles = [names.method(method) for method in names_of or []]
    side = CHARACTER * max(map(len, titles), default=0)
    wide = max(4.0, 2.6 * across) + side if titles else max(5.5, 3.6 * across)
    figure = Figure(figsize=(wide, height * down), layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False, sharey=bool(titles)).flat)
    for spare in panels[count:]:
        spare.set_axis_off()
    if titles:
        panels[0].set_yticks([-i for i in range(len(titles))], titles)
        panels[0].set_ylim(0.6 - len(titles), 0.6)
    return figure, panels[:count]


def _legend(figure: Any, panels: list[Any], *, title: str | None = None, caption: str = "") -> None:
    """Add a legend below the panels, in as many columns as its longest label allows, and a caption below the legend.

    The figure grows by their lines.
    """
    found: dict[str, Any] = {}
    for panel in panels:
        for line, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, line)
    wide = 0.6 + CHARACTER * max(map(len, found), default=0)
    columns = max(1, min(len(found), int(figure.get_figwidth() / wide)))
    said = textwrap.wrap(caption, int(figure.get_figwidth() / (0.8 * CHARACTER)))
    lines = -(-len(found) // columns) + (title is not None) if found else 0
    below, legend = 0.16 * len(said) + 0.05, 0.215 * lines + 0.15  # inches
    height = figure.get_figheight() + below + legend
    figure.set_figheight(height)
    bottom = (below + legend) / height
    figure.get_layout_engine().set(rect=(0, bottom, 1, 1 - bottom))
    figure.text(0.01, 0.04 / height, "\n".join(said), fontsize=7.5, color="#555555", gid="caption")
    if found:
        at: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, below / height)}
        figure.legend(found.values(), found.keys(), ncols=columns, frameon=False, title=title, **at)
