"""
Divide samples among clients
============================

How unequal are the clients? Each panel is a partition of the digits among 12 clients: a bar is a client, a colour
is a class. A small alpha of the Dirichlet partition gives each client few classes. :doc:`/datasets` lists all
partitions.
"""

import matplotlib.pyplot as plt
import numpy as np

from fedncv.data import divide, load, statistics

digits = load("digits")
partitions = ("iid", "dirichlet:alpha=1", "dirichlet:alpha=0.1", "shards:per_client=2")
figure, panels = plt.subplots(1, len(partitions), figsize=(10, 3.2), sharey=True, layout="constrained")
for axes, partition in zip(panels, partitions, strict=True):
    parts = divide(digits, partition, num_clients=12, seed=0)
    counts = statistics(digits.labels.numpy(), parts, digits.num_classes).counts
    below = np.zeros(len(counts))
    for k in range(digits.num_classes):
        axes.bar(range(len(counts)), counts[:, k], bottom=below, color=plt.cm.tab10(k), width=0.85)
        below += counts[:, k]
    axes.set(title=partition, xlabel="client")
panels[0].set_ylabel("samples")

# %%
# The same as numbers: the entropy of a client's labels, in bits. Equal shares of ten classes have 3.32 bits.

for partition in partitions:
    found = statistics(digits.labels.numpy(), divide(digits, partition, num_clients=12, seed=0), digits.num_classes)
    print(
        f"{partition:22} mean entropy {found.entropy.mean():.2f} bits, sizes {found.sizes.min()} to {found.sizes.max()}"
    )
