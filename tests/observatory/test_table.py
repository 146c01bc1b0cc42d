"""Tables of the probes of the update, on rows made up by hand and on those in docs/results."""

import json
import re
from pathlib import Path

import pytest

from fedncv.methods.older import new_spelling
from fedncv.observatory.table import against_fedavg, common, print_tables, read_rows

DOCS = Path(__file__).parents[2] / "docs"


def row(method, round, mse, *, seed=0, reference="fedavg", full2=2.0, **more):
    where = {"data": "made up", "partition": "iid", "clients": 10, "per_round": 2, "reference": reference}
    return where | {"method": method, "round": round, "seed": seed, "mse": mse, "full2": full2, "times": 1.0} | more


def printed(rows, capsys):
    """(title, {method: its cells, empty ones left out}) of every table."""
    print_tables(rows)
    tables, title = [], ""
    for line in capsys.readouterr().out.splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if line and not line.startswith(" "):
            title = f"{title} {line.strip()}".strip()  # it may take several lines
        elif cells[0] == "method":
            tables.append((title, {}))
            title = ""
        elif len(cells) > 1:
            tables[-1][1][cells[0]] = cells[1:]
    return tables


def test_methods_are_compared_at_the_states_that_all_of_them_have():
    """Round 3 is another model with every seed, so seeds count too."""
    first = [row("fedavg", t, 1.0, seed=s) for s in (0, 1) for t in (1, 2, 3)]
    second = [row("fedprox", 1, 1.0), row("fedprox", 3, 1.0, seed=1)]
    found = [(r["method"], r["seed"], r["round"]) for r in common(first + second)]
    assert found == [("fedavg", 0, 1), ("fedavg", 1, 3), ("fedprox", 0, 1), ("fedprox", 1, 3)]
    apart = [row("fedavg", 1, 1.0), row("fedprox", 2, 1.0)]
    assert common(apart) == apart


def test_errors_are_set_against_a_fedavg_round_from_the_very_same_models():
    rows = [
        row("fedavg", 1, 6.0),
        row("fedavg", 2, 8.0),
        row("fedavg", 2, 5.0, seed=1),
        row("fedncv", 2, 2.0, full2=0.1),  # 8 / 2, whatever the updates' own lengths
        row("fedncv", 2, 10.0, seed=1),  # 5 / 10
        row("fedncv", 3, 1.0),  # FedAvg was not probed there
        row("fedncv", 1, 1.0, reference="fedncv"),  # nor there
        row("scaffold", 1, 1.0, aims=False),
        row("fedvarp", 1, 0.0),  # no error: no ratio
    ]
    assert [(r["method"], r["seed"], r["less"]) for r in against_fedavg(rows)] == [
        ("fedncv", 0, 4.0),
        ("fedncv", 1, 0.5),
    ]


def test_the_tables_give_means_over_common_states_and_count_where_the_noise_is_three_times_less(capsys):
    rows = [row("fedavg", t, mse) for t, mse in ((1, 6.0), (2, 100.0), (3, 12.0))]
    rows += [row("fedncv", t, mse) for t, mse in ((1, 2.0), (3, 4.8))]
    tables = printed(rows, capsys)
    (over_states,) = (table for title, table in tables if "mean over rounds 1, 3; seeds 0" in title)
    assert over_states["fedavg"] == ["9.00", "4.50"]  # (6 + 12) / 2, and that over |full update|² = 2
    assert over_states["fedncv"] == ["3.40", "1.70"]
    (less,) = (table for title, table in tables if "FedAvg round" in title)
    assert less == {"fedncv": ["3.00", "2.50", "2.50", "3.00", "1 of 2"]}  # 6 / 2, 12 / 4.8; lowest, highest
    assert dict(tables)["error by round"]["fedavg"] == ["3.00", "50.0", "6.00"]


@pytest.mark.parametrize("again", [{}, {"lr": 0.1}, {"reference": "fedncv"}])
def test_a_state_that_stands_twice_is_refused(tmp_path, again):
    """As when the same probes were run again into the same file: means would not tell, intervals would shrink."""
    rows = [row("fedncv", 1, 2.0), row("fedncv", 2, 2.0), row("fedavg", 1, 2.0), row("fedncv", 1, 2.0, seed=1)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert read_rows(path) == rows
    with path.open("a") as file:
        file.write(json.dumps(rows[1] | again) + "\n")
    with pytest.raises(ValueError, match="line 5: fedncv, seed 0, round 2 occurs twice"):
        read_rows(path)


def test_intervals_of_nothing_are_left_out(capsys):
    """Three seeds with the same numbers, up to rounding."""
    rows = [row("fedncv", 1, 2.0, seed=s, bias2=1e-29 * s, cosine=1 - 1e-15 * s) for s in (1, 2, 3)]
    (_, table), *_ = printed(rows, capsys)
    assert table["fedncv"] == ["2.00", "1.00", "0", "1.00"]


@pytest.mark.parametrize("name", ["variance_cifar10", "variance_cifar10_own"])
def test_the_gallery_says_what_its_rows_say(name, capsys):
    lines = (DOCS / "gallery.md").read_text().splitlines()
    said = [[cell.strip() for cell in line.split("|") if cell.strip()] for line in lines if line.startswith("| ")]
    tables = printed(read_rows(DOCS / "results" / f"{name}.jsonl"), capsys)
    wanted = [table for title, table in tables if "mean over" in title or "FedAvg round" in title]
    assert len(wanted) >= 2
    for table in wanted:
        for method, cells in table.items():
            assert [todays(method), *cells] in said


def todays(method):
    """The rows were measured before FedNCV became a chain, and have its old spellings."""
    name, _, rest = method.partition(":")
    return new_spelling(name, dict([knob.split("=") for knob in rest.split(",")])) if rest else method
