"""Print rows of probes as tables: one line per method, and errors by round. Squared numbers are relative to
|full update|^2 unless stated otherwise."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from fedncv.files import parse, read_text

Row = dict[str, Any]
RELATIVE = ("mse", "bias2", "variance", "plain", "within", "between", "without", "best", "apart")
ENOUGH_SEEDS = 3  # for an interval over seeds
AIM = 3  # times less noise than a FedAvg round from the same models


class Number(NamedTuple):
    """A mean over frozen states, and half of its 95 % interval."""

    value: float
    half: float


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file. An incomplete last line is left out. Raise ValueError if a state occurs twice, because
    a mean would count it twice."""
    lines = read_text(path).split("\n")
    rows: list[Row] = []
    seen: set[tuple[Any, ...]] = set()
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = parse(line)
            state = federation(row), row["method"], row["seed"], row["round"]
            row["mse"], row["full2"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}, is not a row of `fedncv variance`") from None
        if state in seen:
            raise ValueError(
                f"{path}, line {number}: {state[1]}, seed {state[2]}, round {state[3]} occurs twice; "
                "keep one of the two lines"
            )
        seen.add(state)
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


def groups(rows: list[Row], name: str) -> dict[Any, list[Row]]:
    """Group rows by their value of ``name``, in the order of the rows."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row[name], []).append(row)
    return found


def panels(rows: list[Row]) -> dict[str, list[Row]]:
    """Group rows by federation."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(federation(row), []).append(row)
    return found


def federation(row: Row) -> str:
    return f"{row['data']}, {row['partition']}, {row['per_round']} of {row['clients']} clients"


def common(rows: list[Row]) -> list[Row]:
    """Return the rows at the states (seed and round) at which all methods were probed, so that their means can be
    compared. Return all rows if there is no such state."""
    states = [{(row["seed"], row["round"]) for row in some} for some in groups(rows, "method").values()]
    shared = set.intersection(*states)
    return [row for row in rows if (row["seed"], row["round"]) in shared] or rows


def against_fedavg(rows: list[Row]) -> list[Row]:
    """Add `less` = mse of FedAvg / mse, both absolute, to rows if FedAvg was probed at the same models. Rows of FedAvg
    itself and rows with another target are left out."""

    def models(row: Row) -> tuple[Any, ...]:
        return row["reference"], row["seed"], row["round"]

    fedavg = {models(row): row["mse"] for row in rows if row["method"] == "fedavg"}
    others = [row for row in rows if row["method"] != "fedavg" and row.get("aims", True) and row["mse"] > 0]
    return [row | {"less": fedavg[models(row)] / row["mse"]} for row in others if models(row) in fedavg]


def relative(row: Row, name: str) -> float:
    return float(row[name] / row["full2"]) if name.removesuffix("_low").removesuffix("_high") in RELATIVE else row[name]


def mean_of(rows: list[Row], name: str, *, absolute: bool = False) -> Number | None:
    """Return the mean over frozen states. From three seeds on the interval is over seeds (Student's t on the seeds'
    means). Otherwise it combines the states' own intervals as if independent, and covers only the draws."""
    found = [row for row in rows if row.get(name) is not None and np.isfinite(row[name])]
    if not found:
        return None

    def number(row: Row, name: str) -> float:
        return float(row[name]) if absolute else relative(row, name)

    value = float(np.mean([number(row, name) for row in found]))
    seeds = [np.mean([number(row, name) for row in some]) for some in groups(found, "seed").values()]
    if len(seeds) >= ENOUGH_SEEDS:
        half = stats.t.ppf(0.975, len(seeds) - 1) * np.std(seeds, ddof=1) / len(seeds) ** 0.5
        return Number(value, float(half))
    if name + "_low" not in found[0]:
        return Number(value, 0.0)
    halves = [(number(row, name + "_high") - number(row, name + "_low")) / 2 for row in found]
    return Number(value, float(np.sqrt(np.sum(np.square(halves))) / len(halves)))


ERROR = {
    "absolute": "E|error|²",
    "mse": "error",
    "bias2": "bias²",
    "within": "within",
    "between": "between",
    "cosine": "cosine",
}
MEMORY = {"beta": "β", "beta_best": "best β", "rho2": "ρ²", "without": "without", "best": "at best β"}


