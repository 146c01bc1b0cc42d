"""Numbers of the plots: curves over rounds, accuracy over the number of clients, spread of clients, and work.

The page, the figures and the CSV files are all made from these.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fedncv.comparison import Summary, reached, summary
from fedncv.files import is_intact, parse
from fedncv.report import names
from fedncv.report.gather import Column, Results, seconds
from fedncv.report.table import write_csv
from fedncv.results import PER_CLIENT, STANDARD_ERROR, UNSEEN, Run
from fedncv.study import PARTITION

QUANTILES = (5, 25, 50, 75, 95)
CURVES = (
    "before", "after", "before_client_mean", "before_worst_decile", "after_client_mean", "after_worst_decile",
    "pooled", "unseen_before", "unseen_after", "unseen_pooled", "loss",
)  # fmt: skip
SCORES = tuple(name for name in CURVES if name != "loss")  # these have the unit of the score
MORE = ("before_", "after_", f"{UNSEEN}before_", f"{UNSEEN}after_")  # begin the names of other metrics
DEFINED = "_defined"  # suffix of the number of clients for which a metric is defined
MOST_BEGUN = 60  # unfinished runs that are drawn in one column
MOST = 13  # methods that a reader can distinguish in one figure
VARIANCE = "variance"  # metrics that begin with this word have their own section


class Point(NamedTuple):
    """Mean over seeds at one measurement, with its 95 % interval (None with one seed)."""

    round: int
    samples: float
    bytes: float
    mean: float
    low: float | None
    high: float | None
    num_seeds: int


Curves = dict[str, dict[str, list[Point]]]  # metric -> method -> points


@lru_cache(maxsize=64)
def curves(column: Column) -> Curves:
    """Return every metric of every method, at the rounds where all its finished seeds have it."""
    wanted = [*CURVES, *more_metrics(column), *_variance_metrics(column)]
    found: Curves = {}
    for metric in wanted:
        by_method = {method: _curve(runs, metric) for method, runs in column.runs.items()}
        by_method = {method: points for method, points in by_method.items() if points}
        if by_method:
            found[metric] = by_method
    return found


def more_metrics(column: Column) -> list[str]:
    """Return the metrics that were measured before or after local training besides the score."""
    return _more_metrics([runs[0] for runs in column.runs.values()])


def _more_metrics(runs: list[Run]) -> list[str]:
    found: dict[str, None] = {}
    for run in runs:
        for row in run.rows:
            found |= {name: None for name in row if name.startswith(("before_", "after_"))}
    return [name for name in found if name not in CURVES and not name.endswith((PER_CLIENT, DEFINED, STANDARD_ERROR))]


def _variance_metrics(column: Column) -> list[str]:
    """Return all metrics except the ends of intervals, which are not curves."""
    found: dict[str, None] = {}
    for runs in column.runs.values():
        for row in runs[0].rows:
            found |= {name: None for name, value in row.items() if name.startswith(VARIANCE) and _is_number(value)}
    return [name for name in found if not name.endswith(("_low", "_high"))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Part(NamedTuple):
    """The curve of one unfinished run so far."""

    seed: int
    points: list[Point]


def begun(column: Column) -> dict[str, dict[str, list[Part]]]:
    """Return metric -> method -> the curve of each of its unfinished runs; of very many, those that are furthest."""
    runs = [(method, run) for method, each in column.begun.items() for run in each]
    runs = sorted(runs, key=lambda each: -each[1].rounds)[:MOST_BEGUN]
    found: dict[str, dict[str, list[Part]]] = {}
    for metric in (*CURVES, *_more_metrics([run for _, run in runs])):
        for method, run in runs:
            if points := _curve([run], metric):
                found.setdefault(metric, {}).setdefault(method, []).append(Part(run.config.seed, points))
    return found


def _curve(runs: list[Run], metric: str) -> list[Point]:
    rows: dict[int, list[dict[str, Any]]] = {}
    for run in runs:
        for row in run.rows:
            if _is_number(row.get(metric)):
                rows.setdefault(row["round"], []).append(row)
    points = []
    for t, group in sorted(rows.items()):
        if len(group) < len(runs):
            continue
        each = summary([float(row[metric]) for row in group])
        spent = [row.get("bytes_down", 0) + row.get("bytes_up", 0) for row in group]
        samples = [row.get("samples", 0) for row in group]
        low, high = (None, None) if each.num_seeds == 1 else (each.low, each.high)
        points.append(Point(t, _mean(samples), _mean(spent), each.mean, low, high, each.num_seeds))
    return points


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def drawn(results: Results) -> list[str]:
    """Return all methods; if too many, the focus and the best others by their final "before", mean over columns."""
    if len(results.methods) <= MOST:
        return results.methods
    last: dict[str, list[float]] = {}
    for column in results.columns:
        for method, points in curves(column).get("before", {}).items():
            last.setdefault(method, []).append(points[-1].mean)
    best = sorted(last, key=lambda method: (method != results.focus, -_mean(last[method])))[:MOST]
    return [method for method in results.methods if method in best]


def over_clients(results: Results) -> dict[str, dict[str, dict[str, list[tuple[int, Point]]]]]:
    """Return heading of a dataset -> metric -> method -> (clients, final value), if the number of clients varies."""
    found: dict[str, dict[str, dict[str, list[tuple[int, Point]]]]] = {}
    for column in results.columns:
        if "clients-" not in column.name:
            continue
        for metric in ("before", "after"):
            for method, points in curves(column).get(metric, {}).items():
                line = (
                    found.setdefault(column.where or names.dataset(column.data), {})
                    .setdefault(metric, {})
                    .setdefault(method, [])
                )
                line.append((column.clients, points[-1]))
    return found


@lru_cache(maxsize=64)
def clients(column: Column) -> dict[str, dict[str, list[float]]]:
    """Return metric -> method -> final quantiles over all clients of all finished seeds."""
    found: dict[str, dict[str, list[float]]] = {}
    for metric in ("before", "after"):
        for method, runs in column.runs.items():
            lists = [run.last(f"{metric}_clients") or [] for run in runs]
            values = [value for each in lists for value in each if value is not None]
            if values:
                found.setdefault(metric, {})[method] = np.percentile(values, QUANTILES).tolist()
    return found


def median_client(column: Column, method: str, metric: str) -> Summary:
    """Return the median client's final score: mean over seeds, with its interval."""
    lists = [run.last(f"{metric}_clients") or [] for run in column.runs[method]]
    known = [[value for value in each if value is not None] for each in lists]
    return summary([float(np.median(each)) for each in known if each])


