"""The paper's numbers: Table 1, and the claims in its text about figures."""

import csv
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fedncv.config import Settings, named

# The protocol of its tables; a column with another protocol has no printed value.
PROTOCOL = {name: getattr(Settings(), name) for name in named("paper")}
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
