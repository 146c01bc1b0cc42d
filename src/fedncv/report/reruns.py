"""The same seeds run twice, on other machines, engines or layers: how far their scores lie apart, beside the seeds.

Several folders of one page may hold runs of one method with equal settings and seeds whose numbers differ: rounding is
not the same everywhere, and training amplifies it. Then a lead that is smaller than these gaps says nothing.
"""

from typing import NamedTuple

from fedncv.comparison import summary
from fedncv.figures import APART
from fedncv.report import names
from fedncv.report.gather import Column, Results, same_protocol
from fedncv.results import Score


class Rerun(NamedTuple):
    """One method in one column and metric, in two folders: over the seeds that both have."""

    method: str
    column: str
    metric: str
    seeds: int
    mean: float  # of |difference|
    largest: float
    deviation: float  # between the seeds, in the first folder; nan with one seed

    def words(self, score: Score) -> str:
        points = " points" if score.unit else ""
        between = "" if self.deviation != self.deviation else f"; between seeds {score.show(self.deviation, 2)}"
        return (
            f"{names.method(self.method)}, {self.column} {names.heading(self.metric)}: mean gap "
            f"{score.show(self.mean, 2)}{points}, largest {score.show(self.largest, 2)}{between}"
        )


def reruns(results: Results) -> list[Rerun]:
    """Return the gaps of every method that two folders ran with equal settings and seeds."""
    return [each for column in results.columns for each in _of_column(column)]


def _of_column(column: Column) -> list[Rerun]:
    twice: dict[str, list[str]] = {}
    for name in column.runs:
        if APART in name:
            twice.setdefault(name.partition(APART)[0], []).append(name)
    found = []
    for method, (first, *others) in twice.items():
        for other in others:
            if not same_protocol([*column.runs[first], *column.runs[other]]):
                continue
            for metric in column.shown:
                scores = column.scores(metric)
                one, two = scores.get(first, {}), scores.get(other, {})
                gaps = [abs(one[seed] - two[seed]) for seed in one if seed in two]
                if gaps:
                    of = summary([one[seed] for seed in one if seed in two])
                    found.append(
                        Rerun(method, column.title, metric, len(gaps), sum(gaps) / len(gaps), max(gaps), of.deviation)
                    )
    return found
