"""The paper's claims, our measurements, and whether the two agree.

A claim about one dataset is judged only by the finished runs of that dataset. "First" and "least" are tested as
in `fedncv.comparison`, by paired 95 % intervals; "among the best k" compares means, as in the paper.
"""

import math
from typing import NamedTuple

from fedncv.comparison import Column as Compared
from fedncv.comparison import compare, summary
from fedncv.report import names
from fedncv.report.gather import Column, Results
from fedncv.report.names import OURS
from fedncv.report.paper import COLUMNS, DECLINE, PLACE, ROWS, SIZES, TWELVE, printed
from fedncv.report.table import METRICS, MainTable, percent, spread

AGREES, PARTLY, DIFFERS, OPEN = "agrees", "agrees in part", "does not agree", "open"


class Claim(NamedTuple):
    where: str
    paper: str
    measured: str
    verdict: str
    why: str


def claims(results: Results, table: MainTable) -> list[Claim]:
    """Return every claim of the paper that these runs can judge."""
    if not results.score.unit:
        return []  # the paper has only accuracies
    found: list[Claim] = []
    for column in results.columns:
        if "clients-" in column.name or not column.as_in_paper:
            continue
        if not results.is_of_paper and OURS not in column.runs:  # somebody's own comparison on a dataset of the paper
            continue
        if column.data in COLUMNS and not about_parts(column):
            found += [_first(column, table), _values(column)]
        if column.data in PLACE:
            found.append(_place(column, table))
    sizes: dict[str, dict[int, Column]] = {}
    for column in results.columns:
        if "clients-" in column.name and column.as_in_fig2:
            sizes.setdefault(column.data, {})[column.clients] = column
    return found + [_decline(data, columns) for data, columns in sizes.items()]


def about_parts(column: Column) -> bool:
    """Return whether there are more variants of FedNCV than methods of Table 1; such a study judges no claims."""
    variants = [method for method in column.runs if method.startswith(f"{OURS}:")]
    return len(variants) > len([method for method in ROWS if method in column.runs])


def headline(results: Results, table: MainTable, found: list[Claim]) -> str:
    """Return the main result in a few sentences."""
    if not results.num_finished:
        return "No run is finished yet."
    counted = {verdict: sum(1 for claim in found if claim.verdict == verdict) for verdict in (AGREES, PARTLY, DIFFERS)}
    judged = sum(counted.values())
    parts = []
    if judged:
        part = f", {counted[PARTLY]} in part" if counted[PARTLY] else ""
        parts.append(f"{counted[AGREES]} of {judged} claims of the paper agree with the measurements{part}.")
    elif not found and results.is_of_paper:
        parts.append("These runs do not follow the paper's protocol, so none of its claims is judged by them.")
    tested = [s for s in table.standings if not math.isnan(s.p)]
    firsts = [s for s in tested if s.survives]
    if firsts:
        wins: dict[str, int] = {}
        for standing in firsts:
            wins[standing.first or ""] = wins.get(standing.first or "", 0) + 1
        words = [f"{names.method(m)} in {n}" for m, n in sorted(wins.items(), key=lambda item: -item[1])]
        parts.append(f"Significantly first, after Holm's correction over {len(tested)} columns: {', '.join(words)}.")
    elif tested:
        parts.append(f"After Holm's correction over {len(tested)} columns no method is significantly first in any.")
    elif len(results.methods) == 1:
        parts.append(_alone(results, table))
    else:
        parts.append("No method is called first: this needs at least two methods with two common seeds.")
    if results.missing:
        count = len(results.missing)
        parts.append(f"{count} run{'s are' if count > 1 else ' is'} missing, so this result is not final.")
    return " ".join(parts)


