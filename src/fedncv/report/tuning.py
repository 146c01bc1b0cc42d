"""What tuning tried and chose: the budget, the choice of every method and column, and every trial."""

from html import escape
from typing import Any

from fedncv.report import names
from fedncv.report.gather import Results
from fedncv.study import Study, read_trials

RULES = {
    "before": "the score before local training",
    "after": "the score after local training",
    "mean": "the mean of the scores before and after local training",
}
ONCE = "The best by {by} at the last round, mean over these seeds, was chosen before the reported seeds started."
TWICE = (
    "Two settings were chosen before the reported seeds started, each with runs and a column of its own: the best by "
    "the score before local training, and the best by the one after it, at the last round, mean over these seeds."
)
Row = dict[str, Any]  # of tuning.jsonl


def section(results: Results) -> str:
    """Return the budget, a table of the choices, and all trials; empty if nothing was tuned."""
    study = results.study
    if study is None or study.tuning is None or not study.lr:
        return ""
    rows = read_trials(results.sources[0].folder)
    heads = "".join(f"<th>{escape(column.title)}</th>" for column in results.columns)
    body = []
    for method in study.methods:
        cells = "".join(f"<td>{escape(choice(study, rows, column.name, method))}</td>" for column in results.columns)
        body.append(f"<tr><th>{escape(names.method(results.ids.get(method, method)))}</th>{cells}</tr>")
    said = f"<p class='soft small'>{escape(' '.join(about(study)))}</p>"
    return said + _table(f"<th>Method</th>{heads}", body) + _all(rows, results)


def about(study: Study) -> list[str]:
    """Return the budget and the rule in sentences."""
    tuning = study.tuning
    assert tuning is not None
    seeds = ", ".join(map(str, tuning.seeds))
    many = len(tuning.names) * len(tuning.seeds)
    if tuning.trials:
        tried = f"{tuning.trials} trials: the method as it is named, then random values from its space"
    else:
        tried = f"learning rates {', '.join(f'{lr:g}' for lr in sorted(tuning.grid))}"
    rounds = f", {tuning.rounds} rounds each," if tuning.rounds else ""
    said = [
        f"Every method had the same budget in every column that was tuned: {many} runs{rounds} on seeds {seeds}, which "
        f"are not reported ({tried}).",
        TWICE if tuning.by == "each" else ONCE.format(by=RULES.get(tuning.by, tuning.by)),
        "Edge: the chosen value is the lowest or the highest that was tried, so the best may lie beyond.",
    ]
    taken = {column: study.source(column) for column in study.trial_columns() if study.source(column) != column}
    words = [f"{names.dataset(column)} takes the settings of {names.dataset(other)}" for column, other in taken.items()]
    return said + ([f"Not tuned itself: {'; '.join(words)}."] if words else [])


def choice(study: Study, rows: list[Row], column: str, method: str) -> str:
    """Return the chosen values in words: "lr 0.1, mu 0.3 (trial 5 of 8; edge: lr)"."""
    chosen = study.chosen(column, method)
    if not chosen:
        return "–"
    tuning = study.tuning
    assert tuning is not None
    tried = [row for row in rows if row["method"] == method and row["column"] == study.source(column)]
    taken = next((row for row in tried if column in row["chosen_for"]), None)
    if taken is None:  # a study of an earlier version, with learning rates only
        taken, tried = {"values": chosen, "trial": ""}, [{"values": {"lr": lr}} for lr in tuning.grid]
    words = ", ".join(f"{knob} {_value(value)}" for knob, value in taken["values"].items())
    notes = [f"{taken['trial'].replace('-', ' ')} of {len(tried)}"] if tuning.trials else []
    notes += [f"edge: {', '.join(found)}"] if (found := edges(taken, tried)) else []
    return words + (f" ({'; '.join(notes)})" if notes else "")


def edges(taken: Row, tried: list[Row]) -> list[str]:
    """Return the knobs whose value is the lowest or the highest of at least two that were tried."""
    found = []
    for knob, value in taken["values"].items():
        values = [row["values"][knob] for row in tried if knob in row["values"]]
        numbers = {each for each in values if isinstance(each, int | float) and not isinstance(each, bool)}
        if len(numbers) > 1 and value in (min(numbers), max(numbers)):
            found.append(knob)
    return found


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _all(rows: list[Row], results: Results) -> str:
    """Return a table of every trial; empty if none was recorded."""
    if not rows:
        return ""
    score = results.score
    body = []
    for row in rows:
        values = ", ".join(f"{knob} {_value(value)}" for knob, value in row["values"].items())
        scores = ["failed" if row[m] is None else score.show(row[m], 2) for m in ("before", "after")]
        cells = [names.dataset(row["column"]), row["trial"], values, *scores, ", ".join(row["chosen_for"])]
        name = str(row["method"])
        method = names.method(results.ids.get(name, name))
        body.append(f"<tr><th>{escape(method)}</th>{''.join(f'<td>{escape(each)}</td>' for each in cells)}</tr>")
    heads = ("Method", "Column", "Trial", "Values", "Before", "After", "Chosen for")
    table = _table("".join(f"<th>{head}</th>" for head in heads), body)
    return f"<details><summary>All {len(rows)} trials</summary><div>{table}</div></details>"


def _table(heads: str, body: list[str]) -> str:
    return (
        f"<div class='scroll left'><table><thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )
