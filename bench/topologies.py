"""What a sparse graph costs: methods on graphs of different spectral gaps, and RelaySGD's setting.

    python bench/topologies.py digits --out runs/topologies      six graphs x five methods on the digits, on a CPU
    python bench/topologies.py figure --rows docs/results/topologies.jsonl --to docs/results/topologies.png
    python bench/topologies.py relaysgd --out runs/relaysgd --data-dir ~/data --device cuda
    python bench/topologies.py memory --clients 1000 --device cuda     bytes of all clients' models on one GPU

``digits`` and ``relaysgd`` go on where they were stopped: every finished run is a line of OUT/rows.jsonl.

``relaysgd`` is the setting of Table 2 of Vogels et al. (NeurIPS 2021, https://arxiv.org/abs/2110.04175) as far as it
can be run here: VGG-11 on CIFAR-10, 16 workers, Dirichlet 1, 0.1 and 0.01, batches of 32, 200 epochs. A round is an
epoch at every worker; in the paper they mix after every batch. It needs a GPU for days, and it has not been run yet.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn

import fedncv

GRAPHS = ("chain", "ring", "torus", "random_regular:degree=4", "exponential", "complete")
METHODS = ("fedavg", "quasi_global:beta=0.5,mu=0.5", "d2", "scaffold", "fedncv-sums")
NAMES = {"fedavg": "D-PSGD", "scaffold": "K-GT", "d2": "D²", "fedncv-sums": "FedNCV, sums", "relaysgd": "RelaySGD"}
DIGITS = {
    "model": "mlp", "clients": 16, "per_round": 16, "rounds": 15, "epochs": 1, "lr": 0.05, "eval_every": 0,
    "partition": "dirichlet:alpha=0.1",
}  # fmt: skip
TABLE2 = {
    "data": "cifar10", "clients": 16, "per_round": 16, "rounds": 200, "epochs": 1, "batch_size": 32, "lr": 0.1,
    "eval_every": 20,
}  # fmt: skip
ROWS = (  # of RelaySGD's table: method, graph
    ("fedavg", "server"), ("fedavg", "ring"), ("quasi_global", "ring"), ("d2", "ring"), ("relaysgd", "chain"),
)  # fmt: skip


def vgg11(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return VGG-11 for pictures of 32 x 32, without normalisation."""
    layers: list[nn.Module] = []
    channels = shape[0]
    for width in (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool"):
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, num_classes))


def run(out: Path, **settings: object) -> None:
    """Train one run and append what its last row says, unless it is there already."""
    key = {name: str(settings[name]) for name in ("method", "topology", "seed", "partition")}
    done = [json.loads(line) for line in rows_of(out)]
    if any(all(row[name] == value for name, value in key.items()) for row in done):
        return
    print(*key.values(), flush=True)
    last = fedncv.simulate(**settings).last  # type: ignore[arg-type]
    kept = {name: value for name, value in last.items() if not isinstance(value, list)}
    out.mkdir(parents=True, exist_ok=True)
    with (out / "rows.jsonl").open("a") as file:
        file.write(json.dumps(key | kept) + "\n")


def rows_of(out: Path) -> list[str]:
    path = out / "rows.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def digits(out: Path, seeds: list[int]) -> None:
    for seed in seeds:
        for topology in GRAPHS:
            for method in METHODS:
                run(out, method=method, topology=topology, seed=seed, **DIGITS)
        run(out, method="relaysgd", topology="chain", seed=seed, **DIGITS)


def relaysgd(out: Path, seeds: list[int], data_dir: str, device: str) -> None:
    for alpha in (1.0, 0.1, 0.01):
        for method, topology in ROWS:
            for seed in seeds:
                run(
                    out, method=method, topology=topology, seed=seed, model=vgg11, data_dir=data_dir, device=device,
                    partition=f"dirichlet:alpha={alpha},min_samples=32", schedule="step:every=150,factor=0.1", **TABLE2,
                )  # fmt: skip


def memory(clients: int, device: str) -> None:
    """Print the memory of one round of ``clients`` LeNet5 models that mix over a ring."""
    torch.cuda.reset_peak_memory_stats(device)
    fedncv.simulate(
        data="cifar10", model="lenet5", clients=clients, per_round=clients, topology="ring", rounds=1, epochs=1,
        eval_every=0, device=device,
    )  # fmt: skip
    print(f"{clients} clients: {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB at the peak")


def figure(path: Path, to: Path) -> None:
    """Print the table and draw accuracy against spectral gap: a point for each run, a line through the means."""
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    means = {
        (method, topology): {
            name: mean([row[name] for row in rows if (row["method"], row["topology"]) == (method, topology)])
            for name in ("spectral_gap", "before", "after", "consensus_distance", "edge_bytes", "bytes_up")
        }
        for method, topology in sorted({(row["method"], row["topology"]) for row in rows})
    }
    graphs = sorted({topology for _, topology in means}, key=lambda graph: means["fedavg", graph]["spectral_gap"])
    for what in ("before", "after", "consensus_distance"):
        print(f"\n| {what} |", " | ".join(graphs), "|")
        print("|---|" + "---|" * len(graphs))
        for method in dict.fromkeys(method for method, _ in means):
            cells = [means.get((method, graph), {}).get(what) for graph in graphs]
            scale = 1 if what == "consensus_distance" else 100
            print(f"| {label(method)} |", " | ".join("" if c is None else f"{scale * c:.2f}" for c in cells), "|")
    print("\nspectral gaps:", ", ".join(f"{graph} {means['fedavg', graph]['spectral_gap']:.3f}" for graph in graphs))
    drawn, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axes, what in zip(panels, ("before", "after"), strict=True):
        for method in METHODS:
            mine = [(means[method, graph]["spectral_gap"], 100 * means[method, graph][what]) for graph in graphs]
            (line,) = axes.plot(*zip(*mine, strict=True), marker="o", label=label(method))
            points = [(row["spectral_gap"], 100 * row[what]) for row in rows if row["method"] == method]
            axes.scatter(*zip(*points, strict=True), s=6, color=line.get_color(), alpha=0.6)
        axes.set_xscale("log")
        axes.set_xlabel("spectral gap of the graph")
        axes.set_title(f"{what} local training", fontsize="medium")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy of clients' own models, %")
    panels[1].legend(fontsize="small")
    drawn.savefig(to, dpi=150)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def label(method: str) -> str:
    return NAMES.get(method, {"quasi_global": "quasi-global momentum"}.get(method.partition(":")[0], method))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["digits", "figure", "relaysgd", "memory"])
    parser.add_argument("--out", type=Path, default=Path("runs/topologies"))
    parser.add_argument("--rows", type=Path, help="a file of rows for the figure, in place of OUT/rows.jsonl")
    parser.add_argument("--to", type=Path, default=Path("topologies.png"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, default=1000)
    given = parser.parse_args()
    if given.what == "digits":
        digits(given.out, given.seeds)
    elif given.what == "figure":
        figure(given.rows or given.out / "rows.jsonl", given.to)
    elif given.what == "relaysgd":
        relaysgd(given.out, given.seeds, given.data_dir, given.device)
    else:
        memory(given.clients, given.device)


if __name__ == "__main__":
    main()