def _alone(results: Results, table: MainTable) -> str:
    """Return the scores of the only method."""
    (method,) = results.methods
    said = []
    for column in results.columns:
        entries = [
            (metric, table.entries[column.name, metric, method].ours) for metric in METRICS if metric in column.shown
        ]
        found = [f"{spread(ours, table.score)}{table.score.unit} {metric}" for metric, ours in entries if ours]
        said += [f"{column.title}: {' and '.join(found)} local training"] if found else []
    return f"{names.method(method)}, {table.score.name} on {'; '.join(said)}." if said else "Nothing is measured yet."


def standing_words(table: MainTable, column: Column, metric: str) -> str:
    """Return which method is first in a column, or which are not significantly different."""
    standing = table.standing(column.name, metric)
    if standing is None:
        return "nothing measured"
    if standing.first:
        held = "" if standing.survives else ", but not after Holm's correction"
        return f"{names.method(standing.first)} is first{held}"
    others = [names.method(method) for method in standing.level[1:]]
    best = names.method(standing.best)
    return f"{best} leads, not significantly different from {', '.join(others)}" if others else "nothing to compare"


def _first(column: Column, table: MainTable) -> Claim:
    """Table 1: FedNCV is the best of seven, before and after."""
    values = {metric: printed(column.data, OURS, metric) for metric in METRICS}
    paper = "FedNCV is the best of seven: " + ", ".join(
        f"{value.mean:.2f} {metric}" for metric, value in values.items() if value
    )
    where = f"Table 1, {column.title}"
    if any(OURS not in column.scores(metric) for metric in METRICS):
        return Claim(where, paper, "no finished run of FedNCV with a score here", OPEN, "")
    rivals = [method for method in ROWS if method in column.runs and method != "fedncv-paper"]
    compared, words = [], []
    for metric in METRICS:
        scores = column.scores(metric)
        seven = compare({method: scores[method] for method in rivals if method in scores})
        ours = percent(summary(list(scores[OURS].values())))
        compared.append(seven)
        words.append(
            f"{spread(ours, table.score)} {metric} ({_ordinal(seven.order.index(OURS) + 1)} of {len(seven.order)})"
        )
    absent = [method for method in ROWS if method not in column.runs and method != "fedncv-paper"]
    verdict, without = _in_part(_judged(compared), absent)
    why = [f"{metric}, of all in the table: {standing_words(table, column, metric)}" for metric in METRICS]
    return Claim(where, paper, ", ".join(words), verdict, "; ".join(why + without))


def _judged(compared: list[Compared]) -> str:
    """Return whether FedNCV is first in all of them; open if one cannot be tested, with a single seed or method."""
    if any(math.isnan(each.p) for each in compared):
        return OPEN
    firsts = [each.first == OURS for each in compared]
    return AGREES if all(firsts) else PARTLY if any(firsts) else DIFFERS


def _in_part(verdict: str, absent: list[str]) -> tuple[str, list[str]]:
    """Turn "agrees" into "agrees in part" if some methods are absent, and list these."""
    if not absent:
        return verdict, []
    return PARTLY if verdict == AGREES else verdict, [f"without {', '.join(map(names.method, absent))}"]


def _values(column: Column) -> Claim:
    """Table 1: the numbers themselves."""
    inside, total, gaps = 0, 0, []
    for metric in METRICS:
        for method, seeds in column.scores(metric).items():
            value = printed(column.data, method, metric)
            if value is None or method == "fedncv-paper":
                continue
            ours = percent(summary(list(seeds.values())))
            total += 1
            half = value.deviation
            low, high = (ours.low, ours.high) if ours.num_seeds > 1 else (ours.mean, ours.mean)
            inside += low <= value.mean + half and value.mean - half <= high
            gaps.append(ours.mean - value.mean)
    where = f"Table 1, {column.title}, the numbers"
    paper = "mean and deviation of each method, from one protocol"
    if not total:
        return Claim(where, paper, "none of its methods finished here", OPEN, "")
    measured = f"{inside} of {total} printed values are within their deviation of our 95 % interval"
    measured += f"; ours minus the paper's: {min(gaps):+.1f} to {max(gaps):+.1f} points"
    verdict = AGREES if inside == total else PARTLY if 2 * inside >= total else DIFFERS
    why = (
        "The paper averages over the ten clients of the last rounds, we over all clients; "
        "its deviations seem to be over rounds, ours are over seeds."
    )
    prior = column.prior()
    best = max((v.mean for m in ROWS for k in METRICS if (v := printed(column.data, m, k))), default=0.0)
    if prior is not None and 100 * prior > best:
        why = (
            f"Every printed value is at most {best:.2f}, below the {100 * prior:.1f} that predicting each client's "
            "majority class reaches without learning. So its partition was probably not the stated one."
        )
    return Claim(where, paper, measured, verdict, why)


