"""
The error of the aggregated update
==================================

A round averages the updates of a few clients in place of all. At the models of FedAvg's run, how large is the error
of each method's round? The numbers are relative to FedAvg's error at the same models. ``fedncv variance`` makes
this comparison on the command line.
"""

import matplotlib.pyplot as plt

from fedncv.config import RunConfig
from fedncv.observatory.compare import rows_of

METHODS = ("fedavg", "fedvarp", "fedavg+prior", "fedncv")
AT = (2, 4, 6, 8, 10)
config = RunConfig(model="mlp", clients=20, per_round=5, rounds=10, lr=0.05)
rows = list(rows_of([config], METHODS, at=AT, within=False))

error = {(row["method"], row["round"]): row["mse"] for row in rows}
figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
for method in METHODS:
    axes.plot(AT, [error[method, t] / error["fedavg", t] for t in AT], marker="o", label=method)
axes.set(xlabel="round", ylabel="mean squared error / FedAvg's", ylim=(0, None), xticks=AT)
axes.legend()
axes.grid(alpha=0.3)
