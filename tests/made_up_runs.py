"""Result files of studies that were never run: what the report reads, for tests of the report alone."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedncv.config import Settings, write_toml
from fedncv.study import FILE, PARTITION, Study, to_toml


def made_up_study(**changes) -> Study:
    study = Study(
        name="table1",
        title="Table 1: accuracy before and after local training",
        settings=Settings(clients=20, per_round=5, rounds=20, eval_every=2),
        datasets=("cifar10",),
        methods=("fedavg", "scaffold", "fedncv"),
        seeds=(0, 1, 2),
    )
    return replace(study, **changes)


def write_study(out: Path, study: Study, *, level=None, skip=(), variance=False) -> Path:
    """Finished runs for every cell. ``level`` is (column, method) -> final accuracy; ``skip`` are folders left out."""
    out.mkdir(parents=True, exist_ok=True)
    (out / FILE).write_text(to_toml(study, {"made_with": {"command": f"fedncv study {study.name}", "torch": "2"}}))
    for column, settings in study.columns().items():
        rng = np.random.default_rng(len(column))
        shares = rng.dirichlet([0.1] * 10, settings.clients)
        counts = np.maximum(1, np.round(shares * rng.integers(20, 400, (settings.clients, 1)))).astype(int)
        counts[shares < 0.02] = 0
        (out / column).mkdir(parents=True, exist_ok=True)
        where = {"data": settings.data, "partition": settings.partition, "seed": 0, "counts": counts.tolist()}
        (out / column / PARTITION).write_text(json.dumps(where))
    for cell in study.cells():
        if str(cell.folder) in skip:
            continue
        column = str(cell.folder.parent)
        place = study.methods.index(cell.config.method)
        final = level(column, cell.config.method) if level else 0.6 + 0.3 * place / max(1, len(study.methods))
        write_run(out / cell.folder, cell.config, final, variance=variance)
    return out


def write_run(folder: Path, config, final: float, *, variance=False, until: int | None = None) -> None:
    """A curve that rises to ``final``, with noise that its method and seed decide."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(write_toml(config))
    rng = np.random.default_rng([config.seed, *config.method.encode(), *config.data.encode()])
    shift = np.random.default_rng([config.seed, *config.data.encode()]).normal(0, 0.01)
    lines, clocks = [], []
    for t in range((config.rounds if until is None else until) + 1):
        row = {"round": t}
        if t:
            row |= {"samples": 500 * t, "gradients": 500 * t, "bytes_down": 40_000 * t, "bytes_up": 40_000 * t}
            row |= {"loss": 2 / t}
        else:
            row |= {"label_prior": 0.55 + shift}
        if t % config.eval_every == 0 or t == config.rounds:
            at = 0.1 + (final - 0.1) * (1 - np.exp(-5 * t / config.rounds)) / (1 - np.exp(-5)) + shift
            row |= scores("before", at + rng.normal(0, 0.003), config.clients, rng)
            if variance:
                row |= {"variance_other": 4 / (1 + t), "variance_drift": 1 / (1 + t)}
        if t == config.rounds:
            row |= scores("after", min(0.99, final + 0.05 + shift + rng.normal(0, 0.003)), config.clients, rng)
        lines.append(json.dumps(row))
        clocks.append(json.dumps({"round": t, "seconds": 0.25}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "timing.jsonl").write_text("\n".join(clocks) + "\n")


def scores(name: str, mean: float, clients: int, rng) -> dict:
    mean = float(np.clip(mean, 0, 1))
    each = np.clip(rng.normal(mean, 0.08, clients), 0, 1)
    return {
        name: mean,
        f"{name}_client_mean": float(each.mean()),
        f"{name}_worst_decile": float(np.sort(each)[: -(-clients // 10)].mean()),
        f"{name}_clients": [round(float(x), 4) for x in each],
    }
