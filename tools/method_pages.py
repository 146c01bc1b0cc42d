"""Write the generated part of docs/methods/: every method and switch from its code, and the cost of a round.

    python tools/method_index.py && python tools/method_pages.py

The facts about the code come from the index, which the first of the two commands writes.
A page is generated down to a marker; the text below the marker is written by hand and stays.
"""

import json
import re
import runpy
import statistics
from pathlib import Path

from fedncv import catalogue
from fedncv.methods import find_method

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
NEW_SWITCH = """
## Pitfalls that are avoided here

None known.
"""
RESULTS = ROOT / "docs" / "results" / "fashion_mnist_all_methods.jsonl"
STUDY = (
    "Fashion-MNIST among 100 clients, Dirichlet(0.1), 20 rounds of 10 clients, 5 local epochs, lr 0.01 for all, "
    "seeds 0 and 1 (mean ± deviation)"
)
ABLATION = ROOT / "docs" / "results" / "ablation_parts.md"
ABLATED = {
    "memory": ("FedAvg", "FedAvg with server memory", "FedNCV", "FedNCV with server memory"),
    "drift": ("FedAvg", "FedAvg with drift correction", "FedNCV", "FedNCV without drift correction"),
    "blend": ("FedAvg", "FedAvg with blend", "FedNCV", "FedNCV without blend"),
    "even": ("FedAvg", "FedAvg + even", "FedNCV", "FedNCV without even samples"),
    "samples": ("FedNCV", "FedNCV with sample level (SAGA)"),
    "prior": ("FedAvg", "FedAvg + prior", "SCAFFOLD", "SCAFFOLD + prior", "FedNCV", "FedNCV without label prior"),
    "momentum": ("FedAvg", "FedAvg + momentum", "FedNCV", "FedNCV without momentum"),
    "average": ("FedAvg", "FedAvg + average", "FedNCV", "FedNCV without average"),
}
"""Switch -> the rows of the ablation that show what it does."""
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


def on_cpu():
    """Return the variants of the study that did not run on the GPU."""
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return [row["variant"] for row in rows if row.get("device") == "cpu"]


def cited(reference):
    """Return a reference with its links."""
    linked = re.sub(r"arXiv:([\d.]+\d)", r"[arXiv:\1](https://arxiv.org/abs/\1)", reference)
    return linked.replace("docs/theory.md", "[theory](../theory.md)")


def spread(values):
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def result(name):
    found = results()
    if name not in found:
        return "Not in the study of all methods yet."
    before, after = found[name]
    where = f"{STUDY}, on a CPU" if name in on_cpu() else STUDY
    return (
        f"{where}: {spread(before)} % before local training, {spread(after)} % after it. "
        "[All methods side by side](README.md#side-by-side). No published result has this setting.\n\n"
        f"```\n{COMMAND.replace('METHOD ...', name)}\n```"
    )


def side_by_side():
    ranked = sorted(results().items(), key=lambda item: -statistics.mean(item[1][0]))
    rows = [(name, spread(before), spread(after)) for name, (before, after) in ranked]
    names = ", ".join(f"`{name}`" for name in on_cpu())
    missing = ", ".join(f"`{name}`" for name in catalogue.methods() if name not in results())
    still = f" Not measured yet: {missing}." if missing else ""
    text = (
        f"{STUDY}. On a CPU: {names}; all others on one H200.{still} Methods are not tuned here, and 20 rounds "
        "are few: the table shows that all of them run and learn."
    )
    return f"{text}\n\n```\n{COMMAND}\n```\n\n" + table(("method", "before %", "after %"), rows)


def generated(name, costs):
    entry = catalogue.methods()[name]
    title, _, rest = entry.formula.partition("\n")
    parts = [f"# {name}: {entry.summary}", cited(entry.reference), f"```text\n{title}\n{rest}\n```", "## Knobs"]
    found = [(f"`{k.name}`", k.kind, f"`{k.default}`", k.meaning) for k in entry.knobs]
    parts.append(table(("knob", "type", "default", "meaning"), found) if found else "None.")
    parts.append("## Sent to the server")
    reveals = [(f"`{field}`", what) for field, what in entry.reveals.items()]
    parts.append(table(("field", "content"), reveals) + f"\n\n{NEEDS[entry.form]}" if reveals else "Nothing.")
    parts.append(f"BatchNorm's running statistics are {entry.buffers}.")
    only = f"only `sgd`: {entry.needs_sgd}" if entry.needs_sgd else "any"
    parts.append(f"[Local optimizer](../optimizers.md): {only}.")
    parts += ["## Cost", cost_table(costs[name], costs["fedavg"])]
    parts.append("[Equal work](equal_work.md) describes how these numbers were counted.")
    parts += ["## Logged numbers", "Those in [the table of all methods](README.md#logged-numbers)."]
    parts += ["## Result", result(name)]
    return "\n\n".join([*parts, MARKER]) + "\n"


