"""
Gradient variance along a run
=============================

A probe measures the variance of the gradient at the model of a round, exactly and without changing the run: how far
mini-batches are from their client's gradient (*within*), and clients from the gradient of all samples (*between*).
:doc:`/variance` has the formulas.
"""

import matplotlib.pyplot as plt

import fedncv

SETTINGS = fedncv.RunConfig(model="mlp", clients=20, per_round=5, rounds=12, lr=0.05)

figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharex=True, layout="constrained")
for method in ("fedavg", "scaffold", "fedncv"):
    rows = [row for row in fedncv.simulate(SETTINGS, method=method, probe="every=2").rows if "variance_between" in row]
    rounds = [row["round"] for row in rows]
    for axes, part in zip(panels, ("between", "within"), strict=True):
        axes.plot(rounds, [row[f"variance_{part}"] for row in rows], marker=".", label=method)
for axes, title in zip(panels, ("between clients", "within clients"), strict=True):
    axes.set(yscale="log", xlabel="round", title=title)
    axes.grid(alpha=0.3)
panels[0].set_ylabel("variance of the gradient")
panels[0].legend()

# %%
# Each method is measured at its own models: the figure compares the models that the methods reach. For estimators at
# the *same* models, see :doc:`update_error`.
