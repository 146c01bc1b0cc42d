"""
Accuracy against heterogeneity
==============================

The same methods under partitions from nearly equal clients (right) to one or two classes per client (left).
*Before* is the score of the model that a client receives; :doc:`/glossary` explains the words.
"""

import matplotlib.pyplot as plt

import fedncv

ALPHAS = (0.05, 0.1, 0.3, 1.0, 10.0)
SETTINGS = fedncv.RunConfig(model="mlp", clients=20, per_round=5, rounds=10, lr=0.05, eval_every=0)

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for method, mark in (("fedavg", "o"), ("fedavg+prior", "^"), ("fedncv", "s")):
    reached = [
        fedncv.simulate(SETTINGS, method=method, partition=f"dirichlet:alpha={alpha}").last["before"]
        for alpha in ALPHAS
    ]
    axes.plot(ALPHAS, [100 * score for score in reached], marker=mark, label=method)
axes.set(xscale="log", xlabel="alpha of the Dirichlet partition", ylabel="accuracy before local training, %")
axes.legend()
axes.grid(alpha=0.3)
