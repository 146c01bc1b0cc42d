"""A table with an owner column: breast cancer, five hospitals.

scikit-learn's breast cancer table has no hospitals, so they are made up here: larger tumours go more often to the
hospitals with higher numbers. The same run from a terminal, on a file of your own:

    fedncv run --data table:path=patients.csv,y=diagnosis,owner=hospital,standardise=true --partition natural \
        --clients 5 --per-round 5 --rounds 12 --model mlp --metrics auroc balanced_accuracy
"""

import csv
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

import fedncv


def write_table(path: Path) -> None:
    table = load_breast_cancer()
    size = table.data[:, 0].argsort().argsort() / len(table.data)  # rank of the radius, from 0 to 1
    hospital = np.clip(5 * size + np.random.default_rng(0).normal(0, 1, len(size)), 0, 4.99).astype(int)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow([*table.feature_names, "diagnosis", "hospital"])
        for features, diagnosis, where in zip(table.data, table.target, hospital, strict=True):
            rows.writerow([*features, table.target_names[diagnosis], f"hospital {where}"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "patients.csv"
        write_table(path)
        for method in ("fedavg", "fedncv", "local"):
            result = fedncv.simulate(
                method=method,
                data=f"table:path={path},y=diagnosis,owner=hospital,standardise=true",
                partition="natural",
                model="mlp",
                clients=5,
                per_round=5,
                rounds=12,
                epochs=1,
                lr=0.03,
                metrics=["auroc", "balanced_accuracy"],
            )
            last = result.last
            print(
                f"{method:7} before: accuracy {last['before']:.3f}, auroc {last['before_auroc']:.3f}, "
                f"balanced accuracy {last['before_balanced_accuracy']:.3f}"
            )