def _place(column: Column, table: MainTable) -> Claim:
    """Fig. 3: FedNCV's final place among twelve."""
    place = PLACE[column.data]
    where, paper = f"Fig. 3, {column.title}", f"FedNCV ends among the best {place} of twelve, before local training"
    scores = column.scores("before")
    if OURS not in scores:
        return Claim(where, paper, "no finished run of FedNCV here", OPEN, "")
    scores = {method: seeds for method, seeds in scores.items() if method not in ("local", "fedncv-paper")}
    column_of = compare(scores)
    ours = column_of.order.index(OURS) + 1
    value = percent(summary(list(scores[OURS].values())))
    measured = f"{_ordinal(ours)} of {len(scores)} with {spread(value, table.score)}"
    level = [names.method(m) for m in column_of.level if m != OURS]
    why = [f"no significant difference to {', '.join(level)}"] if OURS in column_of.level and level else []
    absent = [method for method in TWELVE if method not in scores]
    verdict, without = _in_part(AGREES if ours <= place else DIFFERS, absent)
    return Claim(where, paper, measured, verdict, "; ".join(why + without))


def _decline(data: str, columns: dict[int, Column]) -> Claim:
    """Fig. 2: FedNCV loses least from few to many clients, seed by seed."""
    paper = "from 100 to 1,000 clients (EMNIST) FedNCV loses least: " + ", ".join(
        f"{names.method(method)} {before}/{after}" for method, (before, after) in DECLINE.items()
    )
    where = f"Fig. 2, {names.dataset(data)}"
    if any(n not in columns or OURS not in columns[n].runs for n in SIZES):
        return Claim(where, paper, "no finished runs of FedNCV at both sizes", OPEN, "")
    few, many = (columns[n] for n in SIZES)
    compared, words = [], []
    for metric in METRICS:
        lost = {}
        for method in DECLINE:
            a, b = few.scores(metric).get(method, {}), many.scores(metric).get(method, {})
            if both := set(a) & set(b):
                lost[method] = {seed: b[seed] - a[seed] for seed in both}  # larger is better
        if len(lost) < 2 or OURS not in lost:
            return Claim(
                where, paper, "FedNCV and another method of Fig. 2 do not share a seed at both sizes", OPEN, ""
            )
        compared.append(compare(lost))
        each = [f"{names.method(m)} {-100 * summary(list(seeds.values())).mean:.2f}" for m, seeds in lost.items()]
        words.append(f"{metric} {', '.join(each)}")
    absent = [method for method in DECLINE if method not in lost]
    verdict, without = _in_part(_judged(compared), absent)
    span = f"points lost from {few.clients:,} to {many.clients:,} clients: {'; '.join(words)}"
    sure = all(each.first == OURS for each in compared)
    why = [] if sure else ["the smallest mean loss is not enough: paired intervals must be above zero"]
    why += without
    why += [] if data == "emnist" else [f"the paper used EMNIST, these runs {names.dataset(data)}"]
    return Claim(where, paper, span, verdict, "; ".join(why))


def _ordinal(n: int) -> str:
    ending = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"
