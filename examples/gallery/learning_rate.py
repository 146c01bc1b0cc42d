"""
Score against the learning rate
===============================

A comparison at one learning rate says little: lines that cross change their order. Each method has four rates here,
under one partition and one seed. ``fedncv study --tune`` tries as many settings for every method, on seeds that are
not reported (:doc:`/studies`).
"""

import matplotlib.pyplot as plt

import fedncv

RATES = (0.003, 0.01, 0.03, 0.1)
SETTINGS = fedncv.RunConfig(model="mlp", clients=20, per_round=5, rounds=10, eval_every=0)

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for method in ("fedavg", "scaffold", "fedncv"):
    reached = [100 * fedncv.simulate(SETTINGS, method=method, lr=rate).last["before"] for rate in RATES]
    axes.plot(RATES, reached, marker="o", label=method)
axes.set(xscale="log", xlabel="local learning rate", ylabel="accuracy before local training, %")
axes.set_xticks(RATES, [str(rate) for rate in RATES])
axes.legend()
axes.grid(alpha=0.3)
