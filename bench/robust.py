"""Poisoned clients against robust combining: accuracy of honest clients, by rule, attack and partition.

    python bench/robust.py --data-dir DIR --out docs/results/poisoning.jsonl
    python bench/robust.py --out docs/results/poisoning.jsonl --table --figure docs/figures/poisoning.png

CIFAR-10's pictures averaged to 8x8, 20,000 of them, among 50 clients, who all take part in every round; a perceptron
with one hidden layer of 64; 30 rounds of one epoch at batch 32. The learning rate, 0.3 for all, is the better of 0.1
and 0.3 for FedAvg without attack on seed 1000. 0, 5 or 10 clients attack, and every rule is set to withstand 10 (its
default share of 0.2). The score is the accuracy on the test samples of the honest clients, before local training. With
Dirichlet(0.1) there are only the conditions without attack and with 10 clients that flip signs. Runs that are in the
file already are not repeated.
"""

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedncv
from fedncv.data import Dataset, from_arrays, load
from fedncv.engine.problem import DivergedError
from fedncv.keys import key_for
from fedncv.methods.switches.poisoned import bad_clients

CHAINS = {
    "fedavg": "FedAvg",
    "fedavg+median": "+ median",
    "fedavg+trimmed": "+ trimmed mean",
    "fedavg+krum:keep=1": "+ Krum",
    "fedavg+krum": "+ multi-Krum",
    "fedavg+clipped": "+ clipped norms",
    "fedncv": "FedNCV",
    "fedncv+trimmed": "FedNCV + trimmed mean",
    "fedncv+krum": "FedNCV + multi-Krum",
    "fedncv+clipped": "FedNCV + clipped norms",
}
ATTACKS = {"label_flip": 1.0, "sign_flip": 10.0, "scaled": 10.0}  # attack -> scale
SHARES = (0.1, 0.2)
CONDITIONS = [("none", 0.0), *itertools.product(ATTACKS, SHARES)]
PARTITIONS = {
    "iid": CONDITIONS,
    "dirichlet:alpha=0.5": CONDITIONS,
    "dirichlet:alpha=0.1": [("none", 0.0), ("sign_flip", 0.2)],
}
PROTOCOL: dict[str, Any] = {
    "model": "mlp", "clients": 50, "per_round": 50, "rounds": 30, "epochs": 1, "batch_size": 32, "lr": 0.3,
    "eval_every": 0, "after_every": 0, "engine": "stacked",
}  # fmt: skip
PICTURES, SIDE = 20_000, 8
TITLES = {
    "iid": "equal distributions",
    "dirichlet:alpha=0.5": "Dirichlet(0.5)",
    "dirichlet:alpha=0.1": "Dirichlet(0.1)",
}
WORDS = {"none": "no attack", "label_flip": "labels flipped", "sign_flip": "sign flipped, x10", "scaled": "scaled x10"}


def small_cifar10(folder: str) -> Dataset:
    """Return a keyed sample of CIFAR-10, with pictures averaged to 8x8."""
    data = load("cifar10", folder)
    rows = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))[:PICTURES]
    x = torch.nn.functional.avg_pool2d(data.x[rows].float() / 255, data.x.shape[-1] // SIDE)
    return from_arrays(x, data.y[rows], name="cifar10 8x8", num_classes=10)


def run(data: Dataset, chain: str, attack: str, share: float, partition: str, seed: int) -> dict[str, Any]:
    """Return the row of one run: final scores, or why it diverged."""
    method = f"{chain}+poisoned:share={share},attack={attack},scale={ATTACKS[attack]}" if share else chain
    row = {"chain": chain, "attack": attack, "share": share, "partition": partition, "seed": seed}
    num = PROTOCOL["clients"]
    honest = np.setdiff1d(np.arange(num), bad_clients(key_for(seed, "server start"), num, share).numpy())
    began = time.perf_counter()
    try:
        result = fedncv.simulate(method=method, data=data, partition=partition, seed=seed, **PROTOCOL)
    except DivergedError as error:
        return row | {"diverged": str(error)}
    last, sizes = result.last, np.array([len(rows) for rows in result.problem.clients.test])[honest]
    accuracy = float((np.array(last["before_clients"])[honest] * sizes).sum() / sizes.sum())
    scores = {"honest": accuracy, "before": last["before"], "pooled": last["pooled"], "loss": last["loss"]}
    return row | scores | {"seconds": round(time.perf_counter() - began, 1)}


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("chain", "attack", "share", "partition", "seed"))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def scores_of(rows: list[dict[str, Any]], chain: str, attack: str, share: float, partition: str) -> dict[int, float]:
    """Return seed -> accuracy in per cent; a run that diverged counts as guessing, 10 per cent."""
    wanted = (chain, attack, share, partition)
    return {row["seed"]: 100 * row.get("honest", 0.1) for row in rows if key_of(row)[:4] == wanted}


