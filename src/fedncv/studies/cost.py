"""What a study will cost, before it is begun: runs, samples, bytes, and time by a short calibration."""

import time
from dataclasses import replace
from typing import NamedTuple

from fedncv.config import RunConfig
from fedncv.data import DATASETS
from fedncv.engine.problem import build, start
from fedncv.engine.sequential import one_thread, run_round
from fedncv.studies.study import Cell


class Cost(NamedTuple):
    """Of one run. What is not known is None."""

    samples: float  # expected: which clients are drawn decides
    bytes: float | None
    seconds: float | None


def expected_samples(config: RunConfig) -> float:
    """rounds · clients drawn · epochs · training samples of the mean client; uniform draws, nobody drops out."""
    images = DATASETS[config.data].num_images
    return config.rounds * config.per_round * config.epochs * images * (1 - config.test_share) / config.clients


def measured_samples(config: RunConfig) -> float:
    """Samples trained on only to measure "after": every client once each time, and not counted as work."""
    times = 1 + (max(0, config.rounds - 1) // config.after_every if config.after_every else 0)
    return times * config.epochs * DATASETS[config.data].num_images * (1 - config.test_share)


def calibrate(config: RunConfig) -> Cost:
    """One round of the run, one client at a time; its time and bytes are taken for every round's.

    Time grows with the samples trained, measuring "after" included; other measurements come on top.
    """
    problem = build(config)
    with one_thread():
        state, _ = run_round(problem, start(problem))  # the first round also warms up
        began = time.perf_counter()
        again, row = run_round(problem, state)
        seconds = time.perf_counter() - began
    trained = max(1, again.totals.samples - state.totals.samples)
    total = expected_samples(config)
    traffic = (row["bytes_down"] + row["bytes_up"]) / again.round * config.rounds
    return Cost(total, traffic, seconds / trained * (total + measured_samples(config)))


def costs(cells: list[Cell]) -> list[tuple[str, str, int, Cost, str]]:
    """(dataset, method, runs, cost of one, why something is unknown), a line a column and method."""
    groups: dict[RunConfig, list[RunConfig]] = {}
    for cell in cells:
        alike = replace(cell.config, seed=0, lr=1.0, eval_every=0, after_every=0)  # none of these changes a round
        groups.setdefault(alike, []).append(cell.config)
    lines = []
    for group in groups.values():
        config, why = group[0], ""
        try:
            cost = calibrate(config)
        except (ValueError, ArithmeticError, OSError) as error:  # no data here, no GPU here, diverged
            cost, why = Cost(expected_samples(config), None, None), str(error)
        name = config.data if config.clients == 100 else f"{config.data}, {config.clients} clients"
        lines.append((name, config.method, len(group), cost, why))
    return lines
