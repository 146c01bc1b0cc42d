"""docs/theory.md carries the verdicts that the code gives today."""

from pathlib import Path

import pytest

from fedncv.cli.theory import into_page, markdown
from fedncv.theory import STATEMENTS

PAGE = Path(__file__).parents[2] / "docs" / "theory.md"


@pytest.mark.slow
def test_the_pages_table_is_up_to_date(decide):
    page = PAGE.read_text(encoding="utf-8")
    table = markdown([(statement, decide(statement)) for statement in STATEMENTS])
    assert table in page, "fedncv theory --markdown docs/theory.md brings it up to date"
    assert into_page(page, table) == page


def test_statements_name_sections_that_exist():
    headings = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("## ")]
    for source in {s.source for s in STATEMENTS if s.source.startswith("docs, section ")}:
        number = source.removeprefix("docs, section ")
        assert any(line.startswith(f"## {number}. ") for line in headings), source
