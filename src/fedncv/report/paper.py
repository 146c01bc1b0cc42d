"""The paper's numbers: Table 1, and the claims in its text about figures.

This module alone decides whether a run is one of the paper's, so that no page speaks of the paper where it is not.
"""

import csv
import re
from collections.abc import Iterable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fedncv.config import Settings, named

# Settings that the paper does not state. A column in which any other setting has another value is not the paper's:
# another model, task or optimizer, clients that fail, …
OPEN = (
    "data", "lr", "schedule", "batch_size", "momentum", "weight_decay", "buffers", "test_share", "eval_every",
    "after_every", "availability", "diverged", "dtype",
)  # fmt: skip
PROTOCOL = {
    f.name: getattr(Settings(), f.name) for f in fields(Settings) if f.name in set(named("protocol")) - set(OPEN)
}
# Our name for each of the paper's methods. Its FedNCV is compared with both readings of its equations.
ROWS = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "fedrep": "FedRep",
    "fedper": "FedPer",
    "pfedsim": "pFedSim",
    "fedncv": "FedNCV",
    "fedncv-paper": "FedNCV",
}
COLUMNS = {"cifar10": "cifar10", "cifar100": "cifar100", "tiny_imagenet": "tinyimagenet", "emnist": "emnist"}

# Fig. 2, in its text: points of accuracy lost from 100 to 1,000 clients, (before, after).
SIZES = (100, 1000)
DECLINE = {"fedncv": (1.66, 2.17), "pfedsim": (2.31, 2.35), "fedper": (3.58, 2.75), "fedrep": (10.18, 8.80)}
# Fig. 3: its methods, and the worst place of FedNCV according to its text.
TWELVE = (
    "fedavg", "fedavgm", "fedprox", "scaffold", "feddyn", "fedgen", "fedlc", "moon", "fedrep", "fedper",
    "pfedsim", "fedncv",
)  # fmt: skip
PLACE = {"mnist": 2, "fashion_mnist": 2, "svhn": 2, "cinic10": 3}


def speaks_of(datasets: Iterable[str]) -> bool:
    """Return whether the paper has numbers or claims for any of these datasets."""
    return any(data in (*COLUMNS, *PLACE) for data in datasets)


def is_of(study: str, datasets: Iterable[str]) -> bool:
    """Return whether a study is a table or a figure of the paper, with any of its datasets."""
    return study in ("table1", "fig1", "fig2", "fig3") and speaks_of(datasets)


def title(text: str, datasets: Iterable[str]) -> str:
    """Return a study's title without the number of a table or figure that has none of these datasets.

    >>> title("Fig. 1: accuracy against rounds", ["digits"]), title("Fig. 1: accuracy against rounds", ["cifar10"])
    ('Accuracy against rounds', 'Fig. 1: accuracy against rounds')
    """
    found = re.fullmatch(r"(?:Table|Fig\.) \d+: (.)(.*)", text)
    return text if found is None or speaks_of(datasets) else found[1].upper() + found[2]


class Printed(NamedTuple):
    mean: float  # %
    deviation: float


@cache
def table1() -> dict[tuple[str, str, str], Printed]:
    """Return (dataset, method, before or after) -> the printed value."""
    found: dict[tuple[str, str, str], Printed] = {}
    text = Path(__file__).with_name("paper_table1.csv").read_text(encoding="utf-8")
    rows = {row["method"]: row for row in csv.DictReader(text.splitlines())}
    for data, column in COLUMNS.items():
        for method, name in ROWS.items():
            for metric in ("before", "after"):
                key = f"{column}_{metric}"
                found[data, method, metric] = Printed(float(rows[name][key]), float(rows[name][f"{key}_std"]))
    return found


def printed(data: str, method: str, metric: str) -> Printed | None:
    return table1().get((data, method, metric))


def follows(settings: Settings) -> bool:
    """Return whether the settings are the paper's protocol."""
    return all(getattr(settings, name) == value for name, value in PROTOCOL.items())


def follows_but_for_size(settings: Settings) -> bool:
    """Return whether the settings are those of Fig. 2: any number of clients, a tenth of them per round."""
    return 10 * settings.per_round == settings.clients and follows(replace(settings, clients=100, per_round=10))
