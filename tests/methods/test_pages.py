"""docs/methods/ says what the code says. After a change: python tools/method_pages.py."""

import runpy
from pathlib import Path

import pytest

from fedncv import catalogue
from fedncv.methods import METHODS, SWITCHES, find_method

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "method_pages.py"))


@pytest.fixture(scope="module")
def costs():
    return TOOL["equal_work"]()["measure_all"]()


def test_pages_are_up_to_date(costs):
    stale = [path.name for path, text in TOOL["pages"](costs).items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run python tools/method_pages.py"


def test_the_table_of_work_is_up_to_date(costs):
    work = TOOL["equal_work"]()
    assert work["PAGE"].read_text(encoding="utf-8") == work["page"](costs), "run python tools/method_pages.py"


def test_there_is_a_page_for_every_method_and_no_other():
    pages = {path.stem for path in (ROOT / "docs" / "methods").glob("*.md")}
    assert pages == set(METHODS) | {"README", "equal_work"}


def test_there_is_a_page_for_every_switch_with_its_pitfalls_and_no_other():
    pages = {path.stem: path for path in (ROOT / "docs" / "methods" / "switches").glob("*.md")}
    assert set(pages) == set(SWITCHES) | {"README"}
    for name in SWITCHES:
        generated, _, below = pages[name].read_text(encoding="utf-8").partition(TOOL["MARKER"])
        assert generated.startswith(f"# +{name}: ")
        assert "## Result\n" in generated
        assert "## Pitfalls that are avoided here\n" in below


def test_the_results_of_a_switch_are_rows_of_the_ablation():
    """FedAvg with and without the label prior, as docs/results/README.md has them: 39 points before, -1 after."""
    text = TOOL["ablated"]("prior")
    assert "| FedAvg | 45.61 ± 4.95 | 83.35 ± 1.47 |" in text
    assert "| FedAvg + prior | 84.61 ± 0.43 | 82.30 ± 1.34 |" in text
    assert TOOL["ablated"]("labels") == "Not in the ablation."


def test_every_page_says_where_others_go_wrong_and_what_was_measured():
    for name in METHODS:
        text = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
        generated, _, below = text.partition(TOOL["MARKER"])
        assert "## Result\n" in generated
        assert "## Known failures of other implementations" in below


def test_every_file_gives_formula_reference_and_departures():
    for method in catalogue.methods().values():
        text = method.formula
        assert "https://arxiv.org/abs/" in text or "docs/theory.md" in text
        assert "Departures from the paper:" in text or "docs/theory.md" in text


def test_every_knob_is_explained():
    for method in catalogue.methods().values():
        assert all(knob.meaning for knob in method.knobs)


def test_the_table_of_switches_says_which_methods_take_them():
    text = (ROOT / "docs" / "methods" / "README.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `+")]
    assert [row[0].strip("`+") for row in rows] == list(SWITCHES)
    for switch, _, _, refused, already, keeps in rows:
        chains = {name: taken(name + switch.strip("`")) for name in METHODS}
        has = [name for name, entry in METHODS.items() if switch.strip("`+") in entry.make().switches]
        assert already.split(", ") == (has or ["–"])
        assert refused.split(", ") == ([name for name in METHODS if not chains[name] and name not in has] or ["–"])
        same = all(chain.form == METHODS[name].make().form for name, chain in chains.items() if chain)
        assert keeps.startswith("yes" if same else "no")


def taken(chain):
    """The method, or None where the chain is refused."""
    try:
        return find_method(chain)
    except ValueError:
        return None
