"""Plot the probes of the update from their rows: five figures, with a panel for each federation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedncv.figures import drawn, looks
from fedncv.files import write_atomically
from fedncv.observatory.table import Row, aims, common, groups, mean_of, panels, reference_of, relative

Axes = Any
Look = dict[str, dict[str, Any]]  # method -> colour and line, the same in all figures
Draw = Callable[[Axes, list[Row], Look], None]
WIDTH = 5.6  # of a panel, inches: two panels side by side are readable on a page


def draw_all(rows: list[Row], folder: Path, *, prefix: str = "") -> list[Path]:
    """Write every figure for which the rows have data."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, tuple[Draw, Callable[[Row], bool]]] = {
        "error": (error_against_round, lambda _: True),
        "split": (split, lambda row: "within" in row),
        "beta": (error_against_beta, lambda row: "curve" in row),
        "alpha": (alphas, lambda row: "alpha_best" in row),
        "layers": (layers, lambda _: True),
    }
    look = {method: each.style for method, each in looks(groups(rows, "method")).items()}
    made = []
    for name, (draw, has) in pictures.items():
        if found := [row for row in rows if has(row)]:
            made.append(_panels(found, draw, look, folder / f"{prefix}{name}.png"))
    return made


def _panels(rows: list[Row], draw: Draw, look: Look, path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = panels(rows)
    size = (WIDTH * len(parts), 4.6)
    figure, grid = plt.subplots(
        1, len(parts), figsize=size, layout="constrained", squeeze=False, sharex=True, sharey=True
    )
    for axes, (where, some) in zip(grid[0], parts.items(), strict=True):
        draw(axes, some, look)
        axes.set_title(where, loc="left", fontsize=10)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    write_atomically(path, drawn(figure, "png"))
    plt.close(figure)
    return path


def _name(rows: list[Row]) -> str:
    return f"{rows[0]['method']}{'' if aims(rows) else ' *'}"


def _last(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["round"] == max(row["round"] for row in rows)]


def _legend(axes: Axes) -> None:
    """Add a legend below the figure, in as many columns as the names allow."""
    _, labels = axes.get_legend_handles_labels()
    columns = max(1, int(13 * WIDTH) // (6 + max(map(len, labels))))  # 13 letters an inch, 6 for the line before a name
    axes.legend(frameon=False, fontsize=8, ncols=min(3, columns), loc="upper left", bbox_to_anchor=(-0.05, -0.14))


def _log(axes: Axes) -> None:
    """Use a logarithmic axis with plain numbers, also if it spans less than a decade."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


def error_against_round(axes: Axes, rows: list[Row], look: Look) -> None:
    """Plot the mean squared error over the draw against the round, and the first method's full update."""
    methods = groups(rows, "method")
    own = reference_of(rows).startswith("each")
    for number, mine in enumerate(methods.values()):
        style, by_round = look[mine[0]["method"]], groups(mine, "round")
        rounds = sorted(by_round)
        found = [mean_of(by_round[t], "mse", absolute=True) for t in rounds]
        values, halves = [n.value for n in found if n], [n.half for n in found if n]
        apart = 0.006 * rounds[-1] * (number - (len(methods) - 1) / 2)  # so that error bars do not overlap
        aside = [t + apart for t in rounds]
        axes.errorbar(aside, values, yerr=halves, label=_name(mine), marker="o", markersize=4, capsize=2, **style)
        if number == 0:
            full = [mean_of(by_round[t], "full2", absolute=True) for t in rounds]
            label = f"|full update|² of {mine[0]['method']}"
            axes.plot(rounds, [n.value for n in full if n], color="grey", linestyle=(0, (1, 2)), label=label)
        if own:
            plain = [mean_of(by_round[t], "plain", absolute=True) for t in rounds]
            label = f"{mine[0]['method']}: FedAvg's weights on its updates"
            axes.plot(aside, [n.value for n in plain if n], ":", color=style["color"], label=label)
    _log(axes)
    axes.set_xlabel(f"round   ({reference_of(rows)})", fontsize=9)
    axes.set_ylabel("E |aggregated update - full update|²", fontsize=9)
    _legend(axes)


def split(axes: Axes, rows: list[Row], look: Look) -> None:
    """Plot the parts of the error over draw and batches: one bar per method, mean over the frozen states."""
    methods = groups(common(rows), "method")
    parts = {
        "between": ("clients differ (between)", "#D55E00"),
        "within": ("mini-batches (within)", "#56B4E9"),
        "bias2": ("bias²", "#000000"),
    }
    left = np.zeros(len(methods))
    places = np.arange(len(methods))[::-1]
    for part, (label, colour) in parts.items():
        found = [mean_of(mine, part, absolute=True) for mine in methods.values()]
        widths = np.array([max(0.0, n.value) if n else 0.0 for n in found])
        axes.barh(places, widths, left=left, color=colour, label=label, height=0.7)
        left += widths
    axes.set_yticks(places, [_name(mine) for mine in methods.values()], fontsize=8)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the grid
    for place, total in zip(places, left, strict=True):
        axes.annotate(
            f"{total:#.3g}", (total, place), (4, 0), textcoords="offset points", va="center", fontsize=8, bbox=box
        )
    axes.set_xlim(0, max(axes.get_xlim()[1], 1.18 * left.max()))
    states = ", ".join(map(str, sorted(groups(common(rows), "round"))))
    axes.set_xlabel(f"E |error|², mean over rounds {states}", fontsize=9)
    _legend(axes)


def error_against_beta(axes: Axes, rows: list[Row], look: Look) -> None:
    """mse(beta) = A - 2 beta B + beta^2 C at the last round, for every method with memory; first seed."""
    beta_G = np.linspace(-0.6, 1.3, 191)
    drawn: dict[tuple[float, ...], str] = {}
    for mine in groups(rows, "method").values():
        row = _last(mine)[0]
        a, b, c = (x / row["full2"] for x in row["curve"])
        style = look[row["method"]]
        same = tuple(round(x, 6) for x in (a, b, c))  # methods with the same memory share one curve
        if same not in drawn:
            drawn[same] = row["method"]
            axes.plot(beta_G, a - 2 * beta_G * b + beta_G**2 * c, **style)
            best = row["beta_best"]
            axes.plot(best, relative(row, "best"), "*", color=style["color"], markersize=14, zorder=3)
        numbers = f"β {row['beta']:.2f}, best {row['beta_best']:.2f}, ρ² {row['rho2']:.2f}"
        label = f"{row['method']}, round {row['round']}: {numbers}"
        axes.plot(row["beta"], relative(row, "mse"), "o", color=style["color"], markersize=8, zorder=4, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"β   (seed {rows[0]['seed']}; o in use, ★ best; 0 no memory)", fontsize=9)
    axes.set_ylabel("error of the aggregated update / |full update|²", fontsize=9)
    _legend(axes)


def alphas(axes: Axes, rows: list[Row], look: Look) -> None:
    """Plot alpha_u in use against the best one for the next round, one point per client and seed, at the last round."""
    seen: list[str] = []
    for mine in map(_last, groups(rows, "method").values()):
        style = look[mine[0]["method"]]
        used, best = (np.concatenate([row[name] for row in mine]) for name in ("alpha", "alpha_best"))
        if str((used, best)) in seen:  # methods with the same correction share one cloud
            continue
        seen.append(str((used, best)))
        left = [np.sum([row[f"drift_{name}"] for row in mine]) for name in ("without", "with", "best")]
        share = f"{left[1] / left[0]:.0%} of the spread left, {left[2] / left[0]:.0%} at best"
        label = f"{mine[0]['method']}, round {mine[0]['round']}: {share}"
        axes.plot(used, best, "o", color=style["color"], markersize=4, alpha=0.5, label=label)
    axes.axline((1, 1), slope=1, color="grey", linewidth=1)
    axes.set_xlabel("α of a client, in use   (0 FedAvg, 1 SCAFFOLD)", fontsize=9)
    axes.set_ylabel("its best α for the gradients that come", fontsize=9)
    _legend(axes)


def layers(axes: Axes, rows: list[Row], look: Look) -> None:
    """Plot the error of each module relative to its squared full update, mean over the frozen states."""
    methods = groups(common(rows), "method")
    names = rows[0]["layers"]
    for number, mine in enumerate(methods.values()):
        ratio = [np.array(row["layer_mse"]) / np.maximum(np.array(row["layer_full2"]), 1e-300) for row in mine]
        places = np.arange(len(names)) + 0.06 * (number - (len(methods) - 1) / 2)
        style = look[mine[0]["method"]]
        axes.plot(places, np.mean(ratio, axis=0), marker="o", linewidth=0.8, **style, label=_name(mine))
    axes.set_xticks(np.arange(len(names)), names, rotation=20, fontsize=8)
    _log(axes)
    axes.set_ylabel("error of the module / |its full update|²", fontsize=9)
    _legend(axes)