def lost(rows: list[dict[str, Any]], chain: str, attack: str, share: float, partition: str) -> float:
    """Return the mean over seeds of what the plain method, without attack, has more; NaN without runs."""
    plain = scores_of(rows, chain.partition("+")[0], "none", 0.0, partition)
    found = scores_of(rows, chain, attack, share, partition)
    return float(np.mean([plain[seed] - score for seed, score in found.items()])) if found else float("nan")


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table for each partition: mean over seeds ± half their range, if there are several; * diverged."""
    lines: list[str] = []
    for partition in [p for p in PARTITIONS if any(row["partition"] == p for row in rows)]:
        conditions = PARTITIONS[partition]
        head = [f"{WORDS[attack]}, {share:.0%}" if share else WORDS[attack] for attack, share in conditions]
        lines += [
            "",
            f"**{TITLES[partition]}**",
            "",
            f"| method | {' | '.join(head)} |",
            "|---" * (len(head) + 1) + "|",
        ]
        for chain, name in CHAINS.items():
            cells = []
            for attack, share in conditions:
                found = list(scores_of(rows, chain, attack, share, partition).values())
                failed = any("diverged" in r for r in rows if key_of(r)[:4] == (chain, attack, share, partition))
                spread = f" ± {(max(found) - min(found)) / 2:.1f}" if len(found) > 1 else ""
                cells.append(f"{np.mean(found):.1f}{spread}{'*' * failed}" if found else "")
            if any(cells):
                lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines[1:])


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw a map per partition: accuracy in words, colour for the points lost against the plain method unattacked."""
    import matplotlib.pyplot as plt

    partitions = [p for p in PARTITIONS if any(row["partition"] == p for row in rows)]
    chains = [chain for chain in CHAINS if any(row["chain"] == chain for row in rows)]
    widths = [len(PARTITIONS[partition]) for partition in partitions]
    fig, axes = plt.subplots(
        1, len(partitions), figsize=(2.4 + 0.72 * sum(widths), 1.4 + 0.34 * len(chains)), sharey=True, squeeze=False,
        width_ratios=widths, layout="constrained",
    )  # fmt: skip
    for axis, partition in zip(axes[0], partitions, strict=True):
        lost_CA = np.full((len(chains), len(PARTITIONS[partition])), np.nan)
        for i, chain in enumerate(chains):
            for j, (attack, share) in enumerate(PARTITIONS[partition]):
                found = scores_of(rows, chain, attack, share, partition)
                if found:
                    lost_CA[i, j] = lost(rows, chain, attack, share, partition)
                    colour = "white" if lost_CA[i, j] > 14 else "black"
                    score = np.mean(list(found.values()))
                    axis.text(j, i, f"{score:.0f}", ha="center", va="center", fontsize=8, color=colour)
        drawn = axis.imshow(lost_CA, vmin=0, vmax=25, cmap="Reds", aspect="auto")
        axis.set_yticks(range(len(chains)), [CHAINS[chain] for chain in chains], fontsize=8)
        labels = [
            f"{WORDS[attack]}\n{share:.0%}" if share else WORDS[attack] for attack, share in PARTITIONS[partition]
        ]
        axis.set_xticks(range(len(labels)), labels, fontsize=7, rotation=45, ha="right")
        axis.set_title(TITLES[partition], fontsize=9)
    fig.colorbar(drawn, ax=axes[0].tolist(), label="points lost", pad=0.01)
    fig.savefig(path, dpi=150)
    plt.close(fig)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--chains", nargs="+", default=list(CHAINS), choices=list(CHAINS))
    parser.add_argument("--partitions", nargs="+", default=list(PARTITIONS), choices=list(PARTITIONS))
    parser.add_argument("--table", action="store_true", help="print the tables of the file instead")
    parser.add_argument("--figure", type=Path, help="draw the figure of the file instead")
    chosen = parser.parse_args()
    rows = read(chosen.out)
    if chosen.table or chosen.figure:
        if chosen.table:
            print(table(rows))
        if chosen.figure:
            figure(rows, chosen.figure)
        return
    torch.set_num_threads(1)
    data = small_cifar10(chosen.data_dir)
    done = {key_of(row) for row in rows}
    for seed, partition, chain in itertools.product(chosen.seeds, chosen.partitions, chosen.chains):
        for attack, share in PARTITIONS[partition]:
            if (chain, attack, share, partition, seed) in done:
                continue
            row = run(data, chain, attack, share, partition, seed)
            with chosen.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            score = row.get("diverged") or f"{100 * row['honest']:5.1f} %  {row['seconds']} s"
            print(f"{seed} {partition:22} {chain:22} {attack:10} {share:4}  {score}", flush=True)


if __name__ == "__main__":
    main()
