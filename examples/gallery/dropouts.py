"""
Clients that do not reply
=========================

Of the clients that are drawn, a share never replies. The run goes on with the others, and the row of a round says
how many were asked and how many replied.
"""

import matplotlib.pyplot as plt

import fedncv

SETTINGS = fedncv.RunConfig(model="mlp", clients=20, per_round=5, rounds=15, lr=0.05, eval_every=1)

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for dropout in (0.0, 0.3, 0.6):
    rows = fedncv.simulate(SETTINGS, method="fedncv", dropout=dropout).rows
    axes.plot([row["round"] for row in rows], [100 * row["before"] for row in rows], label=f"{dropout:.0%} never reply")
    print(
        f"dropout {dropout}: {sum(row.get('replies', 0) for row in rows)} of {sum(row.get('asked', 0) for row in rows)}"
    )
axes.set(xlabel="round", ylabel="accuracy before local training, %")
axes.legend()
axes.grid(alpha=0.3)
