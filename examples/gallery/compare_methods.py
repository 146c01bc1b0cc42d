"""
Compare methods
===============

Three methods, three seeds each, on the digits among 20 clients. All methods see the same partition, the same
initial model and the same sampled clients, so that curves can be compared seed by seed. The dotted line is what a
client reaches by naming its most frequent class; bars at the ends are 95 % intervals over the seeds.
"""

import matplotlib.pyplot as plt

import fedncv

SETTINGS = fedncv.RunConfig(model="mlp", clients=20, per_round=5, rounds=15, lr=0.05, eval_every=1)

results = [
    result
    for method in ("fedavg", "scaffold", "fedncv")
    for result in fedncv.simulate_many(SETTINGS, seeds=[0, 1, 2], method=method)
]
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
fedncv.plot(results, axes)

# %%
# The same numbers as rows, for a data frame or a file:

for row in results[0].tidy()[-2:]:
    print({name: row[name] for name in ("method", "seed", "round", "before")})
