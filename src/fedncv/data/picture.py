"""Plot the samples of each client: clients from left to right, classes from top to bottom.

The colour is the share of the class in a client's samples, white for none; the bars above show the clients' sizes.
Up to 30 clients are plotted in their own order, with counts as numbers. More clients are sorted by their largest
class, to group similar ones. Of more than 2,000 clients, 2,000 are plotted, evenly spaced in that order.
"""

from pathlib import Path

import numpy as np

from fedncv.data.owners import Indices
from fedncv.data.statistics import Statistics

WRITTEN_OUT = 30  # clients whose counts can be read as numbers
DRAWN = 2_000  # columns that a picture of this width can show


def drawn_order(counts_NK: Indices) -> Indices:
    """Return the clients to draw, from left to right."""
    num_clients = len(counts_NK)
    if num_clients <= WRITTEN_OUT:
        return np.arange(num_clients)
    share_N = counts_NK.max(axis=1) / counts_NK.sum(axis=1)
    order_N = np.lexsort((-share_N, counts_NK.argmax(axis=1)))
    step = -(-num_clients // DRAWN)
    return order_N[::step]


def draw(stats: Statistics, title: str, path: Path) -> None:
    """Write the picture; the format follows the suffix."""
    from matplotlib.figure import Figure

    num_clients, num_classes = stats.counts.shape
    order = drawn_order(stats.counts)
    counts, sizes = stats.counts[order], stats.sizes[order]
    shares = counts / sizes[:, None]
    width = 4 + 0.55 * num_clients if num_clients <= WRITTEN_OUT else 11
    height = 2.4 + min(max(0.32 * num_classes, 2.5), 6)
    figure = Figure(figsize=(max(width, 6.5), height), dpi=150, layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, max((height - 2.4) / 1.2, 2)])

    place = np.arange(len(order))
    if num_clients <= WRITTEN_OUT:
        top.bar(place, sizes, width=0.8, color="#4c6a92")
    else:
        top.stairs(sizes, np.arange(len(order) + 1) - 0.5, fill=True, color="#4c6a92")
    if sizes.max() > 50 * sizes.min():
        top.set_yscale("log")
    else:
        top.set_ylim(bottom=0)
    top.set_ylabel("samples")
    top.set_title(title, loc="left", fontsize=10)
    top.spines[["top", "right"]].set_visible(False)

    held = np.ma.masked_equal(shares.T, 0)  # white only if there is none
    image = below.imshow(held, aspect="auto", cmap="YlGnBu", vmin=0, vmax=1, interpolation="nearest")
    below.set_ylabel("class")
    if num_classes <= 30:
        below.set_yticks(np.arange(num_classes))
    if num_clients <= WRITTEN_OUT:
        below.set_xticks(place)
        below.set_xlabel("client (numbers: samples of the class)")
        if num_classes <= 30:
            for u, k in zip(*np.nonzero(counts), strict=True):
                colour = "white" if shares[u, k] > 0.55 else "black"
                below.text(u, k, str(counts[u, k]), ha="center", va="center", fontsize=7, color=colour)
    else:
        skipped = "" if len(order) == num_clients else f", {len(order):,} of them drawn"
        below.set_xlabel(f"{num_clients:,} clients, sorted by their largest class{skipped}")
    figure.colorbar(image, ax=below, label="share of the client's samples", pad=0.01, fraction=0.04)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot write the picture {path}: {error}") from None
