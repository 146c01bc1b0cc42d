"""Time series by owner: forecast the next hour of a household's power from its last 24 hours.

The households are made up: a daily wave whose size, hour and noise differ from house to house, so that no two clients
have the same data. Each window of 24 hours is a sample, its target is the 25th hour, and its owner is the household.
The partition `natural` gives every household its own samples.
"""

import numpy as np
from torch import Tensor, nn

import fedncv

HOUSES, HOURS, WINDOW = 10, 24 * 7, 24


def households() -> fedncv.Dataset:
    random = np.random.default_rng(0)
    windows, targets, owners = [], [], []
    for house in range(HOUSES):
        size, peak, noise = random.uniform(0.5, 2), random.uniform(0, 24), random.uniform(0.02, 0.1)
        hours = np.arange(HOURS)
        power = size * (1 + np.sin(2 * np.pi * (hours - peak) / 24)) / 2 + noise * random.standard_normal(HOURS)
        seen = np.lib.stride_tricks.sliding_window_view(power, WINDOW + 1)
        windows.append(seen[:, :-1, None])  # (windows, hours, features)
        targets.append(seen[:, -1:])
        owners.append(np.full(len(seen), house))
    x, y, owner = (np.concatenate(each) for each in (windows, targets, owners))
    return fedncv.data.from_arrays(x.astype(np.float32), y.astype(np.float32), name="households", owners=owner)


class Forecaster(nn.Module):
    def __init__(self, _shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 16, batch_first=True)
        self.head = nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1])  # type: ignore[no-any-return]


if __name__ == "__main__":
    for method in ("fedavg", "local"):
        result = fedncv.simulate(
            method=method,
            data=households(),
            partition="natural",
            clients=HOUSES,
            per_round=5,
            rounds=6,
            epochs=1,
            batch_size=16,
            model=Forecaster,
            task="regression",
            optimizer="adam",
            lr=0.01,
            metrics=["rmse", "mae"],
        )
        last = result.last
        print(f"{method:7} before: rmse {last['before_rmse']:.3f} kW, mae {last['before_mae']:.3f} kW")