def print_tables(rows: list[Row]) -> None:
    """Print the tables, with an explanation of the numbers below them."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console() if Console().is_terminal else Console(width=140)

    def new(title: str, headings: list[str]) -> Table:
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("method", overflow="fold", min_width=24)
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        return table

    for where, some in panels(rows).items():
        rounds = sorted(groups(some, "round"))
        alike = common(some)
        states = "; ".join(f"{name}s {', '.join(map(str, sorted(groups(alike, name))))}" for name in ("round", "seed"))
        table = new(f"{where}\n{reference_of(some)}; mean over {states}", list(ERROR.values()))
        memory = new("memory of updates", list(MEMORY.values()))
        by_round = {
            "mse": new("error by round", [str(t) for t in rounds]),
            "times": new("plain / error by round", [str(t) for t in rounds]),
        }
        for method, mine in groups(alike, "method").items():
            name = method if aims(mine) else f"{method} *"
            table.add_row(name, *(_cell(mine, column) for column in ERROR))
            if any("beta_best" in row for row in mine):
                memory.add_row(name, *(_cell(mine, column) for column in MEMORY))
        for method, mine in groups(some, "method").items():
            name = method if aims(mine) else f"{method} *"
            for column, each in by_round.items():
                each.add_row(name, *(_cell([r for r in mine if r["round"] == t], column) for t in rounds))
        headings = [*map(str, rounds), "lowest", "highest", f"at least {AIM}"]
        less = new("E|error|² of a FedAvg round from the same models / E|error|², by round", headings)
        for method, mine in groups(against_fedavg(some), "method").items():
            found = [row["less"] for row in mine]
            cells = [_cell([r for r in mine if r["round"] == t], "less") for t in rounds]
            reached = f"{sum(x >= AIM for x in found)} of {len(found)}"
            less.add_row(method, *cells, _short(min(found)), _short(max(found)), reached)
        for each in (table, memory, *by_round.values(), less):
            if each.row_count:
                console.print(each)
    console.print(notes(rows), highlight=False)


def aims(rows: list[Row]) -> bool:
    return all(row.get("aims", True) for row in rows)


def reference_of(rows: list[Row]) -> str:
    references = list(groups(rows, "reference"))
    if all(row["reference"] == row["method"] for row in rows) and len(groups(rows, "method")) > 1:
        return "each method on its own path"
    return f"all at the models of {' and '.join(references)}'s run, memory in shadow"


def notes(rows: list[Row]) -> str:
    enough = all(len(groups(some, "seed")) >= ENOUGH_SEEDS for some in panels(rows).values())
    unit = "seed" if enough else "draw; numbers without one are exact"
    lines = [
        "E|error|²: of the aggregated update, over the draw of clients. All others are relative to |sum p Δ|², the",
        "method's own update with all clients. within: noise of mini-batches; between: differences of clients;",
        "without: the error without memory; plain: the error of FedAvg's weights on the same updates.",
        f"± 95 % intervals, unit of resampling: the {unit}.",
    ]
    if not enough and against_fedavg(rows):
        lines.append("Ratios to the error of a FedAvg round are not exact, and need three seeds for an interval.")
    if not aims(rows):
        lines.append("* has another target than sum p Δ (other weights or another scale): error around its own target.")
    return "\n".join(lines)


def _cell(rows: list[Row], name: str) -> str:
    if name == "times" and not aims(rows):
        return ""
    if name == "absolute":
        number = mean_of(rows, "mse", absolute=True)
        if number is None:
            return ""
        half = np.format_float_positional(number.half, precision=1, fractional=False)
        return _with_half(number, f"{number.value:#.3g}", half)
    number = mean_of(rows, name)
    return "" if number is None else _with_half(number, _short(number.value), _short(number.half))


def _with_half(number: Number, value: str, half: str) -> str:
    return f"{value} ± {half}" if number.half > max(1e-12, 1e-9 * abs(number.value)) else value


def _short(x: float) -> str:
    """Format with three digits, and with 0 below a thousandth.

    >>> _short(0.0123), _short(1.234), _short(12.34), _short(3e-21), _short(1 - 1e-15)
    ('0.012', '1.23', '12.3', '0', '1.00')
    """
    if abs(x) < 1e-12:
        return "0"
    size = round(abs(x), 3)
    return f"{x:.{3 if size < 1 else 2 if size < 10 else 1}f}"
