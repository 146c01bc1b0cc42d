"""Named runs: functions that return everything a command needs. Add a recipe before adding a flag."""

from collections.abc import Callable
from typing import NamedTuple

from fedncv.config import RunConfig, Settings

SMOKE = ("fedavg", "fedprox", "scaffold", "fedper", "fedncv-paper", "fedncv")


class Recipe(NamedTuple):
    settings: Settings
    methods: tuple[str, ...]
    seeds: tuple[int, ...]

    def configs(self) -> list[RunConfig]:
        """Return the settings of one run for every method and seed."""
        return [
            RunConfig(**vars(self.settings), method=method, seed=seed) for method in self.methods for seed in self.seeds
        ]


def protocol() -> Recipe:
    """The paper's study: 100 clients, Dirichlet(0.1), 10 per round, 100 rounds of 5 local epochs."""
    return Recipe(Settings(), methods=("fedavg",), seeds=(0,))


def smoke() -> Recipe:
    """The built-in digits divided among 20 clients, as in `make run`: a minute or two on a laptop."""
    settings = Settings(clients=20, per_round=5, rounds=20, lr=0.05, eval_every=2)
    return Recipe(settings, methods=SMOKE, seeds=(0, 1))


RECIPES: dict[str, Callable[[], Recipe]] = {"protocol": protocol, "smoke": smoke}
