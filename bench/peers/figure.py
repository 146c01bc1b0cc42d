"""Draw the results of run_all.py: a panel per setting, a bar per peer; the line at 1 is the plain loop.

    PYTHONPATH=src:bench python bench/peers/figure.py results.jsonl docs/figures/peers.png

If a peer was run several times on a setting, its latest line counts.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from peers.run_all import PLAIN, TITLES, Line
from peers.settings import SETTINGS

matplotlib.use("Agg")
from matplotlib import pyplot as plt

OURS, OTHERS, LOOP = "#1f77b4", "#b8bcc2", "#6b7075"
ORDER = [
    "ours, 5 seeds together",
    "ours",
    PLAIN,
    "pfl",
    "pfl, 5 processes",
    "BlazeFL",
    "BlazeFL, processes",
    "FL-bench",
]
assert set(ORDER) == set(TITLES.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("figure", type=Path)
    arguments = parser.parse_args()
    found: dict[str, dict[str, Line]] = {}
    for text in arguments.results.read_text().splitlines():
        line = json.loads(text)
        found.setdefault(line["setting"], {})[line["peer"]] = line
    arguments.figure.parent.mkdir(parents=True, exist_ok=True)
    draw(dict(sorted(found.items())), arguments.figure)


def draw(found: dict[str, dict[str, Line]], path: Path) -> None:
    plt.rcParams.update({"font.size": 10, "font.family": "DejaVu Sans"})
    names = [name for name in ORDER if any(name in lines for lines in found.values())]
    columns = 1 if len(found) == 1 else 2
    rows = -(-len(found) // columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(1.6 + 4.2 * columns, rows * (0.29 * len(names) + 0.5) + 0.9),
        sharex=True, sharey=True, squeeze=False, layout="constrained",
    )  # fmt: skip
    for axes, (setting, lines) in zip(panels.flat, found.items(), strict=False):
        panel(axes, setting, lines, names)
    for axes in panels.flat[len(found) :]:
        axes.set_visible(False)
    done = [line for lines in found.values() for line in lines.values() if "failed" not in line]
    ratios = [ratio for lines in found.values() for line in lines.values() if (ratio := times(line, lines))]
    most = max([2.0, *ratios])
    panels[0, 0].set_xlim(min([0.5, *ratios]) / 1.2, most * max(4.0, most**0.55))  # room for the numbers
    panels[0, 0].set_yticks(range(len(names)), [labelled(name, done) for name in names])
    panels[0, 0].set_ylim(len(names) - 0.4, -0.6)
    machine = ", ".join(dict.fromkeys(f"{line['device']}, torch {line['torch']}" for line in done))
    figure.supxlabel(f"times the plain PyTorch loop, log scale   ({machine})", fontsize=10)
    figure.suptitle("FedAvg, training samples per second: the same samples, clients and model for all", fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def panel(axes: Any, setting: str, lines: dict[str, Line], names: list[str]) -> None:
    axes.set_xscale("log")
    axes.axvline(1.0, color=LOOP, linewidth=1)
    for row, name in enumerate(names):
        line = lines.get(name, {"failed": "not run"})
        ratio = times(line, lines)
        if ratio is None:
            text = line["failed"] if "failed" in line else f"{line['samples_per_s']:,.0f}, and no plain loop"
            axes.text(1.06, row, f"{text:.48}", va="center", color="#b03a2e", fontsize=8)
            continue
        axes.barh(row, ratio - 1, left=1, height=0.7, color=color(name))
        rate = f"{line['samples_per_s']:,.0f}"
        label = f"{rate} samples/s" if name == PLAIN else f"{ratio:.{1 if ratio >= 9.95 else 2}f}×  {rate}"
        axes.text(max(ratio, 1.0) * 1.08, row, label, va="center", fontsize=9)
    axes.set_title(f"{setting}   {SETTINGS[setting].title}", loc="left", fontsize=10, fontweight="bold")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}×")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def times(line: Line, lines: dict[str, Line]) -> float | None:
    """Return the ratio to the plain loop of the same setting; None if one of them failed."""
    plain, rate = lines.get(PLAIN, {}).get("samples_per_s"), line.get("samples_per_s")
    return rate / plain if plain and rate else None


def labelled(name: str, done: list[Line]) -> str:
    """Return the name of a peer with its version, unless that is ours or PyTorch's."""
    versions = dict.fromkeys(line["version"] for line in done if line["peer"] == name)
    return name if name.startswith("ours") or name == PLAIN else " ".join([name, *versions])


def color(name: str) -> str:
    return OURS if name.startswith("ours") else LOOP if name == PLAIN else OTHERS


if __name__ == "__main__":
    main()
