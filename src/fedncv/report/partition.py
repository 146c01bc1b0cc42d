"""The section that shows which client holds which samples: a picture with axes and a colour scale, for every column."""

import base64
import io
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedncv.report import series
from fedncv.report.gather import Results

Indices = NDArray[np.int64]

IN_ORDER = 30  # clients that keep their own order, with their numbers on the axis; more are sorted to group alike ones
DRAWN = 2_000  # clients that a picture can show; of more, evenly spaced ones
TICKS = 16  # labels of an axis
COLOUR = (41, 120, 194)


def section(results: Results) -> str:
    parts: list[str] = []
    for column in results.columns:
        found = series.partition(column)
        if found is None:
            body = "<p class='soft'>These runs did not record their partition.</p>" if column.runs else ""
        elif "counts" in found:
            body = _classes(np.array(found["counts"], dtype=np.int64).reshape(len(found["counts"]), -1), found)
        else:
            body = _sizes_only(np.array(found["sizes"], dtype=np.int64), found)
        if body:
            opened = "" if parts else " open"
            parts.append(f"<details{opened}><summary>{escape(column.title)}</summary><div>{body}</div></details>")
    return "".join(parts)


def _classes(counts_NK: Indices, found: dict[str, Any]) -> str:
    num_clients, num_classes = counts_NK.shape
    order = _order(counts_NK)
    shares = counts_NK / np.maximum(counts_NK.sum(1, keepdims=True), 1)
    height = f"{min(max(1.15 * num_classes, 5), 26):.1f}rem"
    names = [str(name) for name in found.get("classes", range(num_classes))]
    step = -(-num_classes // 26)
    ticks = "".join(
        f"<span style='top:{100 * (k + 0.5) / num_classes:.2f}%'>{escape(names[k])}</span>"
        for k in range(0, num_classes, step)
    )
    stops = ", ".join(f"rgb({_rgb()} / {share**0.6:.3f}) {100 * share:g}%" for share in (0, 0.05, 0.2, 0.5, 0.75, 1))
    marks = "".join(f"<span style='top:{100 - at}%'>{at} %</span>" for at in (100, 50, 0))
    held = np.median((counts_NK > 0).sum(1))
    caption = (
        f"Colour: the class's share of the client's samples; blank: none. {_words(counts_NK.sum(1))} The median client "
        f"holds {held:.0f} of {num_classes} classes. {_about(found)}"
    )
    return (
        f"<div class='partition' role='img' aria-label='Which client holds which classes'>{_bars(counts_NK, order)}"
        f"<div class='axis' style='height:{height}'><b>class</b>{ticks}</div>"
        f"<img alt='' src='data:image/png;base64,{_pixels(shares[order])}' style='height:{height}'>"
        f"<div class='colours' style='height:{height}'>"
        f"<i style='background-image:linear-gradient(to top, {stops})'></i>{marks}</div>"
        f"{_clients_axis(num_clients, order, sorted_by='their largest class')}</div>"
        f"<p class='small soft'>{escape(caption)}</p>"
    )


def _sizes_only(sizes_N: Indices, found: dict[str, Any]) -> str:
    counts_N1 = sizes_N[:, None]
    order = _order(counts_N1)
    return (
        f"<div class='partition' role='img' aria-label='How many samples each client holds'>{_bars(counts_N1, order)}"
        f"{_clients_axis(len(sizes_N), order, sorted_by='size')}</div>"
        f"<p class='small soft'>{escape(f'{_words(sizes_N)} Their classes are not recorded. {_about(found)}')}</p>"
    )


def _order(counts_NK: Indices) -> Indices:
    """Return the clients from left to right: their own order if they are few, else sorted by largest class."""
    num_clients = len(counts_NK)
    if num_clients <= IN_ORDER:
        return np.arange(num_clients)
    share_N = counts_NK.max(1) / np.maximum(counts_NK.sum(1), 1)
    by_size = -counts_NK.sum(1) if counts_NK.shape[1] == 1 else -share_N
    return np.lexsort((by_size, counts_NK.argmax(1)))[:: -(-num_clients // DRAWN)]


def _pixels(shares_NK: NDArray[np.float64]) -> str:
    """Return a picture of one pixel per client and class, scaled by the browser: small, sharp, for light and dark."""
    from matplotlib.image import imsave

    pixels = np.zeros((*shares_NK.T.shape, 4))
    pixels[..., :3] = np.array(COLOUR) / 255
    pixels[..., 3] = np.ceil(32 * shares_NK.T**0.6) / 32  # few shades make a small file
    image = io.BytesIO()
    imsave(image, pixels, format="png")
    return base64.b64encode(image.getvalue()).decode()


def _bars(counts_NK: Indices, order: Indices) -> str:
    """Return the first row of the picture: the clients' sizes as bars, with their axis."""
    sizes = counts_NK.sum(1)[order]
    log = sizes.max() > 50 * max(sizes.min(), 1)
    heights = np.log10(sizes + 1) if log else sizes
    top = max(float(heights.max()), 1e-9)
    path = "".join(f"M{i} 100v{-100 * h / top:.1f}h.85v{100 * h / top:.1f}z" for i, h in enumerate(heights))
    middle = "" if log else f"<span style='top:50%'>{_number(sizes.max() / 2)}</span>"
    ends = f"<span style='top:0%'>{_number(sizes.max())}</span>{middle}<span style='top:100%'>0</span>"
    return (
        f"<div class='axis sizes'><b>samples{', log' if log else ''}</b>{ends}</div>"
        f"<svg viewBox='0 0 {len(sizes)} 100' preserveAspectRatio='none' aria-hidden='true'><path d='{path}'/></svg>"
        "<span></span>"
    )


def _clients_axis(num_clients: int, order: Indices, *, sorted_by: str) -> str:
    """Return the axis below: the number of each client, or how many clients are to the left."""
    shown = len(order)
    if num_clients <= IN_ORDER:
        at = range(0, shown, -(-shown // TICKS))
        ticks = [(100 * (i + 0.5) / shown, str(order[i])) for i in at]
        words = "client"
    else:
        ticks = [(25.0 * i, f"{round(num_clients * i / 4):,}") for i in range(5)]
        words = f"{num_clients:,} clients, sorted by {sorted_by}"
        words += f", {shown:,} of them drawn" if shown < num_clients else ""
    labels = "".join(f"<span style='left:{left:.2f}%'>{text}</span>" for left, text in ticks)
    return f"<span></span><div class='xaxis'>{labels}<b>{words}</b></div><span></span>"


def _words(sizes_N: Indices) -> str:
    return f"{len(sizes_N):,} clients hold {sizes_N.min():,} to {sizes_N.max():,} samples, {sizes_N.sum():,} in all."


def _about(found: dict[str, Any]) -> str:
    return f"Partition {found['partition']}, seed {found['seed']}." if "seed" in found else ""


def _rgb() -> str:
    return " ".join(map(str, COLOUR))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"