def switch(name):
    """Return the generated part of a switch's page."""
    entry = catalogue.switches()[name]
    title, _, rest = entry.formula.partition("\n")
    parts = [f"# +{name}: {entry.summary}", f"```text\n{title}\n{rest}\n```", "## Knobs"]
    found = [(f"`{k.name}`", k.kind, f"`{k.default}`", k.meaning) for k in entry.knobs]
    parts.append(table(("knob", "type", "default", "meaning"), found) if found else "None.")
    method, plain = find_method(f"fedavg+{name}"), find_method("fedavg")
    parts += ["## Sent to the server", f"With `fedavg+{name}`:"]
    reveals = [(f"`{field}`", what, "every round") for field, what in method.reveals.items()]
    reveals += [(f"`{field}`", what, "once, when the client joins") for field, what in method.joining.items()]
    parts.append(table(("field", "content", "when"), reveals))
    form = (
        "needs only weighted sums of the replies, as FedAvg's does" if method.form == plain.form else "needs each reply"
    )
    parts.append(f"The server {form} ([sums form](../../glossary.md#methods)).")
    parts += ["## Result", ablated(name)]
    return "\n\n".join([*parts, MARKER]) + "\n"


def ablated(name):
    """Return the rows of the ablation for a switch, with the command that makes the table."""
    if name not in ABLATED:
        return "Not in the ablation."
    lines = ABLATION.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    rows = {row[0]: row[1:3] for row in cells}
    text = (
        "CIFAR-10, 100 clients, Dirichlet(0.1), 10 clients per round, 100 rounds, LeNet5, one H200; mean ± deviation "
        "over seeds 0 to 2, per cent. [What each part is worth](../../results/README.md#what-each-part-is-worth) has "
        "all variants, their learning rates and paired intervals. From the raw metrics in "
        "`docs/results/ablation.tar.xz`:\n\n```\nmake results\n```"
    )
    found = [(row, *rows[row]) for row in ABLATED[name]]
    return f"{text}\n\n{table(('method', 'before %', 'after %'), found)}"


def switch_index():
    rows = [(f"[+{name}]({name}.md)", entry.summary) for name, entry in catalogue.switches().items()]
    text = (
        "A switch is a part that works on any method it is defined for: `fedavg+prior`, "
        "`scaffold+prior+momentum:beta=0.5`. [A table](../README.md#switches) says which methods take which switch. "
        "They are applied in this order, whatever order they are written in."
    )
    return f"# Switches\n\n{text}\n\n{table(('switch', 'effect'), rows)}\n"


def index():
    rows = [
        (f"[{name}]({name}.md)", e.summary, e.form, "sgd" if e.needs_sgd else "any", cited(e.reference))
        for name, e in catalogue.methods().items()
    ]
    header = ("method", "meaning", "server needs", "[optimizer](../optimizers.md)", "reference")
    parts = ["# Methods", table(header, rows), "## Side by side", side_by_side(), MARKER]
    return "\n\n".join(parts) + "\n"


def with_hand_written(path, head, new=NEW):
    """Return the generated part, followed by the page's current text below the marker."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    _, found, below = old.partition(MARKER + "\n")
    return head + (below if found else new)


def pages(costs):
    """Return file -> text of all pages, generated from the current code."""
    parts = {f"{name}.md": generated(name, costs) for name in catalogue.methods()} | {"README.md": index()}
    written = {FOLDER / file: with_hand_written(FOLDER / file, head) for file, head in parts.items()}
    for name in catalogue.switches():
        path = FOLDER / "switches" / f"{name}.md"
        written[path] = with_hand_written(path, switch(name), NEW_SWITCH)
    return written | {FOLDER / "switches" / "README.md": switch_index()}


def equal_work():
    return runpy.run_path(str(ROOT / "bench" / "equal_work.py"))


if __name__ == "__main__":
    work = equal_work()
    costs = work["measure_all"]()
    (FOLDER / "switches").mkdir(parents=True, exist_ok=True)
    for path, text in (pages(costs) | {work["PAGE"]: work["page"](costs)}).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
