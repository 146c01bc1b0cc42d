"""Write the generated part of docs/methods/: the description of every method from its code, and the cost of a round.

    python tools/method_index.py && python tools/method_pages.py

The facts about the code come from the index, which the first of the two commands writes.
A page is generated down to a marker; the text below the marker is written by hand and stays.
"""

import json
import runpy
import statistics
from pathlib import Path

from fedncv import catalogue

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "methods"
NEEDS = {
    "sums": "The server needs only weighted sums of these fields ([sums form](../glossary.md#methods)).",
    "each reply": "The server needs each reply ([not in the sums form](../glossary.md#methods)).",
}
MARKER = "<!-- Above: written by tools/method_pages.py. Below: written by hand. -->"
NEW = """
## Known failures of other implementations

None known.
"""
RESULTS = ROOT / "docs" / "results" / "fashion_mnist_all_methods.jsonl"
STUDY = (
    "Fashion-MNIST among 100 clients, Dirichlet(0.1), 20 rounds of 10 clients, 5 local epochs, lr 0.01 for all, "
    "seeds 0 and 1 (mean ± deviation)"
)
COMMAND = "python bench/compare.py --data fashion_mnist --seeds 0,1 --rounds 20 METHOD ..."


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def cost_table(cost, fedavg):
    names = {
        "samples": "samples trained on",
        "gradients": "sample gradients",
        "forwards": "further forward passes",
        "down": "bytes down",
        "up": "bytes up",
        "client": "bytes the client keeps",
        "server": "bytes the server keeps for it",
    }
    return table(
        ("per client and round", "this method", "FedAvg"),
        [(names[k], f"{ours:,}", f"{getattr(fedavg, k):,}") for k, ours in cost._asdict().items()],
    )


def results():
    """Return method -> (before, after) of the study, each a list over seeds in per cent."""
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return {row["variant"]: tuple([100 * v for v in row[k]] for k in ("before", "after")) for row in rows}


def spread(values):
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def result(name):
    found = results()
    if name not in found:
        return "Not in the study of all methods yet."
    before, after = found[name]
    return (
        f"{STUDY}: {spread(before)} % before local training, {spread(after)} % after it. "
        "[All methods side by side](README.md#side-by-side). No published result has this setting."
    )


def side_by_side():
    ranked = sorted(results().items(), key=lambda item: -statistics.mean(item[1][0]))
    rows = [(name, spread(before), spread(after)) for name, (before, after) in ranked]
    text = (
        f"{STUDY}. `fedncv` ran on a CPU, all others on one H200. Methods are not tuned here, and 20 rounds are few: "
        "the table shows that all of them run and learn."
    )
    return f"{text}\n\n```\n{COMMAND}\n```\n\n" + table(("method", "before %", "after %"), rows)


def generated(name, costs):
    entry = catalogue.methods()[name]
    title, _, rest = entry.formula.partition("\n")
    parts = [f"# {name}: {entry.summary}", f"{entry.reference}", f"```text\n{title}\n{rest}\n```", "## Knobs"]
    found = [(f"`{k.name}`", k.kind, f"`{k.default}`", k.meaning) for k in entry.knobs]
    parts.append(table(("knob", "type", "default", "meaning"), found) if found else "None.")
    parts.append("## Sent to the server")
    reveals = [(f"`{field}`", what) for field, what in entry.reveals.items()]
    parts.append(table(("field", "content"), reveals) + f"\n\n{NEEDS[entry.form]}" if reveals else "Nothing.")
    parts.append(f"BatchNorm's running statistics are {entry.buffers}.")
    only = f"only `sgd`: {entry.needs_sgd}" if entry.needs_sgd else "any"
    parts.append(f"[Local optimizer](../optimizers.md): {only}.")
    parts += ["## Cost", cost_table(costs[name], costs["fedavg"])]
    parts.append("[equal_work.md](equal_work.md) describes how these numbers were counted.")
    parts += ["## Logged numbers", "Those in [README.md](README.md#logged-numbers)."]
    parts += ["## Result", result(name)]
    return "\n\n".join([*parts, MARKER]) + "\n"


def index():
    rows = [
        (f"[{name}]({name}.md)", e.summary, e.form, "sgd" if e.needs_sgd else "any", e.reference)
        for name, e in catalogue.methods().items()
    ]
    header = ("method", "meaning", "server needs", "[optimizer](../optimizers.md)", "reference")
    parts = ["# Methods", table(header, rows), "## Side by side", side_by_side(), MARKER]
    return "\n\n".join(parts) + "\n"


def with_hand_written(path, head):
    """Return the generated part, followed by the page's current text below the marker."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    _, found, below = old.partition(MARKER + "\n")
    return head + (below if found else NEW)


def pages(costs):
    """Return file -> text of all pages, generated from the current code."""
    parts = {f"{name}.md": generated(name, costs) for name in catalogue.methods()} | {"README.md": index()}
    return {FOLDER / file: with_hand_written(FOLDER / file, head) for file, head in parts.items()}


def equal_work():
    return runpy.run_path(str(ROOT / "bench" / "equal_work.py"))


if __name__ == "__main__":
    work = equal_work()
    costs = work["measure_all"]()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in (pages(costs) | {work["PAGE"]: work["page"](costs)}).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
