"""Print numbers of docs/results/README.md that the report does not print: Table 1 was tested twice.

    make results && python tools/two_looks.py runs/table1

It compares FedNCV with all other methods over the first ten seeds, the second ten and all twenty; with the closest
method seed by seed; and prints the learning rates that tuning chose.
"""

import argparse
from pathlib import Path

import numpy as np

from fedncv.comparison import compare, holm, paired
from fedncv.results import Run, read_run, runs_in
from fedncv.study import TUNING, read_study

Scores = dict[str, dict[int, float]]  # method -> seed -> per cent
LOOKS = {"first ten": range(10), "second ten": range(10, 20), "all": range(20)}


def main(folder: Path) -> None:
    study = read_study(folder)
    columns = {
        (data, metric): scores([read_run(run) for run in runs_in(folder / data)], metric)
        for data in study.datasets
        for metric in ("before", "after")
    }
    for name, seeds in LOOKS.items():
        looks = {where: {m: {s: v[s] for s in seeds} for m, v in of.items()} for where, of in columns.items()}
        corrected = holm([compare(look).p for look in looks.values()])
        for (where, look), p in zip(looks.items(), corrected, strict=True):
            twice = min(1, 2 * p)
            print(f"{name:10s} {' '.join(where):22s} {closest(look)}, p after Holm {p:.4f}, doubled {twice:.4f}")
    for where, look in columns.items():
        print(f"{' '.join(where):22s} {seed_by_seed(look, 'fedavg+prior')}")
    assert study.tuning is not None
    ends = [lr in (min(study.tuning.grid), max(study.tuning.grid)) for of in study.lr.values() for lr in of.values()]
    print(f"{sum(ends)} of {len(ends)} learning rates are an end of the grid; after local training on the tuning seed:")
    for data in study.datasets:
        tried = {lr: folder / TUNING / data / f"lr-{lr:g}" for lr in study.tuning.grid}
        after = {lr: scores([read_run(run) for run in runs_in(where)], "after") for lr, where in tried.items()}
        for method in study.methods:
            values = ", ".join(f"{lr:g}: {np.mean(list(of[method].values())):.1f}" for lr, of in after.items())
            print(f"  {data:14s} {method:16s} {values}")


def scores(runs: list[Run], metric: str) -> Scores:
    found: Scores = {}
    for run in runs:
        value = run.last(metric)
        if value is not None:
            found.setdefault(run.config.method, {})[run.config.seed] = 100 * value
    return found


def closest(look: Scores) -> str:
    """Return the method whose paired difference to FedNCV has the lowest lower end."""
    others = {method: paired(look["fedncv"], seeds) for method, seeds in look.items() if method != "fedncv"}
    method = min(others, key=lambda name: others[name].low)
    return f"{others[method].difference:+.3f} ({others[method].low:+.3f} to {others[method].high:+.3f}) {method}"


def seed_by_seed(look: Scores, other: str) -> str:
    ahead = np.array([look["fedncv"][seed] - value for seed, value in sorted(look[other].items())])
    return (
        f"against {other}: better at {(ahead > 0).sum()} of {len(ahead)} seeds, median {np.median(ahead):.2f}, "
        f"largest seed {ahead.max() / ahead.sum():.2f} of the sum"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/table1"))
    main(**vars(parser.parse_args()))
