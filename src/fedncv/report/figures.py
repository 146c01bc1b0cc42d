"""The figures as files, for papers and slides: the same numbers as the page and the CSV."""

from pathlib import Path
from typing import Any

from fedncv.report import names, series
from fedncv.report.gather import Results
from fedncv.report.verdict import OURS

# Okabe and Ito's colours: told apart by colour-blind readers too; line styles repeat the information.
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6A51A3", "#333333"]
STYLES = ["-", "--", ":", "-."]
PLAIN: Any = {"svg.hashsalt": "fedncv", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def save_all(results: Results, folder: Path) -> list[Path]:
    """Every figure as PNG and SVG; equal results give equal files."""
    import matplotlib as mpl

    written = []
    with mpl.rc_context(PLAIN):
        for name, figure in (("curves", curves(results)), ("clients", clients(results)), ("scale", scale(results))):
            if figure is None:
                continue
            for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
                path = folder / f"{name}.{suffix}"
                figure.savefig(path, dpi=150, metadata=metadata)
                written.append(path)
    return written


def look(results: Results, method: str) -> dict[str, Any]:
    """The colour and style a method has in every figure, and on the page."""
    i = sorted(results.methods, key=lambda each: each != OURS).index(method)
    width = 2.6 if method == OURS else 1.4
    if i == 0:
        return {"color": COLOURS[0], "linestyle": "-", "linewidth": width}
    return {"color": COLOURS[1 + (i - 1) % 7], "linestyle": STYLES[(i - 1) // 7 % 4], "linewidth": width}


def curves(results: Results) -> Any:
    """The score before local training against rounds, a panel a column, as in Figs. 1 and 3."""
    columns = [column for column in results.columns if "before" in series.curves(column)]
    if not columns:
        return None
    figure, panels = _panels(len(columns), height=3.1)
    by = results.score.scale
    for panel, column in zip(panels, columns, strict=False):
        for method, points in series.curves(column)["before"].items():
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
    _legend(figure, panels)
    return figure


def clients(results: Results) -> Any:
    """Spread of single clients' scores before local training at the end."""
    columns = [column for column in results.columns if "before" in series.clients(column)]
    if not columns:
        return None
    figure, panels = _panels(len(columns), height=0.9 + 0.22 * len(results.methods))
    for panel, column in zip(panels, columns, strict=False):
        found, by = series.clients(column)["before"], results.score.scale
        for i, (method, (q05, q25, q50, q75, q95)) in enumerate(found.items()):
            colour = look(results, method)["color"]
            panel.barh(-i, by * (q95 - q05), left=by * q05, height=0.2, color=colour, alpha=0.4)
            panel.barh(-i, by * (q75 - q25), left=by * q25, height=0.6, color=colour, alpha=0.6)
            panel.plot([by * q50] * 2, [-i - 0.38, -i + 0.38], color="black", linewidth=2)
        panel.set_yticks([-i for i in range(len(found))], [names.method(method) for method in found])
        if results.score.unit:
            panel.set_xlim(0, 100)
        panel.set_xlabel(results.score.axis("of single clients before"))
        panel.set_title(column.title, loc="left")
    return figure


def scale(results: Results) -> Any:
    """The score at the end against the number of clients, before and after, as in Fig. 2."""
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


def _panels(count: int, *, height: float) -> tuple[Any, list[Any]]:
    """Up to four panels a row."""
    from matplotlib.figure import Figure

    across = min(count, 4 if count > 4 else count)
    down = -(-count // across)
    figure = Figure(figsize=(max(5.5, 3.6 * across), height * down + 0.5), layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for spare in panels[count:]:
        spare.set_axis_off()
    return figure, panels[:count]


def _legend(figure: Any, panels: list[Any]) -> None:
    found: dict[str, Any] = {}
    for panel in panels:
        for line, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, line)
    columns = max(3, round(figure.get_figwidth() / 1.9))
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns, frameon=False)
