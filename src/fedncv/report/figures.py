"""Write the figures as files, for papers and slides, with the numbers of the page and the CSV files."""

from pathlib import Path
from typing import Any

from fedncv.comparison import summary
from fedncv.report import names, series
from fedncv.report.gather import Results
from fedncv.report.names import OURS
from fedncv.report.table import scaled

# Okabe and Ito's colours, which colour-blind readers can distinguish; line styles repeat the information.
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6A51A3", "#333333"]
STYLES = ["-", "--", ":", "-."]
CHARACTER = 0.075  # inches, of the font size below
PLAIN: Any = {"svg.hashsalt": "fedncv", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


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
                figure.savefig(path, dpi=150, metadata=metadata)
                written.append(path)
    return written


def look(results: Results, method: str) -> dict[str, Any]:
    """Return the colour and style of a method, the same in every figure and on the page."""
    i = sorted(results.methods, key=lambda each: each != OURS).index(method)
    width = 2.6 if method == OURS else 1.4
    if i == 0:
        return {"color": COLOURS[0], "linestyle": "-", "linewidth": width}
    return {"color": COLOURS[1 + (i - 1) % 7], "linestyle": STYLES[(i - 1) // 7 % 4], "linewidth": width}


def curves(results: Results) -> Any:
    """Plot the score before local training against rounds, one panel per column, as in Figs. 1 and 3."""
    columns = [column for column in results.columns if "before" in series.curves(column)]
    if not columns:
        return None
    figure, panels = _panels(len(columns), height=3.1)
    by, some = results.score.scale, series.drawn(results)
    for panel, column in zip(panels, columns, strict=False):
        for method, points in series.curves(column)["before"].items():
            if method not in some:
                continue
            rounds = [p.round for p in points]
            style = look(results, method)
            panel.plot(rounds, [by * p.mean for p in points], label=names.method(method), gid=method, **style)
            if len(results.methods) <= 8 and points and points[-1].num_seeds >= 5:
                low, high = [by * (p.low or 0.0) for p in points], [by * (p.high or 0.0) for p in points]
                panel.fill_between(rounds, low, high, color=style["color"], alpha=0.12, linewidth=0)
        prior = column.prior()
        if prior is not None:
            panel.axhline(100 * prior, color="grey", linewidth=1, linestyle=(0, (1, 3)), label="label prior alone")
        panel.set_title(column.title, loc="left")
        panel.set_xlabel("round")
        panel.set_ylabel(results.score.axis("before"))
        if results.score.unit:
            low, high = panel.get_ylim()
            panel.set_ylim(max(0, low), min(100.5, high))
        panel.grid(alpha=0.25)
    few = f"{len(some)} of {len(results.methods)} methods: FedNCV and the best others at the end"
    _legend(figure, panels, title=few if len(some) < len(results.methods) else None)
    return figure


def dots(results: Results) -> Any:
    """Plot final scores, before (open) and after (filled), with 95 % intervals over seeds, one panel per column."""
    columns = [column for column in results.columns if column.runs]
    if not columns:
        return None
    figure, panels = _panels(len(columns), height=0.8 + 0.24 * len(results.methods), names_of=results.methods)
    for panel, column in zip(panels, columns, strict=True):
        for metric, shift in (("before", 0.14), ("after", -0.14)):
            for method, seeds in column.scores(metric).items():
                each, at = scaled(summary(list(seeds.values())), results.score.scale), shift - _row(results, method)
                colour = COLOURS[0] if method == OURS else COLOURS[-1]
                fill = colour if metric == "after" else "white"
                if each.num_seeds > 1:
                    panel.plot([each.low, each.high], [at, at], color=colour, linewidth=1, alpha=0.6)
                size = 6 if method == OURS else 4.5
                panel.plot(each.mean, at, "o", ms=size, color=colour, mfc=fill, gid=f"{method} {metric}", zorder=3)
        if column.prior() is not None:
            panel.axvline(100 * (column.prior() or 0.0), color="grey", linewidth=1, linestyle=(0, (1, 3)))
        panel.set_title(column.title, loc="left")
        panel.set_xlabel(results.score.axis())
        if results.score.unit:
            low, high = panel.get_xlim()
            panel.set_xlim(max(0, low), min(102, high))
        panel.grid(alpha=0.25)
    dot: dict[str, Any] = {"color": COLOURS[-1], "ms": 4.5}
    panels[0].plot([], [], "o", mfc="white", label="before local training", **dot)
    panels[0].plot([], [], "o", label="after it", **dot)
    panels[0].plot([], [], color=COLOURS[-1], linewidth=1, label="95 % interval over seeds")
    if any(column.prior() is not None for column in columns):
        panels[0].plot([], [], color="grey", linewidth=1, linestyle=(0, (1, 3)), label="label prior alone")
    _legend(figure, panels)
    return figure


def clients(results: Results) -> Any:
    """Plot the spread of the clients' final scores before local training."""
    columns = [column for column in results.columns if "before" in series.clients(column)]
    if not columns:
        return None
    figure, panels = _panels(len(columns), height=0.8 + 0.24 * len(results.methods), names_of=results.methods)
    for panel, column in zip(panels, columns, strict=False):
        found, by = series.clients(column)["before"], results.score.scale
        for method, (q05, q25, q50, q75, q95) in found.items():
            i, colour = _row(results, method), look(results, method)["color"]
            panel.barh(-i, by * (q95 - q05), left=by * q05, height=0.2, color=colour, alpha=0.4)
            panel.barh(-i, by * (q75 - q25), left=by * q25, height=0.6, color=colour, alpha=0.6)
            panel.plot([by * q50] * 2, [-i - 0.38, -i + 0.38], color="black", linewidth=2)
        if results.score.unit:
            panel.set_xlim(0, 100)
        panel.set_xlabel(results.score.axis("of single clients before"))
        panel.set_title(column.title, loc="left")
    return figure


def scale(results: Results) -> Any:
    """Plot the final score against the number of clients, before and after, as in Fig. 2."""
    found = series.over_clients(results)
    if not found:
        return None
    figure, panels = _panels(2 * len(found), height=3.1)
    cells = [(data, metric) for data in found for metric in ("before", "after")]
    for panel, (data, metric) in zip(panels, cells, strict=False):
        for method, points in found[data].get(metric, {}).items():
            values = [results.score.scale * point.mean for _, point in points]
            style = look(results, method)
            panel.plot([n for n, _ in points], values, marker="o", label=names.method(method), gid=method, **style)
        panel.set_title(f"{names.dataset(data)}, {metric}", loc="left")
        panel.set_xlabel("clients")
        panel.set_ylabel(results.score.axis())
        panel.grid(alpha=0.25)
    _legend(figure, panels)
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


def _legend(figure: Any, panels: list[Any], *, title: str | None = None) -> None:
    """Add a legend below the panels, in as many columns as its longest label allows; the figure grows by its lines."""
    found: dict[str, Any] = {}
    for panel in panels:
        for line, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, line)
    wide = 0.6 + CHARACTER * max(map(len, found), default=0)
    columns = max(1, min(len(found), int(figure.get_figwidth() / wide)))
    lines = -(-len(found) // columns) + (title is not None)
    figure.set_figheight(figure.get_figheight() + 0.2 * lines + 0.1)
    figure.legend(
        found.values(), found.keys(), loc="outside lower center", ncols=columns, frameon=False, title=title
    )  # fmt: skip
