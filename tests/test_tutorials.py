"""The quickstart and the tutorials: every command on the page runs, in order, and prints what the page shows."""

import runpy
from pathlib import Path

import pytest

TOOL = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "tutorial_pages.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOL["PAGES"])
def test_a_tutorial_runs_and_prints_what_its_page_shows(name, tmp_path):
    page = TOOL["PAGES"][name].read_text(encoding="utf-8")
    played = TOOL["played"](page, tmp_path)
    same = TOOL["without_numbers"]
    assert same(played) == same(page), f"python tools/tutorial_pages.py {name} brings it up to date"
