"""The section on variance: drawn and tabled where a run was probed, absent where none was."""

import json
import math
import re

import pytest
from made_up_runs import made_up_study, write_study

from fedncv.report import series, variance
from fedncv.report.gather import gather
from fedncv.report.write import write

NUMBERS = ("signal", "within", "between", "snr", "sampling", "batches")


def value(name, method, seed, t):
    """Something of its own for every number, method, seed and round."""
    return (1 + NUMBERS.index(name)) * (10.0 if method == "fedavg" else 1.0) / (1 + t) * (1 + 0.1 * seed)


def probed_study(folder, *, seeds=(0,), methods=("fedavg", "scaffold"), sampling=True):
    """Runs with a probe every ten rounds; SCAFFOLD's were not probed."""
    study = made_up_study(seeds=seeds, methods=(*methods, "fedncv"))
    write_study(folder, study)
    for cell in study.cells():
        if cell.config.method == "scaffold":
            continue
        path = folder / cell.folder / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows[::10]:
            for name in NUMBERS:
                v = value(name, cell.config.method, cell.config.seed, row["round"])
                if name == "sampling" and not sampling:
                    v = 0.0
                row |= {f"variance_{name}": v, f"variance_{name}_low": v / 2 or None, f"variance_{name}_high": 3 * v}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return gather(folder)


def dots(text, method):
    """(number, round, value, x, y) of every dot in a method's picture."""
    figure = re.search(rf'<figure data-method="{method}">.*?</figure>', text).group()
    pattern = (
        r'<circle cx="(.*?)" cy="(.*?)" r="2" fill=".*?" data-number="(\w+)" data-round="(\d+)" data-value="(.*?)"'
    )
    return [(n, int(t), float(v), float(x), float(y)) for x, y, n, t, v in re.findall(pattern, figure)]


def test_where_nothing_was_probed_there_is_no_section(tmp_path):
    assert variance.section(gather(write_study(tmp_path / "plain", made_up_study()))) == ""
    text = write(tmp_path / "plain")[0].read_text()
    assert 'id="variance"' not in text
    other = gather(write_study(tmp_path / "other", made_up_study(), variance=True))  # measured, but not the split
    assert variance.section(other) == ""


def test_methods_that_were_probed_are_drawn_and_the_others_are_not(tmp_path):
    text = variance.section(probed_study(tmp_path))
    assert re.findall(r'<figure data-method="(.*?)"', text) == ["fedavg", "fedncv"]
    assert re.findall(r'<tr data-method="(.*?)"', text) == ["fedavg", "fedncv"]
    assert 'id="variance"' in write(tmp_path)[0].read_text()


def test_every_dot_stands_where_its_value_says_on_one_axis_for_all_methods(tmp_path):
    text = variance.section(probed_study(tmp_path))
    found = dots(text, "fedavg") + dots(text, "fedncv")
    assert len(found) == 2 * 4 * 3  # methods, lines, probes
    for method in ("fedavg", "fedncv"):
        for name, t, v, _, _ in dots(text, method):
            assert v == pytest.approx(value(name, method, 0, t), rel=1e-5)
    (_, _, v0, _, y0), (_, _, v1, _, y1) = min(found, key=lambda d: d[2]), max(found, key=lambda d: d[2])
    for _, t, v, x, y in found:
        share = math.log(v / v0) / math.log(v1 / v0)
        assert y == pytest.approx(y0 + share * (y1 - y0), abs=0.15)
        assert x == pytest.approx(variance.LEFT + t / 20 * (variance.WIDTH - variance.LEFT - variance.RIGHT), abs=0.06)
    assert y1 < y0  # more is higher


def test_with_one_seed_the_interval_is_the_probes_own_over_clients(tmp_path):
    (column,) = probed_study(tmp_path).columns
    v = value("between", "fedncv", 0, 20)
    assert variance.at_the_end(column, "fedncv", "between") == pytest.approx((v, v / 2, 3 * v))


def test_with_several_seeds_the_interval_is_over_seeds(tmp_path):
    """Three values v, 1.1 v, 1.2 v: mean 1.1 v, deviation 0.1 v, t(0.975, 2) = 4.3027."""
    (column,) = probed_study(tmp_path, seeds=(0, 1, 2)).columns
    v, half = value("within", "fedavg", 0, 20), 4.3027 * 0.1 / math.sqrt(3)
    found = variance.at_the_end(column, "fedavg", "within")
    assert found == pytest.approx((1.1 * v, (1.1 - half) * v, (1.1 + half) * v), rel=1e-4)


def test_a_variance_of_zero_is_in_the_table_and_not_in_the_picture(tmp_path):
    text = variance.section(probed_study(tmp_path, sampling=False))
    assert {name for name, *_ in dots(text, "fedavg")} == {"within", "between", "signal"}
    assert '<td data-value="0"><span class="mean">0</span></td>' in text


def test_ends_of_intervals_are_no_curves(tmp_path):
    (column,) = probed_study(tmp_path).columns
    mine = {metric for metric in series.curves(column) if metric.startswith("variance")}
    assert mine == {f"variance_{name}" for name in NUMBERS}


def test_of_many_methods_fedavg_and_the_most_accurate_are_drawn_and_all_are_in_the_table(tmp_path):
    """FedAvg is the least accurate of the made-up methods, FedNCV the most."""
    more = tuple(f"fedprox:mu={i}" for i in range(1, 17))
    text = variance.section(probed_study(tmp_path, methods=("fedavg", *more)))
    assert re.findall(r'<figure data-method="(.*?)"', text) == ["fedavg", *more[-12:], "fedncv"]
    assert "14 of 18 methods are plotted" in text
    assert re.findall(r'<tr data-method="(.*?)"', text) == ["fedavg", *more, "fedncv"]
