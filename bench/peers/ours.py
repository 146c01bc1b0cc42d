"""Time fedncv as it is recommended: device cuda, engine auto. ``--seeds 5`` trains five runs together.

    PYTHONPATH=src:bench python bench/peers/ours.py --setting a --rounds 50 --device cuda --data-dir DIR

The runs go through ``fedncv.runner``, as those of ``fedncv.simulate`` and ``fedncv.simulate_many`` do.
"""

import argparse
from importlib import metadata

from peers.settings import Federation
from peers.timing import Clock, arguments_of, federation_of, report

from fedncv.engine.problem import start
from fedncv.runner import LiveRun, Row, train


class Watched(LiveRun):
    """A run that remembers which engine it got."""

    how = ""

    def begin(self, engine: str, layers: str, why: str) -> None:
        self.how = f"engine {engine}, {layers} layers" + (f" ({why})" if why else "")


def main() -> None:
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--seeds", type=int, default=1, help="runs that train together")
    arguments = arguments_of(__doc__, more=more)
    clock = Clock(arguments.rounds, arguments.device)
    federations = [federation_of(arguments, seed) for seed in range(arguments.seeds)]
    first = run(federations, clock, arguments.device)
    peer = "ours"
    if arguments.seeds > 1:
        peer += f", {arguments.seeds} seeds together"
    report(peer, version(), arguments, clock, federations, first.state_dict(), first.how)


def run(federations: list[Federation], clock: Clock, device: str) -> Watched:
    """Train all federations together and return the run of the first."""
    runs: list[Watched] = []
    for federation in federations:
        problem = federation.problem(rounds=clock.last + 1, device=device)
        if runs:
            problem = problem.sharing(runs[0].problem)
        runs.append(Watched(problem, start(problem, runs=len(federations))))

    def on_round(run: LiveRun, row: Row) -> None:
        if row["round"] and run is runs[-1]:
            clock.tick(sum(each.state.totals.samples for each in runs))
        if row["round"] == clock.last:
            run.stop("all rounds are timed")  # before the evaluation of the last round

    train(list(runs), on_round=on_round)
    return runs[0]


def version() -> str:
    try:
        return metadata.version("fedncv")
    except metadata.PackageNotFoundError:  # the source tree itself
        return "source"


if __name__ == "__main__":
    main()
