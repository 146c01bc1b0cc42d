"""
Accuracy against bytes
======================

Methods that send more per round are compared fairly by what they sent. Every run counts the bytes of all clients;
SCAFFOLD sends twice FedAvg's, FedNCV sends what FedAvg sends and receives twice as much.
"""

import matplotlib.pyplot as plt

import fedncv

SETTINGS = fedncv.RunConfig(model="mlp", clients=20, per_round=5, rounds=15, lr=0.05, eval_every=1)

figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
for method in ("fedavg", "scaffold", "fedncv"):
    rows = fedncv.simulate(SETTINGS, method=method).rows[1:]
    for axes, way in zip(panels, ("up", "down"), strict=True):
        sent = [row[f"bytes_{way}"] / 1e6 for row in rows]
        axes.plot(sent, [100 * row["before"] for row in rows], marker=".", label=method)
        axes.set_xlabel(f"megabytes {way}, all clients")
        axes.grid(alpha=0.3)
panels[0].set_ylabel("accuracy before local training, %")
panels[0].legend()
