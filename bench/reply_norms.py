"""Norms of honest replies against the median of their round: what `times_median` in rules.toml must not refuse.

    python bench/reply_norms.py --rounds 10

For every method, on the digits: ten clients of very unequal sizes (the largest makes many times the local steps of the
smallest), all of them in every round. For every field of a reply, the largest norm of a round divided by the lower
median of the round; the same for every pair of clients; and divided by the norm of what was sent (``outliers`` of
``fedncv.flower.rules`` has the rule).
"""

import argparse
from collections.abc import Iterable
from itertools import combinations

import numpy as np

from fedncv.config import RunConfig
from fedncv.engine.local import train
from fedncv.engine.problem import arrivals, build, start
from fedncv.engine.round import draw, of_client, settle
from fedncv.engine.sequential import one_thread
from fedncv.flower.halves import Up, travelling
from fedncv.flower.rules import lower_median, norms_of
from fedncv.methods import METHODS
from fedncv.tree import num_bytes

MORE = ["fedavg+memory:beta=learned", "fedncv:drift.alpha=learned,average=2+memory:beta=learned"]


def ratio(norms: Iterable[float]) -> float:
    """Return the largest norm of one field over the lower median; 0 if the median is zero."""
    norms = list(norms)
    middle = lower_median(norms)
    return max(norms) / middle if middle > 0 else 0.0


def measure(config: RunConfig) -> tuple[dict[str, tuple[float, ...]], list[int]]:
    """Return field -> (ratio of all, of pairs, largest norm over that of what was sent), and the clients' sizes."""
    problem, found = build(config), dict[str, tuple[float, ...]]()
    state = start(problem)
    for t in range(config.rounds):
        here = problem.at(t)
        drawn = draw(here, t)
        outcomes, norms, scale = [], dict[str, list[float]](), 0.0
        for arrival in arrivals(here, state, drawn.ids):
            trained = train(here, t, arrival)
            if trained is not None:
                scale = max(scale, *norms_of(arrival.down).values(), 0.0)
                for name, norm in norms_of(Up(trained.up, travelling(here, trained.buffers_R))).items():
                    norms.setdefault(name, []).append(norm)
            outcomes.append(of_client(here, arrival.client, num_bytes(arrival.down), trained))
        state, _ = settle(here, state, drawn, outcomes)
        for name, values in norms.items():
            pairs = max((ratio(pair) for pair in combinations(values, 2)), default=0.0)
            now = (ratio(values), pairs, max(values) / max(1.0, scale))
            found[name] = tuple(map(max, found.get(name, (0.0, 0.0, 0.0)), now))
    sizes = [len(part) for part in problem.clients.train]
    return found, sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--methods", nargs="*", default=[*METHODS, *MORE])
    chosen = parser.parse_args()
    for method in chosen.methods:
        config = RunConfig(
            method=method, model=chosen.model, clients=10, per_round=10, rounds=chosen.rounds, epochs=2, batch_size=8,
            eval_every=0, lr=0.05, partition="dirichlet:alpha=0.1,min_samples=5",
        )  # fmt: skip
        try:
            with one_thread(), np.errstate(all="ignore"):
                found, sizes = measure(config)
        except ValueError as error:
            print(f"{method}: {error}")
            continue
        for name, (all_, pairs, scale) in found.items():
            print(
                f"{method:50} {name:20} largest/median {all_:10.3g}  of pairs {pairs:10.3g}  /down {scale:10.3g}"
                f"   sizes {min(sizes)}..{max(sizes)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