def partition(column: Column) -> dict[str, Any] | None:
    """Return the recorded partition: counts of samples, clients × classes, or only sizes; None if not recorded.

    Of very many clients only the number of clients of each size is recorded. Their sizes are returned in order.
    """
    runs = [run for group in column.runs.values() for run in group]
    folders = [column.folder] if column.folder else []
    folders += [folder for run in runs for folder in (run.folder, run.folder.parent)]
    path = next((folder / PARTITION for folder in folders if (folder / PARTITION).exists()), None)
    if path is None:  # a federation records the clients' sizes in the row of round 0
        sizes = next((run.rows[0]["sizes"] for run in runs if run.rows and "sizes" in run.rows[0]), None)
        return None if not sizes else {"sizes": sizes}
    try:
        found: dict[str, Any] = parse(path.read_bytes())
        if not is_intact(found):
            raise ValueError("its checksum differs")
        if own := next((run for run in runs if run.folder == path.parent), None):
            _check_is_of(found, own)
        if "clients_of_size" in found:
            found["sizes"] = np.repeat(*np.array(found["clients_of_size"], dtype=np.int64))
        held = np.array(found["counts"] if "counts" in found else found["sizes"], dtype=np.int64)
        held.reshape(len(held), -1)
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged; delete it and repeat the study's command") from None
    return found if held.size else None


def _check_is_of(found: dict[str, Any], run: Run) -> None:
    """Raise ValueError if the partition is that of a run with other data, another partition or seed."""
    for name in ("data", "partition", "seed"):
        if found.get(name, value := getattr(run.config, name)) != value:
            raise ValueError(f"it is of {name} {found[name]}")


class Spent(NamedTuple):
    """Work and cost of one method in one column, mean over its finished seeds; None: unknown."""

    seeds: int
    samples: float
    gradients: float
    bytes_down: float
    bytes_up: float
    epsilon: float | None  # the largest of the runs'; None: not private
    delta: float | None
    seconds: float | None
    target: float
    reached: int  # seeds that reached the target
    rounds_to: float | None
    samples_to: float | None
    bytes_to: float | None


def work(column: Column, target: float | None = None) -> dict[str, Spent]:
    """Return each method's work; the default target is 90 % of the way from label prior to best mean "before"."""
    goal = default_target(column) if target is None else target
    found = {}
    for method, runs in column.runs.items():
        arrived = [each for each in (reached(run.rows, goal) for run in runs) if each is not None]
        clocks = [clock for clock in map(seconds, runs) if clock is not None]
        found[method] = Spent(
            seeds=len(runs),
            samples=_mean([run.last("samples") or 0 for run in runs]),
            gradients=_mean([run.last("gradients") or 0 for run in runs]),
            bytes_down=_mean([run.last("bytes_down") or 0 for run in runs]),
            bytes_up=_mean([run.last("bytes_up") or 0 for run in runs]),
            epsilon=max(spent) if None not in (spent := [run.last("epsilon") for run in runs]) else None,
            delta=runs[0].last("delta"),
            seconds=_mean(clocks) if len(clocks) == len(runs) else None,
            target=goal,
            reached=len(arrived),
            rounds_to=_mean([each.round for each in arrived]) if arrived else None,
            samples_to=_mean([each.samples for each in arrived]) if arrived else None,
            bytes_to=_mean([each.bytes for each in arrived]) if arrived else None,
        )
    return found


def default_target(column: Column) -> float:
    means = [summary(list(seeds.values())).mean for seeds in column.scores("before").values()]
    best, floor = max(means, default=0.0), column.prior() or 0.0
    goal = floor + 0.9 * (best - floor) if best > floor else best
    return round(goal, 2) if round(goal, 2) <= best else best


# ---- files ---------------------------------------------------------------------------------------------


def curves_csv(results: Results) -> str:
    header = ("column", "metric", "method", "round", "samples", "bytes", "mean", "low", "high", "seeds")
    lines: list[tuple[object, ...]] = []
    for column in results.columns:
        for metric, by_method in curves(column).items():
            for method, points in by_method.items():
                lines += [(column.name, metric, method, *(_plain(x) for x in point)) for point in points]
    return write_csv(header, lines)


def clients_csv(results: Results) -> str:
    header = ("column", "metric", "method", *(f"q{q:02}" for q in QUANTILES))
    lines: list[tuple[object, ...]] = []
    for column in results.columns:
        for metric, by_method in clients(column).items():
            lines += [(column.name, metric, method, *map(_plain, q)) for method, q in by_method.items()]
    return write_csv(header, lines)


def work_csv(results: Results, target: float | None = None) -> str:
    lines: list[tuple[object, ...]] = []
    for column in results.columns:
        for method, spent in work(column, target).items():
            lines.append((column.name, method, *map(_plain, spent)))
    return write_csv(("column", "method", *Spent._fields), lines)


def _plain(value: float | None) -> object:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value
