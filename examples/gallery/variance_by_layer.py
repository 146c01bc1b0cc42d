"""
Variance, layer by layer
========================

In which layer do clients disagree? The parts of the layers add up to those of the whole model.
"""

import matplotlib.pyplot as plt
import numpy as np

import fedncv
from fedncv.observatory import at_model

result = fedncv.simulate(method="fedavg", data="digits", model="lenet5", clients=20, per_round=5, rounds=5, lr=0.05)
layers = at_model.measure_layers(result.problem, result.state)
weights = [name for name in layers if name.endswith("weight")]

figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
place = np.arange(len(weights))
axes.bar(place - 0.2, [layers[name].between.value for name in weights], 0.4, label="between clients")
axes.bar(place + 0.2, [layers[name].within.value for name in weights], 0.4, label="within clients")
axes.set(yscale="log", ylabel="variance of the gradient")
axes.set_xticks(place, [name.removesuffix(".weight") for name in weights])
axes.legend()

# %%
# The sum over the layers and the number of the whole model are two ways to the same number:

whole = at_model.measure(result.problem, result.state).between.value
print(f"{sum(each.between.value for each in layers.values()):.6f} = {whole:.6f}")
