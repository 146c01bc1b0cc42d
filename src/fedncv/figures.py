"""Plot runs."""

from pathlib import Path

import numpy as np

from fedncv.results import by_method, points, read_run

# Okabe and Ito's colours, which colour-blind readers can distinguish; line styles repeat the information.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
STYLES = ["-", "--", "-.", ":"]


def curves(folders: list[Path], path: Path) -> Path:
    """Plot the score before local training against rounds, mean over seeds with the range, and the score after."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    runs = [read_run(folder) for folder in folders]
    score = runs[0].score
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for i, (method, group) in enumerate(by_method(runs).items()):
        measured = {t: score.scale * np.array(values) for t, values in points(group, "before").items()}
        if not measured:
            continue
        rounds = list(measured)
        colour, style = COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)]
        mean, low, high = ([f(values) for values in measured.values()] for f in (np.mean, np.min, np.max))
        axes.plot(rounds, mean, style, color=colour, label=method)
        axes.fill_between(rounds, low, high, color=colour, alpha=0.15)
        after = [score.scale * run.last("after") for run in group if run.last("after") is not None]
        if after:
            axes.plot(rounds[-1], np.mean(after), "o", color=colour, markerfacecolor="none")
    priors = [score.scale * run.last("label_prior") for run in runs if run.last("label_prior") is not None]
    if priors:
        axes.axhline(
            float(np.mean(priors)), color="grey", linewidth=1, linestyle=(0, (1, 3)), label="label prior alone"
        )
    config = runs[0].config
    axes.set_title(f"{config.data}, {config.clients} clients, {config.partition}", loc="left")
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(f"{score.axis('before local training')}   (o after it)")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
