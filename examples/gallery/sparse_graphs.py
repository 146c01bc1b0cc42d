"""
What a sparse graph costs in variance
=====================================

Without a server a client averages with its neighbours only. How far is its mixed update from the mean of all clients?
If updates were independent, the share of their variance that is left would be (||W||² - 1) / (N - 1), with W the mixing
matrix: 0 for the complete graph, which is a server, and 1 without neighbours. The left panel measures it in the first
round, where all clients start from the same model. On the right the clients' models move apart, the further the sparser
the graph is, and mixing holds them together. :doc:`/topology` has the formulas.
"""

import matplotlib.pyplot as plt
import numpy as np

import fedncv
from fedncv.topology.network import find_topology

GRAPHS = ("chain", "ring", "torus", "exponential", "complete")
N = 16
SETTINGS = fedncv.RunConfig(model="mlp", clients=N, per_round=N, rounds=6, epochs=1, lr=0.05, eval_every=0)

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for topology in GRAPHS:
    W = find_topology(topology, N, 0).mixing(0).W_NN.toarray()
    share = (np.sum(W**2) - 1) / (N - 1)
    rows = fedncv.simulate(SETTINGS, topology=topology).rows[1:]
    left.scatter(100 * share, rows[0]["mixed_update_variance"], label=topology)
    right.plot([row["round"] for row in rows], [row["consensus_distance"] for row in rows], marker=".", label=topology)
left.set(xlabel="share left if updates were independent, %", ylabel="variance of the mixed update, measured")
right.set(xlabel="round", ylabel="distance of a client's model from the mean")
left.legend()
for axes in (left, right):
    axes.grid(alpha=0.3)
