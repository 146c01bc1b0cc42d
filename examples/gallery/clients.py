"""
Every client's score
====================

A mean hides who is served badly. Each line below is the sorted accuracy of the 20 clients, before local training:
FedAvg's shared model fails some of them; FedPer gives each client its own last layer, and FedNCV adds each client's
label prior.
"""

import matplotlib.pyplot as plt

import fedncv

SETTINGS = fedncv.RunConfig(model="mlp", clients=20, per_round=5, rounds=15, lr=0.05, eval_every=0)

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for method in ("fedavg", "fedper", "fedncv"):
    last = fedncv.simulate(SETTINGS, method=method).last
    axes.step(range(1, 21), sorted(100 * score for score in last["before_clients"]), where="mid", label=method)
    print(f"{method:8} mean {last['before']:.3f}, worst tenth of the clients {last['before_worst_decile']:.3f}")
axes.set(xlabel="clients, worst first", ylabel="accuracy before local training, %", ylim=(0, 102))
axes.legend()
axes.grid(alpha=0.3)
