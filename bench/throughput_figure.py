"""Plot the figure of docs/performance.md from the table that bench/roofline.py printed.

python bench/throughput_figure.py            docs/figures/throughput.csv -> docs/figures/throughput.png
"""

from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
PLAIN_LOOP, STUDY = 13_009, 686_546  # bench/throughput.py, the same machine and run


def main() -> None:
    clients, rate = np.loadtxt(FIGURES / "throughput.csv", delimiter=",", skiprows=2, unpack=True)
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axes.loglog(clients, rate, "o-", label="one stacked step")
    axes.axhline(STUDY, linestyle="--", color="tab:green", label="5 seeds x 10 clients, whole rounds")
    axes.axhline(PLAIN_LOOP, linestyle=":", color="tab:red", label="plain PyTorch loop")
    axes.set_xlabel("clients in the stack")
    axes.set_ylabel("training samples a second")
    axes.set_title("LeNet5, CIFAR-10 shapes, batch 32, one H200", fontsize=10)
    axes.legend(frameon=False, fontsize=9)
    axes.grid(which="major", alpha=0.3)
    figure.savefig(FIGURES / "throughput.png", dpi=130)


if __name__ == "__main__":
    main()
